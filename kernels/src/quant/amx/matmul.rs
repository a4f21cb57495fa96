//! The loops around the tile products.
//!
//! Outer loop over K, inner over panels: a range of blocks is short enough for its A tiles to stay in the L2 cache, and
//! `y` holds the partial results between ranges.

use std::marker::PhantomData;

use super::operands::{A_BYTES, K_SPAN, PASS_ROWS, PackedActivations, ROWS, depth, span_blocks};
use super::panels::{PANEL_GROUP, Results};
use super::prefetch::OutputPrefetcher;
use super::{blocks_32, blocks_256};
use crate::columns::ColumnsMut;
use crate::isa::Amx;
use crate::quant::activations::Activations;
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES, ROW_BLOCK};
use crate::quant::output::store_panel;
use crate::quant::packed_matrix::PackedMatrix;
use crate::quant::unpack::{Format, with_format};
use crate::quant::weight_type::WeightType;
use crate::simd::amx::{AmxOp, TileRegisters, TileShape};
use crate::simd::avx512::float::Avx512Lanes;

/// Vectors are faster for fewer rows: with two threads on a core, which share its tile unit, 16 rows by tiles
/// take 1.4 times as long; with one thread, .9 times.
const MIN_ROWS: usize = 25;

/// Whether [`matmul`] handles a product with `rows` rows. It does not support several activation blocks per block of
/// weights, as in NVFP4; vector code handles these.
pub(in crate::quant) const fn multiplies(weight_type: WeightType, rows: usize) -> bool {
    rows >= MIN_ROWS && weight_type.block_len() == weight_type.activation_type().block_len()
}

/// As [`crate::quant::matmul`].
pub(in crate::quant) fn matmul(isa: Amx, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    with_format!(weights.weight_type(), |F| isa.run_tiles(MatMul::<F> { weights, x, y, format: PhantomData }));
}

struct MatMul<'a, F> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    y: ColumnsMut<'a>,
    format: PhantomData<F>,
}

impl<F: Format> AmxOp for MatMul<'_, F> {
    #[inline(always)]
    fn eval(mut self, l: Avx512Lanes) {
        if const { !multiplies(F::TYPE, MIN_ROWS) } {
            unreachable!("`multiplies` excludes it");
        }
        let row_blocks = self.x.row_blocks();
        let range = self.y.range();
        let panels = range.start / PANEL_ROWS..range.end.div_ceil(PANEL_ROWS);
        let a = TileShape { rows: ROWS, bytes: depth::<F>() };
        let b = TileShape { rows: depth::<F>() / 4, bytes: QUAD_BYTES };
        let c = TileShape { rows: ROWS, bytes: 4 * PANEL_ROWS };
        // SAFETY: an `Amx` proves that tile registers are available, and operations are not nested.
        let _registers = unsafe { TileRegisters::new([a, a, b, b, c, c, c, c]) };
        let mut x = PackedActivations::EMPTY;
        // The scalar products of the tests also read the rows that `pack` adds and leaves uninitialised.
        #[cfg(test)]
        x.a.0.fill(std::mem::MaybeUninit::new(0));
        let mut results: Results = [[[0.0; PANEL_ROWS]; PASS_ROWS]; PANEL_GROUP];
        let pass_blocks = row_blocks.count.div_ceil(row_blocks.count.div_ceil(PASS_ROWS / ROW_BLOCK));
        for first in (0..row_blocks.count).step_by(pass_blocks) {
            let pass = first..(first + pass_blocks).min(row_blocks.count);
            let (first_row, last) = (row_blocks.get(first).first, row_blocks.get(pass.end - 1));
            let rows = last.first + last.rows - first_row;
            let blocks = A_BYTES / (rows.next_multiple_of(ROWS) * K_SPAN) * span_blocks::<F>();
            for block in (0..self.weights.blocks()).step_by(blocks) {
                x.pack::<F>(self.x, pass.clone(), block..(block + blocks).min(self.weights.blocks()));
                for group in panels.clone().step_by(PANEL_GROUP).map(|p| p..(p + PANEL_GROUP).min(panels.end)) {
                    for (panel, results) in group.clone().zip(&mut results) {
                        if block == 0 {
                            results[..x.rows].fill([0.0; PANEL_ROWS]);
                        } else {
                            // SAFETY: the previous range of blocks stored these rows.
                            unsafe { load_panel(&mut self.y, panel, first_row, &mut results[..rows]) };
                        }
                    }
                    let ahead =
                        OutputPrefetcher::new(&mut self.y, first_row..first_row + rows, group.start * PANEL_ROWS);
                    // SAFETY: `run_tiles` entered the features; the shapes were checked by `super::matmul`.
                    unsafe {
                        if F::TYPE.block_len() == K_SPAN {
                            blocks_256::add_blocks::<F>(l, self.weights, group.clone(), &x, ahead, &mut results);
                        } else {
                            blocks_32::add_blocks::<F>(l, self.weights, group.clone(), &x, ahead, &mut results);
                        }
                    }
                    for row in 0..rows {
                        for (panel, results) in group.clone().zip(&results) {
                            store_panel(&mut self.y, panel, first_row + row, &results[row..row + 1]);
                        }
                    }
                }
            }
        }
    }
}

