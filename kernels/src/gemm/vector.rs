//! The product over `f32` lanes: weights of any element type are widened in registers.

use std::mem::MaybeUninit;

use crate::columns::ColumnsMut;
use crate::isa::{Isa, Zen, zen};
use crate::simd::float::{Element, Lanes, Op};
use crate::simd::prefetch::{prefetch, prefetch_to};

/// As [`super::matmul`].
pub(super) fn matmul<W: Element>(isa: Isa, x: &[f32], inputs: usize, w: &[W], y: ColumnsMut<'_>) {
    isa.run(MatMul { x, inputs, w, y, zen: zen() });
}

struct MatMul<'a, W> {
    x: &'a [f32],
    inputs: usize,
    w: &'a [W],
    y: ColumnsMut<'a>,
    zen: Option<Zen>,
}

/// Rows that share a pass over the weights: 256 KiB with rows of 4 KiB, which stay in the L2 cache.
const ROW_BLOCK: usize = 64;

/// With at most this many rows, memory bandwidth is the bound and weights are prefetched.
const STREAM_ROWS: usize = 16;

// With AVX-512, a Zen 5 reads one stream of columns 1.3 times as fast as four, from memory. With three rows and more,
// reading their inputs for every column takes as long.

/// Maximum inputs of two rows whose columns are read one by one: 24 KiB, half of the L1 cache.
const MAX_ONE_BY_ONE_INPUTS: usize = 6144;

/// Prefetch distance in bytes of a column that is read alone: of 4 to 12 KiB, the fastest.
const SINGLE_COLUMN_AHEAD: usize = 9216;

/// With a single lane, inputs per partial sum: rounding error grows with the number of terms, which several lanes
/// divide.
const PARTIAL_INPUTS: usize = 32;

impl<W: Element> Op for MatMul<'_, W> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(mut self, l: L) {
        let columns = self.y.range();
        let rows = self.y.rows();
        let one_by_one = L::LANES == 16
            && self.zen == Some(Zen::Five)
            && (rows == 1 || rows == 2 && 2 * self.inputs <= MAX_ONE_BY_ONE_INPUTS);
        for block in (0..rows).step_by(ROW_BLOCK) {
            let end = rows.min(block + ROW_BLOCK);
            let mut column = columns.start;
            // Outer loop over columns, inner over rows: weights are widened once for a register block's rows.
            while column < columns.end {
                let wide = !one_by_one && columns.end - column >= 4;
                let mut row = block;
                while row < end {
                    // SAFETY: `run` entered the features; `matmul` checked that rows and columns are in `x` and `w`.
                    unsafe {
                        row += match (block_rows::<L>(end - row), wide) {
                            (1, true) => self.register_block::<L, 1, 4>(l, row, column),
                            (2, true) => self.register_block::<L, 2, 4>(l, row, column),
                            (3, true) => self.four_columns::<L, 3>(l, row, column),
                            (4, true) => self.four_columns::<L, 4>(l, row, column),
                            (5, true) => self.four_columns::<L, 5>(l, row, column),
                            (_, true) => self.four_columns::<L, 6>(l, row, column),
                            (2, false) => self.register_block::<L, 2, 1>(l, row, column),
                            (_, false) => self.register_block::<L, 1, 1>(l, row, column),
                        };
                    }
                }
                column += if wide { 4 } else { 1 };
            }
        }
    }
}

/// Rows of the next register block, if `left` are left: blocks of about the same number.
///
/// AVX-512 has 32 registers: six rows by four columns take 24 accumulators and 5 operands. AVX2 has 16: two rows by
/// four columns take 8 and 5, six by two 12 and 3, and widen half as many weights per product. NEON has 32, but uses
/// two rows.
#[inline(always)]
fn block_rows<L: Lanes>(left: usize) -> usize {
    let most = if L::LANES >= 8 { 6 } else { 2 };
    left.div_ceil(left.div_ceil(most))
}

