//! The gated delta net (Yang, Kautz and Hatamizadeh, 2024): a causal convolution over a few rows, and a recurrence
//! whose state is a matrix per value head.
//!
//! Results have the same bits on every instruction set, however rows are divided among calls: lanes run over
//! independent outputs, every sum has one order, and products and sums are rounded apart.

use crate::isa::Isa;
use crate::ops::activation::{Pointwise, Silu};
use crate::simd::float::{Lanes, Op};

/// Added to the sum of squares in [`l2_normalize`].
const L2_EPS: f64 = 1e-6;

/// Partial sums of a sum of squares: element `i` is added to partial sum `i % PARTIALS`.
const PARTIALS: usize = 8;

/// Vectors of state columns that are computed together: enough independent sums to hide the latency of an addition.
const VECTORS: usize = 4;

/// No lane type has more lanes.
const MAX_LANES: usize = 16;

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
                        let x = load(l, self.rows[row + tap].as_ptr().add(first), count);
                        let w = load(l, self.weight.as_ptr().add(tap * self.channels + first), count);
                        sum = l.add(sum, l.mul(w, x));
                    }
                    store(l, y.as_mut_ptr().add(first), Silu::of(l, sum), count);
                }
            }
        }
    }
}

/// Scales every `width` consecutive elements of `x` to the length `scale`: `x * scale / sqrt(sum(x^2) + 1e-6)`.
///
/// # Panics
/// If `x` is not whole runs.
pub fn l2_normalize(x: &mut [f32], width: usize, scale: f32) {
    assert!(width > 0 && x.len().is_multiple_of(width), "l2_normalize: x is not whole runs");
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

/// What one value head reads of some rows: row `r` of `x` is `stride` long, with the head's query, key and value from
/// the named columns on. Queries and keys are normalized, queries scaled.
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
    /// Factor of the state before each row: `(rows)`, from 0 to 1.
    pub decay: &'a [f32],
    /// Share of a key's old value that each row replaces: `(rows)`, from 0 to 1.
    pub beta: &'a [f32],
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
/// `scratch` is [`scratch_len`] long.
///
/// # Panics
/// If a length differs.
pub fn advance(isa: Isa, state: &mut [f32], key_dim: usize, rows: HeadRows<'_>, scratch: &mut [f32]) {
    let value_dim = check(state.len(), key_dim, &rows, scratch);
    isa.run(Recurrence { state: State::Advance(state), key_dim, value_dim, rows, scratch });
}

/// The outputs `S^T q` of rows behind a head's state, which stays: `y` is `(rows, value_dim)`. The states between the
/// rows are those of [`advance`].
///
/// # Panics
/// If a length differs.
pub fn outputs(isa: Isa, state: &[f32], key_dim: usize, rows: HeadRows<'_>, scratch: &mut [f32], y: &mut [f32]) {
    let value_dim = check(state.len(), key_dim, &rows, scratch);
    assert_eq!(y.len(), rows.decay.len() * value_dim, "delta net: y is not (rows, value_dim)");
    isa.run(Recurrence { state: State::Outputs(state, y), key_dim, value_dim, rows, scratch });
}

/// Checks the lengths of a head; returns the width of its values.
fn check(state: usize, key_dim: usize, rows: &HeadRows<'_>, scratch: &[f32]) -> usize {
    assert!(key_dim > 0 && state > 0 && state.is_multiple_of(key_dim), "delta net: the state is not whole rows");
    let value_dim = state / key_dim;
    let end = [(rows.query, key_dim), (rows.key, key_dim), (rows.value, value_dim)];
    let fits = |(first, width): (usize, usize)| first.checked_add(width).is_some_and(|end| end <= rows.stride);
    assert!(end.into_iter().all(fits), "delta net: a column is outside the rows");
    assert_eq!(Some(rows.x.len()), rows.decay.len().checked_mul(rows.stride), "delta net: x is not (rows, stride)");
    assert_eq!(rows.decay.len(), rows.beta.len(), "delta net: decay and beta differ in length");
    assert_eq!(scratch.len(), scratch_len(key_dim), "delta net: scratch");
    value_dim
}

enum State<'a> {
    Advance(&'a mut [f32]),
    Outputs(&'a [f32], &'a mut [f32]),
}

struct Recurrence<'a> {
    state: State<'a>,
    key_dim: usize,
    value_dim: usize,
    rows: HeadRows<'a>,
    scratch: &'a mut [f32],
}