/// Reads back what [`store_panel`] wrote.
///
/// # Safety
/// [`store_panel`] has stored these rows.
#[inline(always)]
unsafe fn load_panel(y: &mut ColumnsMut<'_>, panel: usize, first_row: usize, results: &mut [[f32; PANEL_ROWS]]) {
    let range = y.range();
    let (start, stop) = ((panel * PANEL_ROWS).max(range.start), ((panel + 1) * PANEL_ROWS).min(range.end));
    for (row, result) in results.iter_mut().enumerate() {
        let y = &y.row_mut(first_row + row)[start - range.start..stop - range.start];
        // SAFETY: the caller has stored them.
        unsafe {
            if let Some(y) = y.first_chunk::<PANEL_ROWS>() {
                *result = std::mem::transmute_copy(y);
            } else {
                for (result, y) in result[start - panel * PANEL_ROWS..].iter_mut().zip(y) {
                    *result = y.assume_init();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;
    use crate::quant::weight_type::WeightType;
    use crate::quant::{pack, quantize_row, scalar};
    use crate::simd::entry;

    #[test]
    fn products_have_the_bits_of_the_reference() {
        // The features of `entry::amx`: those of AVX-512 with VBMI.
        if !Isa::available().any(|isa| matches!(isa, Isa::Avx512(isa) if isa.has_vbmi())) {
            println!("skipped: tile products: this processor has no AVX-512 VBMI");
            return;
        }
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let weight_types = WeightType::ALL.into_iter().filter(|of| of.is_written() && multiplies(*of, MIN_ROWS));
        // One pass and one range of blocks, and two of each.
        let shapes = [(40, 512, 41), (20, 2 * A_BYTES / PASS_ROWS - 256, PASS_ROWS + 17)];
        for (weight_type, (outputs, inputs, rows)) in weight_types.flat_map(|of| shapes.map(|shape| (of, shape))) {
            let mut source = vec![0; weight_type.bytes_for(outputs, inputs).unwrap()];
            for row_bytes in source.chunks_exact_mut(weight_type.row_bytes(inputs).unwrap()) {
                let row: Vec<f32> = (0..inputs).map(|_| random()).collect();
                quantize_row(Isa::Scalar, weight_type, &row, row_bytes);
            }
            let mut bytes = vec![0; source.len()];
            pack(weight_type, inputs, &source, &mut bytes);
            let weights = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
            let x: Vec<f32> = (0..rows * inputs).map(|_| random()).collect();
            let activation_type = weight_type.activation_type();
            let mut scratch = vec![0; activation_type.scratch_len(rows, inputs).unwrap()];
            let x = Activations::quantize(Isa::Scalar, activation_type, &x, inputs, &mut scratch);
            let (mut y, mut want) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
            scalar::matmul(&weights, &x, ColumnsMut::new(&mut want, rows, outputs));
            let (weights, x) = (&weights, &x);
            with_format!(weight_type, |F| {
                let y = ColumnsMut::new(&mut y, rows, outputs);
                // SAFETY: the features were found.
                unsafe { entry::amx::eval(MatMul::<F> { weights, x, y, format: PhantomData }) }
            });
            assert!(y.iter().zip(&want).all(|(y, want)| y.to_bits() == want.to_bits()), "{weight_type:?}");
        }
    }
}
