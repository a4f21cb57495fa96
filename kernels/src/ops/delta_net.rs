//! The gated delta net (Yang, Kautz and Hatamizadeh, 2024): a causal convolution over a few rows, and a recurrence
//! whose state is a matrix per value head.
//!
//! Results have the same bits on every instruction set, however rows are divided among calls: lanes hold independent
//! outputs, every sum has a fixed order, and multiply and add are rounded separately.

use crate::isa::Isa;
use crate::ops::activation::{Pointwise, Silu};
use crate::simd::float::{Lanes, MAX_LANES, Op};

/// Key head of a value head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadOrder {
    /// `head / (value_heads / key_heads)`, the value heads of a key head contiguous: Hugging Face's.
    Grouped,
    /// `head % key_heads`, the value heads interleaved over the key heads: GGUF's.
    Tiled,
}

/// Added to the sum of squares in [`l2_normalize`].
const L2_EPS: f64 = 1e-6;

/// Partial sums of a sum of squares: element `i` is added to partial sum `i % PARTIALS`.
const PARTIALS: usize = 8;

/// Vectors of state columns that are computed together: with 128 rows of 16 lanes they take half of a 32 KiB L1 cache.
const VECTORS: usize = 2;

/// `y[r] = silu(sum_t weight[t] * rows[r + t])`, channel by channel: a causal depthwise convolution.
///
/// * `rows`: `(channels)` each: the `taps - 1` rows before the first output row, then the output rows themselves.
/// * `weight`: `(taps, channels)`, the oldest row's first.
/// * `y`: `(rows.len() - (taps - 1), channels)`.
///
/// # Panics
/// If a length differs.
pub fn convolve(isa: Isa, rows: &[&[f32]], weight: &[f32], channels: usize, y: &mut [f32]) {
    assert!(channels > 0 && weight.len().is_multiple_of(channels), "convolve: the weight is not (taps, channels)");
    let taps = weight.len() / channels;
    assert!(taps > 0 && rows.len() + 1 >= taps, "convolve: {} rows for {taps} taps", rows.len());
    assert_eq!(y.len(), (rows.len() + 1 - taps) * channels, "convolve: y is not (rows, channels)");
    assert!(rows.iter().all(|row| row.len() == channels), "convolve: a row is not (channels)");
    isa.run(Convolve { rows, weight, channels, taps, y });
}

struct Convolve<'a> {
    rows: &'a [&'a [f32]],
    weight: &'a [f32],
    channels: usize,
    taps: usize,
    y: &'a mut [f32],
}

impl Op for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        for (row, y) in self.y.chunks_exact_mut(self.channels).enumerate() {
            for first in (0..self.channels).step_by(L::LANES) {
                let count = (self.channels - first).min(L::LANES);
                // SAFETY: `run` entered the features; every row and tap has `count` channels from `first` on.
                unsafe {
                    let mut sum = l.splat(0.0);
                    for tap in 0..self.taps {
                        let x = l.load_first(self.rows[row + tap].as_ptr().add(first), count);
                        let w = l.load_first(self.weight.as_ptr().add(tap * self.channels + first), count);
                        sum = l.add(sum, l.mul(w, x));
                    }
                    l.store_first(y.as_mut_ptr().add(first), Silu::of(l, sum), count);
                }
            }
        }
    }
}

