//! The weights: rows are computed from the seed and the row index; none is stored.

use foretoken::Isa;
use foretoken_kernels::{ColumnsMut, ElementType, Elements, gemm, vocabulary};
use rayon::prelude::*;

/// Rows that are generated, multiplied and encoded together.
pub const ROWS: usize = 64;

/// SplitMix64: starting a stream is free, and there is one for each row.
pub struct Random(u64);

impl Random {
    /// The stream of row `row` of table `table`.
    pub fn new(seed: u64, table: &str, row: u64) -> Self {
        let fold = |state: u64, part: u64| Self(state ^ part.wrapping_mul(0x9e37_79b9_7f4a_7c15)).next();
        let state = table.bytes().fold(fold(0, seed), |state, byte| fold(state, byte.into()));
        Self(fold(state, row))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Fills `out` with numbers of mean 0 and standard deviation `std`: sums of four uniform numbers, close
    /// enough to normal here and several times as fast.
    pub fn fill(&mut self, std: f32, out: &mut [f32]) {
        // Four of 0..=65535: twice the mean each, a third of the square each.
        const MEAN: f32 = 2.0 * 65_535.0;
        const DEVIATION: f32 = 37_837.2;
        let scale = std / DEVIATION;
        for x in out {
            let bits = self.next();
            let sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
            *x = (sum as f32 - MEAN) * scale;
        }
    }
}

/// The weights of an echo model: `E`, computed on demand, and the projection `P`.
pub struct Echo {
    seed: u64,
    hidden: usize,
    assistant: usize,     // width of the assistant
    projection: Vec<f32>, // P: (assistant, hidden)
}

impl Echo {
    pub fn new(seed: u64, hidden: usize, assistant: usize) -> Self {
        let mut echo = Self { seed, hidden, assistant, projection: vec![0.0; assistant * hidden] };
        for (i, row) in (0..).zip(echo.projection.chunks_exact_mut(hidden)) {
            Random::new(seed, "projection", i).fill(1.0 / (hidden as f32).sqrt(), row);
        }
        echo
    }

    /// Rows of `E` from `first` on: `(rows, hidden)`.
    pub fn embedding(&self, first: usize, out: &mut [f32]) {
        let std = 1.0 / (self.hidden as f32).sqrt();
        for (i, row) in (first as u64..).zip(out.chunks_exact_mut(self.hidden)) {
            Random::new(self.seed, "embedding", i).fill(std, row);
        }
    }

    /// Rows of the assistant's embedding from `first` on, `(rows, assistant)`: those of `E P^T`, of length 1, so that
    /// each is closest to itself.
    pub fn assistant_embedding(&self, first: usize, out: &mut [f32]) {
        let rows = out.len() / self.assistant;
        let mut x = vec![0.0; rows * self.hidden];
        self.embedding(first, &mut x);
        let y = ColumnsMut::new(out, rows, self.assistant);
        let x = gemm::PreparedRows::new(Isa::best(), ElementType::F32, &x, self.hidden, &mut []);
        gemm::matmul(Isa::best(), x, Elements::F32(&self.projection), y);
        out.chunks_exact_mut(self.assistant).for_each(normalize);
    }

    /// Rows of the pre-projection from `first` on, `(rows, 2 * hidden)`: `P` for the token's embedding, nothing for the
    /// target's state.
    pub fn pre_projection(&self, first: usize, out: &mut [f32]) {
        for (row, out) in
            self.projection.chunks_exact(self.hidden).skip(first).zip(out.chunks_exact_mut(2 * self.hidden))
        {
            let (embedding, state) = out.split_at_mut(self.hidden);
            embedding.copy_from_slice(row);
            state.fill(0.0);
        }
    }

    /// Rows of the centroids from `first` on: `(rows, assistant)`, random directions.
    pub fn centroids(&self, first: usize, out: &mut [f32]) {
        for (i, row) in (first as u64..).zip(out.chunks_exact_mut(self.assistant)) {
            Random::new(self.seed, "centroids", i).fill(1.0, row);
            normalize(row);
        }
    }

