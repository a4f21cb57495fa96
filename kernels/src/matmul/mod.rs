//! Activations times the transpose of a floating-point weight matrix, widened in registers; brain floats, where there are
//! tile registers, as they are.

use crate::lanes::{Element, Lanes, Op, prefetch};
use crate::{ColumnsMut, ElementType, Elements, Isa};
use std::mem::MaybeUninit;

#[cfg(target_arch = "x86_64")]
mod tiles;

/// Activations `(rows, inputs)`, as [`matmul`] takes them for one instruction set and type of weights.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    x: &'a [f32],
    inputs: usize,
    /// Made of `x`, where tile registers multiply; else empty.
    words: &'a [u32],
}

impl<'a> Rows<'a> {
    /// Words that [`Rows::new`] needs room for: none but for brain floats in tile registers.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub fn scratch_len(isa: Isa, weight: ElementType, rows: usize, inputs: usize) -> usize {
        match (isa, weight) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Amx(_), ElementType::Bf16) => tiles::words(rows, inputs),
            _ => 0,
        }
    }

    /// Prepares `x`, `(rows, inputs)` row-major, once for all weights of a type. `scratch` is [`Rows::scratch_len`] words.
    ///
    /// # Panics
    /// If a length does not fit the shapes.
    pub fn new(isa: Isa, weight: ElementType, x: &'a [f32], inputs: usize, scratch: &'a mut [u32]) -> Self {
        let rows = x.len() / inputs.max(1);
        assert_eq!(x.len(), rows * inputs, "matmul: x is not (rows, inputs)");
        assert_eq!(
            scratch.len(),
            Self::scratch_len(isa, weight, rows, inputs),
            "matmul: not the scratch of these rows"
        );
        #[cfg(target_arch = "x86_64")]
        if let (Isa::Amx(isa), ElementType::Bf16) = (isa, weight) {
            tiles::split(isa, x, inputs, scratch);
        }
        Self { x, inputs, words: scratch }
    }

    /// Of the words that [`Rows::new`] made of the same `x`.
    pub fn from_words(x: &'a [f32], inputs: usize, words: &'a [u32]) -> Self {
        Self { x, inputs, words }
    }
}

/// `y[r][j] = sum_i x[r][i] * weight[j][i]` for all the columns `j` that `y` holds, whatever was there.
///
/// * `x`: made with the same `isa`, for the type of `weight`; as many rows as `y`.
/// * `weight`: `(outputs, inputs)` row-major; `y` is `(rows, outputs)`.
///
/// Each sum runs over the inputs in an order that no number of rows or columns changes: the bits of a row depend on that
/// row only.
///
/// # Panics
/// If a length does not fit the shapes.
pub fn matmul(isa: Isa, x: Rows<'_>, weight: Elements<'_>, y: ColumnsMut<'_>) {
    let Rows { x, inputs, words } = x;
    assert_eq!(x.len(), y.rows() * inputs, "matmul: x is not (rows, inputs)");
    assert!(weight.len() >= y.range().end * inputs, "matmul: the weight has too few rows");
    let scratch = Rows::scratch_len(isa, weight.element_type(), y.rows(), inputs);
    assert_eq!(words.len(), scratch, "matmul: the rows were made for other weights");
    #[cfg(target_arch = "x86_64")]
    if let (Isa::Amx(isa), Elements::Bf16(w)) = (isa, weight)
        && inputs > 0
    {
        return tiles::matmul(isa, words, inputs, w, y);
    }
    match weight {
        Elements::F32(w) => isa.run(MatMul { x, inputs, w, y }),
        Elements::F16(w) => isa.run(MatMul { x, inputs, w, y }),
        Elements::Bf16(w) => isa.run(MatMul { x, inputs, w, y }),
    }
}

struct MatMul<'a, W> {
    x: &'a [f32],
    inputs: usize,
    w: &'a [W],
    y: ColumnsMut<'a>,
}