/// Scales every `width` consecutive elements of `x` to the norm `scale`: `x * scale / sqrt(sum(x^2) + 1e-6)`.
///
/// # Panics
/// If `x` is not a whole number of groups of `width`.
pub fn l2_normalize(x: &mut [f32], width: usize, scale: f32) {
    assert!(width > 0 && x.len().is_multiple_of(width), "l2_normalize: x is not (groups, width)");
    for run in x.chunks_exact_mut(width) {
        let mut partial = [0f64; PARTIALS];
        for block in run.chunks(PARTIALS) {
            for (partial, x) in partial.iter_mut().zip(block) {
                *partial += f64::from(*x) * f64::from(*x);
            }
        }
        let sum: f64 = partial.iter().sum();
        let factor = (f64::from(scale) / (sum + L2_EPS).sqrt()) as f32;
        run.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The rows of one value head: row `r` of `x` is `stride` long, with the head's query, key and value starting at the
/// given columns. Queries and keys are normalized, queries scaled.
#[derive(Clone, Copy)]
pub struct HeadRows<'a> {
    /// `(rows, stride)`.
    pub x: &'a [f32],
    /// Width of a row.
    pub stride: usize,
    /// First column of the query `(key_dim)`.
    pub query: usize,
    /// First column of the key `(key_dim)`.
    pub key: usize,
    /// First column of the value `(value_dim)`.
    pub value: usize,
    /// Decay of the state before each row: `(rows)`, from 0 to 1.
    pub decay: &'a [f32],
    /// Fraction of a key's old value that each row replaces: `(rows)`, from 0 to 1.
    pub beta: &'a [f32],
}

impl HeadRows<'_> {
    fn len(&self) -> usize {
        self.decay.len()
    }

    /// The same columns without rows.
    fn none(&self) -> Self {
        Self { x: &[], decay: &[], beta: &[], ..*self }
    }
}

/// Floats of scratch memory for a head whose keys are `key_dim` wide.
pub fn scratch_len(key_dim: usize) -> usize {
    key_dim.saturating_mul(VECTORS * MAX_LANES)
}

/// Advances a head's state `(key_dim, value_dim)` by rows: for each row, with key `k`, value `v` and state `S`,
///
/// ```text
/// d = beta (v - decay S^T k)
/// S = decay S + k d^T
/// ```
///
/// `scratch` is [`scratch_len`] long. `y` is the rows' outputs `S^T q`, `(rows, value_dim)`, or empty.
///
/// # Panics
/// If a length differs.
pub fn advance(isa: Isa, state: &mut [f32], key_dim: usize, rows: HeadRows<'_>, scratch: &mut [f32], y: &mut [f32]) {
    let value_dim = check(state.len(), key_dim, &rows, scratch);
    assert!(y.is_empty() || y.len() == rows.len() * value_dim, "delta net: y is not (rows, value_dim)");
    let staged = rows.none();
    isa.run(Recurrence {
        state: State::Own(state),
        key_dim,
        value_dim,
        rows: [rows, staged],
        y: [y, &mut []],
        scratch,
    });
}

/// The outputs `S^T q` of rows after a head's state, which is not modified: `y` is `(rows, value_dim)`. The states
/// between the rows are those of [`advance`].
///
/// # Panics
/// If a length differs.
pub fn outputs(isa: Isa, state: &[f32], key_dim: usize, rows: HeadRows<'_>, scratch: &mut [f32], y: &mut [f32]) {
    let value_dim = check(state.len(), key_dim, &rows, scratch);
    assert_eq!(y.len(), rows.len() * value_dim, "delta net: y is not (rows, value_dim)");
    let accepted = rows.none();
    let (state, rows) = (State::Shared(state), [accepted, rows]);
    isa.run(Recurrence { state, key_dim, value_dim, rows, y: [&mut [], y], scratch });
}