    /// Groups `vocab` tokens under `count` centroids, equally many under each, every token under one of the `nearest`
    /// to it: the ids, centroid by centroid. `done` is called with the number of tokens ranked.
    pub fn group(&self, vocab: usize, count: usize, nearest: usize, done: impl Fn(usize) + Sync) -> Vec<u32> {
        let mut centroids = vec![0.0; count * self.assistant];
        self.centroids(0, &mut centroids);
        let mut choices = vec![0u16; vocab * nearest];
        choices.par_chunks_mut(ROWS * nearest).enumerate().for_each(|(block, choices)| {
            let rows = choices.len() / nearest;
            let mut x = vec![0.0; rows * self.assistant];
            self.assistant_embedding(block * ROWS, &mut x);
            let mut scores = vec![0.0; rows * count];
            let y = ColumnsMut::new(&mut scores, rows, count);
            let x = gemm::PreparedRows::new(Isa::best(), ElementType::F32, &x, self.assistant, &mut []);
            gemm::matmul(Isa::best(), x, Elements::F32(&centroids), y);
            let mut best = Vec::new();
            for (choices, scores) in choices.chunks_exact_mut(nearest).zip(scores.chunks_exact(count)) {
                vocabulary::top_k(scores, nearest, &mut best);
                choices.iter_mut().zip(&best).for_each(|(choice, best)| *choice = *best as u16);
            }
            done(rows);
        });
        Groups::new(&choices, nearest, count, vocab / count).ids()
    }
}

/// Scales a row to length 1.
fn normalize(row: &mut [f32]) {
    let length = row.iter().map(|x| x * x).sum::<f32>().sqrt();
    row.iter_mut().for_each(|x| *x /= length);
}

/// A move of `token` into a centroid, and out of `from` if it has one.
#[derive(Clone, Copy)]
struct Move {
    token: u32,
    from: Option<usize>,
}

/// An assignment of tokens to centroids with a capacity of `size` each.
struct Groups<'a> {
    choices: &'a [u16], // of each token, the nearest first
    nearest: usize,
    size: usize,
    members: Vec<Vec<u32>>,
}

impl<'a> Groups<'a> {
    fn new(choices: &'a [u16], nearest: usize, count: usize, size: usize) -> Self {
        let mut groups = Self { choices, nearest, size, members: vec![Vec::new(); count] };
        for token in 0..(choices.len() / nearest) as u32 {
            // The emptiest of its choices: the centroids then fill up evenly, and few are full before the end.
            let emptiest = groups.of(token).min_by_key(|choice| groups.members[*choice].len());
            match emptiest.filter(|choice| groups.members[*choice].len() < size) {
                Some(choice) => groups.members[choice].push(token),
                None => groups.insert_by_moving(token),
            }
        }
        groups
    }

    fn of(&self, token: u32) -> impl Iterator<Item = usize> + use<'a> {
        self.choices[token as usize * self.nearest..][..self.nearest].iter().map(|choice| usize::from(*choice))
    }

    /// Finds the shortest chain of tokens that can each move to another of their choices, the last into a centroid
    /// with free capacity, and moves them, so that `token` gets one of its choices.
    fn insert_by_moving(&mut self, token: u32) {
        let mut moves: Vec<Option<Move>> = vec![None; self.members.len()]; // into each centroid that is reached
        let mut queue = std::collections::VecDeque::new();
        for choice in self.of(token) {
            moves[choice] = Some(Move { token, from: None });
            queue.push_back(choice);
        }
        while let Some(full) = queue.pop_front() {
            if self.members[full].len() < self.size {
                return self.shift(full, &moves);
            }
            for token in &self.members[full] {
                for choice in self.of(*token) {
                    if moves[choice].is_none() {
                        moves[choice] = Some(Move { token: *token, from: Some(full) });
                        queue.push_back(choice);
                    }
                }
            }
        }
        // Its choices and everything reachable from them are full: it goes to any free centroid, and is never drafted.
        if let Some(members) = self.members.iter_mut().find(|members| members.len() < self.size) {
            members.push(token);
        }
    }

    /// Makes the chain of moves that ends in the centroid `into`.
    fn shift(&mut self, mut into: usize, moves: &[Option<Move>]) {
        while let Some(Move { token, from }) = moves[into] {
            self.members[into].push(token);
            let Some(from) = from else { return };
            self.members[from].retain(|member| *member != token);
            into = from;
        }
    }

    fn ids(mut self) -> Vec<u32> {
        self.members.iter_mut().for_each(|members| members.sort_unstable());
        self.members.concat()
    }
}