impl Op for Recurrence<'_> {
    type Output = ();

    /// Columns of the state do not depend on each other: a block of them goes through all rows in `scratch`, which fits
    /// the cache.
    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { mut state, key_dim, value_dim, rows, scratch } = self;
        for first in (0..value_dim).step_by(VECTORS * L::LANES) {
            let block = Block { first, columns: (value_dim - first).min(VECTORS * L::LANES), value_dim, key_dim };
            // SAFETY: `run` entered the features; `check` saw to the lengths, and `scratch` has `key_dim` rows of
            // `VECTORS * LANES`.
            unsafe {
                match &mut state {
                    State::Advance(state) => {
                        block.read(l, state, scratch);
                        for row in 0..rows.decay.len() {
                            block.step::<L, false>(l, &rows, row, scratch);
                        }
                        block.write(l, scratch, state);
                    }
                    State::Outputs(state, y) => {
                        block.read(l, state, scratch);
                        for (row, y) in y.chunks_exact_mut(value_dim).enumerate() {
                            let output = block.step::<L, true>(l, &rows, row, scratch);
                            for (j, output) in output.into_iter().enumerate() {
                                store(l, y.as_mut_ptr().add(first + j * L::LANES), output, block.count(l, j));
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Some columns of a state.
///
/// # Safety
/// Of all unsafe methods: the caller is inside a function with `L`'s features; a state is `(key_dim, value_dim)`, and
/// scratch `(key_dim, VECTORS * LANES)` at least.
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

    /// # Safety
    /// As the type's.
    #[inline(always)]
    unsafe fn read<L: Lanes>(&self, l: L, state: &[f32], scratch: &mut [f32]) {
        for i in 0..self.key_dim {
            for j in 0..VECTORS {
                let at = i * self.value_dim + self.first + j * L::LANES;
                // SAFETY: as the caller's; `count` columns are inside the state's row `i`.
                unsafe {
                    let v = load(l, state.as_ptr().wrapping_add(at), self.count(l, j));
                    l.store(scratch.as_mut_ptr().add((i * VECTORS + j) * L::LANES), v);
                }
            }
        }
    }

    /// # Safety
    /// As the type's.
    #[inline(always)]
    unsafe fn write<L: Lanes>(&self, l: L, scratch: &[f32], state: &mut [f32]) {
        for i in 0..self.key_dim {
            for j in 0..VECTORS {
                let at = i * self.value_dim + self.first + j * L::LANES;
                // SAFETY: as the caller's; `count` columns are inside the state's row `i`.
                unsafe {
                    let v = l.load(scratch.as_ptr().add((i * VECTORS + j) * L::LANES));
                    store(l, state.as_mut_ptr().wrapping_add(at), v, self.count(l, j));
                }
            }
        }
    }

    /// Advances the columns in `scratch` by row `row`; with `OUTPUT`, returns their outputs.
    ///
    /// # Safety
    /// As the type's; `rows` were checked.
    #[inline(always)]
    unsafe fn step<L: Lanes, const OUTPUT: bool>(
        &self,
        l: L,
        rows: &HeadRows<'_>,
        row: usize,
        scratch: &mut [f32],
    ) -> [L::V; VECTORS] {
        // SAFETY: as the caller's.
        unsafe {
            let x = rows.x.as_ptr().add(row * rows.stride);
            let (query, key, value) = (x.add(rows.query), x.add(rows.key), x.add(rows.value + self.first));
            let (decay, beta) = (l.splat(rows.decay[row]), l.splat(rows.beta[row]));
            let state = scratch.as_mut_ptr();
            let mut known = [l.splat(0.0); VECTORS]; // S^T k
            for i in 0..self.key_dim {
                let k = l.splat(*key.add(i));
                for (j, known) in known.iter_mut().enumerate() {
                    *known = l.add(*known, l.mul(l.load(state.add((i * VECTORS + j) * L::LANES)), k));
                }
            }
            let mut delta = [l.splat(0.0); VECTORS];
            for (j, (delta, known)) in delta.iter_mut().zip(known).enumerate() {
                let v = load(l, value.wrapping_add(j * L::LANES), self.count(l, j));
                *delta = l.mul(beta, l.sub(v, l.mul(decay, known)));
            }
            let mut output = [l.splat(0.0); VECTORS];
            for i in 0..self.key_dim {
                let (k, q) = (l.splat(*key.add(i)), l.splat(*query.add(i)));
                for (j, delta) in delta.iter().enumerate() {
                    let at = state.add((i * VECTORS + j) * L::LANES);
                    let s = l.add(l.mul(decay, l.load(at)), l.mul(k, *delta));
                    l.store(at, s);
                    if OUTPUT {
                        output[j] = l.add(output[j], l.mul(s, q));
                    }
                }
            }
            output
        }
    }
}

/// Loads `count` elements, at most `LANES`; the other lanes are zero. Nothing is read for 0.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `from` has `count` readable elements.
#[inline(always)]
unsafe fn load<L: Lanes>(l: L, from: *const f32, count: usize) -> L::V {
    // SAFETY: as the caller's.
    unsafe {
        match count {
            0 => l.splat(0.0),
            _ if count == L::LANES => l.load(from),
            _ => l.load_part(from, count),
        }
    }
}

/// Stores the first `count` lanes, at most `LANES`. Nothing is written for 0.
///
/// # Safety
/// As [`load`], of writable elements.
#[inline(always)]
unsafe fn store<L: Lanes>(l: L, to: *mut f32, v: L::V, count: usize) {
    // SAFETY: as the caller's.
    unsafe {
        match count {
            0 => {}
            _ if count == L::LANES => l.store(to, v),
            _ => l.store_part(to, v, count),
        }
    }
}