/// [`advance`] by `accepted`, then [`outputs`] of `rows`, reading the state once.
///
/// # Panics
/// If a length differs.
pub fn replay(
    isa: Isa,
    state: &mut [f32],
    key_dim: usize,
    [accepted, rows]: [HeadRows<'_>; 2],
    scratch: &mut [f32],
    y: &mut [f32],
) {
    check(state.len(), key_dim, &accepted, scratch);
    let value_dim = check(state.len(), key_dim, &rows, scratch);
    assert_eq!(y.len(), rows.len() * value_dim, "delta net: y is not (rows, value_dim)");
    let (state, rows) = (State::Own(state), [accepted, rows]);
    isa.run(Recurrence { state, key_dim, value_dim, rows, y: [&mut [], y], scratch });
}

/// Checks the lengths of a head; returns the width of its values.
fn check(state: usize, key_dim: usize, rows: &HeadRows<'_>, scratch: &[f32]) -> usize {
    assert!(key_dim > 0 && state > 0 && state.is_multiple_of(key_dim), "delta net: state is not (key_dim, value_dim)");
    let value_dim = state / key_dim;
    let end = [(rows.query, key_dim), (rows.key, key_dim), (rows.value, value_dim)];
    let fits = |(first, width): (usize, usize)| first.checked_add(width).is_some_and(|end| end <= rows.stride);
    assert!(end.into_iter().all(fits), "delta net: a column is outside the rows");
    assert_eq!(Some(rows.x.len()), rows.len().checked_mul(rows.stride), "delta net: x is not (rows, stride)");
    assert_eq!(rows.decay.len(), rows.beta.len(), "delta net: decay and beta differ in length");
    assert_eq!(scratch.len(), scratch_len(key_dim), "delta net: scratch is not scratch_len() long");
    value_dim
}

enum State<'a> {
    Own(&'a mut [f32]), // the first rows are committed to it
    Shared(&'a [f32]),
}

struct Recurrence<'a> {
    state: State<'a>,
    key_dim: usize,
    value_dim: usize,
    rows: [HeadRows<'a>; 2], // committed rows, then uncommitted rows
    y: [&'a mut [f32]; 2],   // their outputs, or empty
    scratch: &'a mut [f32],
}

impl Op for Recurrence<'_> {
    type Output = ();

    /// Columns of the state do not depend on each other: a block of them is advanced through all rows in `scratch`,
    /// which fits the L1 cache. One pass over it updates it by a row, sums up that row's outputs and the next row's
    /// `S^T k`, so that every entry is loaded and stored once per row.
    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { mut state, key_dim, value_dim, rows, y, scratch } = self;
        let (taken, count) = (rows[0].len(), rows[0].len() + rows[1].len());
        for first in (0..value_dim).step_by(VECTORS * L::LANES) {
            let block = Block { first, columns: (value_dim - first).min(VECTORS * L::LANES), value_dim, key_dim };
            // SAFETY: `run` entered the features; `check` checked the lengths, and `scratch` has `key_dim` rows of
            // `VECTORS * LANES`. `key` is that of a row that exists, or unused.
            unsafe {
                let from = match &state {
                    State::Own(state) => &**state,
                    State::Shared(state) => *state,
                };
                let mut known = block.read(l, from, Row::at(&rows, 0).map(|row| row.key), scratch);
                for index in 0..count {
                    let Some(row) = Row::at(&rows, index) else { break };
                    let run = usize::from(index >= taken);
                    let y = &mut *y[run];
                    let next = Row::at(&rows, index + 1).map(|row| row.key);
                    let output = match (y.is_empty(), next) {
                        (true, None) => block.step::<L, false, false>(l, &row, row.key, &mut known, scratch),
                        (true, Some(next)) => block.step::<L, false, true>(l, &row, next, &mut known, scratch),
                        (false, None) => block.step::<L, true, false>(l, &row, row.key, &mut known, scratch),
                        (false, Some(next)) => block.step::<L, true, true>(l, &row, next, &mut known, scratch),
                    };
                    if !y.is_empty() {
                        let y = y[(index - run * taken) * value_dim + first..][..block.columns].as_mut_ptr();
                        for (j, output) in output.into_iter().enumerate() {
                            l.store_first(y.wrapping_add(j * L::LANES), output, block.count(l, j));
                        }
                    }
                    if let (State::Own(state), true) = (&mut state, index + 1 == taken) {
                        block.write(l, scratch, state);
                    }
                }
            }
        }
    }
}

/// One row of a head.
#[derive(Clone, Copy)]
struct Row {
    query: *const f32, // (key_dim)
    key: *const f32,   // (key_dim)
    value: *const f32, // (value_dim)
    decay: f32,
    beta: f32,
}

impl Row {
    /// Row `index` of the concatenated rows, if it exists.
    #[inline(always)]
    fn at(rows: &[HeadRows<'_>; 2], index: usize) -> Option<Self> {
        let (rows, index) = match index.checked_sub(rows[0].len()) {
            None => (&rows[0], index),
            Some(index) => (&rows[1], index),
        };
        let (decay, beta) = (*rows.decay.get(index)?, *rows.beta.get(index)?);
        let x = rows.x[index * rows.stride..][..rows.stride].as_ptr();
        let [query, key, value] = [rows.query, rows.key, rows.value].map(|column| x.wrapping_add(column));
        Some(Self { query, key, value, decay, beta })
    }
}

/// A block of columns of a state.
///
/// # Safety
/// For all unsafe methods: the caller is inside a function with `L`'s features; a state is `(key_dim, value_dim)`,
/// scratch `(key_dim, VECTORS * LANES)` at least, a key `(key_dim)`, and a row's pointers as its fields say.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    columns: usize, // at most `VECTORS * LANES`
    value_dim: usize,
    key_dim: usize,
}

impl Block {
    /// Columns of vector `j`, from 0 to `LANES`.
    #[inline(always)]
    fn count<L: Lanes>(&self, _: L, j: usize) -> usize {
        self.columns.saturating_sub(j * L::LANES).min(L::LANES)
    }

    /// Copies the columns to `scratch`; returns `S^T k` of the key, if there is one.
    ///
    /// # Safety
    /// As the type's.
    #[inline(always)]
    unsafe fn read<L: Lanes>(
        &self,
        l: L,
        state: &[f32],
        key: Option<*const f32>,
        scratch: &mut [f32],
    ) -> [L::V; VECTORS] {
        // SAFETY: the caller entered the features; state, scratch and key have row `i`, the state's these columns.
        unsafe {
            let mut known = [l.splat(0.0); VECTORS];
            for i in 0..self.key_dim {
                let k = match key {
                    Some(key) => l.splat(*key.add(i)),
                    None => l.splat(0.0),
                };
                for (j, known) in known.iter_mut().enumerate() {
                    let at = i * self.value_dim + self.first + j * L::LANES;
                    let s = l.load_first(state.as_ptr().wrapping_add(at), self.count(l, j));
                    l.store(scratch.as_mut_ptr().add((i * VECTORS + j) * L::LANES), s);
                    *known = l.add(*known, l.mul(s, k));
                }
            }
            known
        }
    }

    /// # Safety
    /// As the type's.
    #[inline(always)]
    unsafe fn write<L: Lanes>(&self, l: L, scratch: &[f32], state: &mut [f32]) {
        for i in 0..self.key_dim {
            for j in 0..VECTORS {
                let at = i * self.value_dim + self.first + j * L::LANES;
                // SAFETY: the caller entered the features; state and scratch have row `i`, the state's these columns.
                unsafe {
                    let v = l.load(scratch.as_ptr().add((i * VECTORS + j) * L::LANES));
                    l.store_first(state.as_mut_ptr().wrapping_add(at), v, self.count(l, j));
                }
            }
        }
    }

    /// Advances the columns in `scratch` by a row whose `S^T k` is `known`. With `OUTPUT`, returns their outputs; with
    /// `NEXT`, `known` becomes that of the key `next`.
    ///
    /// # Safety
    /// As the type's.
    #[inline(always)]
    unsafe fn step<L: Lanes, const OUTPUT: bool, const NEXT: bool>(
        &self,
        l: L,
        row: &Row,
        next: *const f32,
        known: &mut [L::V; VECTORS],
        scratch: &mut [f32],
    ) -> [L::V; VECTORS] {
        // SAFETY: the caller entered the features; query, keys and scratch have row `i`, the value these columns.
        unsafe {
            let (decay, beta) = (l.splat(row.decay), l.splat(row.beta));
            let mut delta = [l.splat(0.0); VECTORS];
            for (j, (delta, known)) in delta.iter_mut().zip(*known).enumerate() {
                let v = l.load_first(row.value.wrapping_add(self.first + j * L::LANES), self.count(l, j));
                *delta = l.mul(beta, l.sub(v, l.mul(decay, known)));
            }
            let state = scratch.as_mut_ptr();
            let (mut output, mut sums) = ([l.splat(0.0); VECTORS], [l.splat(0.0); VECTORS]);
            for i in 0..self.key_dim {
                let (k, q, n) = (l.splat(*row.key.add(i)), l.splat(*row.query.add(i)), l.splat(*next.add(i)));
                for (j, delta) in delta.iter().enumerate() {
                    let at = state.add((i * VECTORS + j) * L::LANES);
                    let s = l.add(l.mul(decay, l.load(at)), l.mul(k, *delta));
                    l.store(at, s);
                    if OUTPUT {
                        output[j] = l.add(output[j], l.mul(s, q));
                    }
                    if NEXT {
                        sums[j] = l.add(sums[j], l.mul(s, n));
                    }
                }
            }
            *known = sums;
            output
        }
    }
}