impl<W: Element> MatMul<'_, W> {
    /// [`MatMul::register_block`] of more than two rows by four columns.
    ///
    /// # Safety
    /// As [`MatMul::register_block`].
    #[inline(always)]
    unsafe fn four_columns<L: Lanes, const R: usize>(&mut self, l: L, row: usize, column: usize) -> usize {
        // SAFETY: the caller's.
        unsafe {
            // Only instances that are needed.
            if const { L::LANES == 16 } {
                self.register_block::<L, R, 4>(l, row, column);
            } else if const { L::LANES == 8 } {
                for half in 0..2 {
                    self.register_block::<L, R, 2>(l, row, column + 2 * half);
                }
            } else {
                unreachable!("`block_rows` is at most two");
            }
        }
        R
    }

    /// Computes `R` rows by `C` columns of `y`. Returns `R`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; `x` has `R` rows from `row` on, `w` has
    /// `C` from `column` on.
    #[inline(always)]
    unsafe fn register_block<L: Lanes, const R: usize, const C: usize>(
        &mut self,
        l: L,
        row: usize,
        column: usize,
    ) -> usize {
        let (inputs, first) = (self.inputs, column - self.y.range().start);
        let whole = inputs - inputs % L::LANES;
        let tail = inputs - whole;
        let streams = self.y.rows() <= STREAM_ROWS;
        // Prefetched to L2 instead of L1, several columns are read 1.5 times as fast by a Zen 4 and up to 1.1 times by a
        // Zen 5.
        let to_l2 = C > 1 && self.zen.is_some();
        let ahead = if C > 1 { 4 * inputs * size_of::<W>() } else { SINGLE_COLUMN_AHEAD };
        // SAFETY: the caller's rows and columns are inside `x` and `w`; loads stop at `inputs`.
        unsafe {
            let x = self.x.as_ptr().add(row * inputs);
            let w = self.w.as_ptr().add(column * inputs);
            let mut acc = [[l.splat(0.0); C]; R];
            let mut runs = acc;
            let mut columns = [l.splat(0.0); C];
            let mut i = 0;
            while i + 2 * L::LANES <= whole {
                for (c, column) in columns.iter_mut().enumerate() {
                    let at = w.add(c * inputs + i);
                    let ahead = at.cast::<u8>().wrapping_add(ahead);
                    match (streams, to_l2) {
                        (true, true) => prefetch_to::<2>(ahead),
                        (true, false) => prefetch(ahead),
                        (false, _) => {}
                    }
                    *column = W::load(l, at);
                }
                accumulate(l, &mut acc, x.add(i), inputs, columns);
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = W::load(l, w.add(c * inputs + i + L::LANES));
                }
                accumulate(l, &mut acc, x.add(i + L::LANES), inputs, columns);
                i += 2 * L::LANES;
                if L::LANES == 1 && i.is_multiple_of(PARTIAL_INPUTS) {
                    add(l, &mut runs, &acc);
                    acc = [[l.splat(0.0); C]; R];
                }
            }
            if i < whole {
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = W::load(l, w.add(c * inputs + i));
                }
                accumulate(l, &mut acc, x.add(i), inputs, columns);
            }
            if tail > 0 {
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = W::load_part(l, w.add(c * inputs + whole), tail);
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let x = l.load_part(x.add(r * inputs + whole), tail);
                    for (acc, w) in acc.iter_mut().zip(columns) {
                        *acc = l.fma(x, w, *acc);
                    }
                }
            }
            if L::LANES == 1 {
                add(l, &mut acc, &runs);
            }
            let mut r = 0;
            while C == 4 && r + 4 <= R {
                let mut sixteen = [l.splat(0.0); 16];
                for (sixteen, acc) in sixteen.chunks_exact_mut(C).zip(&acc[r..]) {
                    sixteen.copy_from_slice(acc);
                }
                for (sums, r) in l.sum16(sixteen).chunks_exact(C).zip(r..) {
                    put(&mut self.y.row_mut(row + r)[first..first + C], sums);
                }
                r += 4;
            }
            for (r, acc) in acc.iter().enumerate().skip(r) {
                let y = &mut self.y.row_mut(row + r)[first..first + C];
                match acc[..] {
                    [a, b, c, d] => put(y, &l.sum4([a, b, c, d])),
                    _ => {
                        for (y, acc) in y.iter_mut().zip(acc) {
                            y.write(l.sum(*acc));
                        }
                    }
                }
            }
        }
        R
    }
}

/// `to += from`.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
unsafe fn add<L: Lanes, const R: usize, const C: usize>(l: L, to: &mut [[L::V; C]; R], from: &[[L::V; C]; R]) {
    for (to, from) in to.as_flattened_mut().iter_mut().zip(from.as_flattened()) {
        // SAFETY: the caller entered the features.
        *to = unsafe { l.add(*to, *from) };
    }
}

/// Writes sums to uninitialised memory.
#[inline(always)]
fn put(y: &mut [MaybeUninit<f32>], sums: &[f32]) {
    for (y, sum) in y.iter_mut().zip(sums) {
        y.write(*sum);
    }
}

/// `acc[r][c] += x[r] * columns[c]`, one vector of each.
///
/// # Safety
/// The caller is inside a function with `L`'s features; from `x` on, `R` rows that are `inputs`
/// apart have a vector each.
#[inline(always)]
unsafe fn accumulate<L: Lanes, const R: usize, const C: usize>(
    l: L,
    acc: &mut [[L::V; C]; R],
    x: *const f32,
    inputs: usize,
    columns: [L::V; C],
) {
    // SAFETY: the caller entered the features; `R` rows have a vector from `x` on.
    unsafe {
        for (r, acc) in acc.iter_mut().enumerate() {
            let x = l.load(x.add(r * inputs));
            for (acc, w) in acc.iter_mut().zip(columns) {
                *acc = l.fma(x, w, *acc);
            }
        }
    }
}