/// Rows that go over the weights together: with 4 KiB rows a quarter of a megabyte, which the second-level cache keeps
/// while the columns pass by.
const ROW_BLOCK: usize = 64;

/// Rows of a call that wait for memory: for so few, the next tile's weights are asked for.
const STREAM_ROWS: usize = 16;

impl<W: Element> Op for MatMul<'_, W> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(mut self, l: L) {
        let columns = self.y.range();
        let rows = self.y.rows();
        for block in (0..rows).step_by(ROW_BLOCK) {
            let end = rows.min(block + ROW_BLOCK);
            let mut column = columns.start;
            // Columns outside, rows inside: a tile's weights are widened for several rows at once.
            while column < columns.end {
                let wide = columns.end - column >= 4;
                let mut row = block;
                while row < end {
                    // Six rows by four columns need 24 accumulators and 5 operands of the 32 zmm registers; with 16
                    // registers, two rows by four columns need 8 and 5.
                    let most = if L::LANES == 16 { 6 } else { 2 };
                    // SAFETY: `run` entered the features; `matmul` checked that rows and columns are in `x` and `w`.
                    unsafe {
                        row += match (most.min(end - row), wide) {
                            (1, true) => self.tile::<L, 1, 4>(l, row, column),
                            (2, true) => self.tile::<L, 2, 4>(l, row, column),
                            (3, true) => self.tile::<L, 3, 4>(l, row, column),
                            (4, true) => self.tile::<L, 4, 4>(l, row, column),
                            (5, true) => self.tile::<L, 5, 4>(l, row, column),
                            (_, true) => self.tile::<L, 6, 4>(l, row, column),
                            (_, false) => self.tile::<L, 1, 1>(l, row, column),
                        };
                    }
                }
                column += if wide { 4 } else { 1 };
            }
        }
    }
}

impl<W: Element> MatMul<'_, W> {
    /// Fills `R` rows by `C` columns of `y` and returns `R`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; `x` has `R` rows from `row` on, `w` has `C` from `column` on.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const C: usize>(&mut self, l: L, row: usize, column: usize) -> usize {
        let (inputs, first) = (self.inputs, column - self.y.range().start);
        let whole = inputs - inputs % L::LANES;
        let tail = inputs - whole;
        let streams = self.y.rows() <= STREAM_ROWS;
        // SAFETY: the caller's rows and columns are inside `x` and `w`; loads stop at `inputs`.
        unsafe {
            let x = self.x.as_ptr().add(row * inputs);
            let w = self.w.as_ptr().add(column * inputs);
            let mut acc = [[l.splat(0.0); C]; R];
            let mut columns = [l.splat(0.0); C];
            let mut i = 0;
            while i + 2 * L::LANES <= whole {
                for (c, column) in columns.iter_mut().enumerate() {
                    let at = w.add(c * inputs + i);
                    if streams {
                        prefetch(at.wrapping_add(C * inputs).cast());
                    }
                    *column = W::load_half::<L, 0>(l, at);
                }
                fold_in(l, &mut acc, x.add(i), inputs, columns);
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = W::load_half::<L, 1>(l, w.add(c * inputs + i));
                }
                fold_in(l, &mut acc, x.add(i + L::LANES), inputs, columns);
                i += 2 * L::LANES;
            }
            if i < whole {
                for (c, column) in columns.iter_mut().enumerate() {
                    *column = W::load(l, w.add(c * inputs + i));
                }
                fold_in(l, &mut acc, x.add(i), inputs, columns);
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

/// Writes sums where nobody may have written yet.
#[inline(always)]
fn put(y: &mut [MaybeUninit<f32>], sums: &[f32]) {
    for (y, sum) in y.iter_mut().zip(sums) {
        y.write(*sum);
    }
}

/// Adds the products of a vector of each row of `x` and one of each column.
///
/// # Safety
/// The caller is inside a function with `L`'s features; from `x` on, `R` rows that are `inputs` apart have a vector each.
#[inline(always)]
unsafe fn fold_in<L: Lanes, const R: usize, const C: usize>(
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
