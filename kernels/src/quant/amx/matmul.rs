//! The loops around the tile products.
//!
//! Outer loop over K, inner over panels: a range of spans is short enough for its A tiles to stay in the L2 cache, and
//! `y` holds the partial results between ranges.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use super::operands::{A_BYTES, Tiles, depth};
use super::panels::{PANEL_GROUP, Results};
use super::prefetch::OutputPrefetcher;
use super::{blocks_32, blocks_256};
use crate::columns::ColumnsMut;
use crate::isa::Amx;
use crate::quant::activations::{Activations, PASS_ROWS, Passes, SPAN, TILE_ROWS, has_tiles};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};
use crate::quant::output::store_panel;
use crate::quant::packed_matrix::PackedMatrix;
use crate::quant::unpack::{Format, with_format};
use crate::simd::amx::{AmxOp, TileRegisters, TileShape};
use crate::simd::avx512::float::Avx512Lanes;

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
        if const { !has_tiles(F::TYPE) } {
            unreachable!("`quant::matmul` refuses it");
        }
        let range = self.y.range();
        let panels = range.start / PANEL_ROWS..range.end.div_ceil(PANEL_ROWS);
        let a = TileShape { rows: TILE_ROWS, bytes: depth::<F>() };
        let b = TileShape { rows: depth::<F>() / 4, bytes: QUAD_BYTES };
        let c = TileShape { rows: TILE_ROWS, bytes: 4 * PANEL_ROWS };
        // SAFETY: an `Amx` proves that tile registers are available, and operations are not nested.
        let _registers = unsafe { TileRegisters::new([a, a, b, b, c, c, c, c]) };
        let mut results: Results = [[[MaybeUninit::uninit(); PANEL_ROWS]; PASS_ROWS]; PANEL_GROUP];
        let spans = self.x.inputs().div_ceil(SPAN).max(1); // without inputs, results are zero
        for pass in Passes::new(self.x.rows()) {
            let first_row = pass.first_tile * TILE_ROWS;
            let rows = (pass.tiles * TILE_ROWS).min(self.x.rows() - first_row);
            let of_range = A_BYTES / (pass.tiles * TILE_ROWS * SPAN);
            for first in (0..spans).step_by(of_range) {
                let x = Tiles::new::<F>(self.x, &pass, first..(first + of_range).min(spans));
                for group in panels.clone().step_by(PANEL_GROUP).map(|p| p..(p + PANEL_GROUP).min(panels.end)) {
                    for (panel, results) in group.clone().zip(&mut results) {
                        if first == 0 {
                            results[..x.count * TILE_ROWS].fill([MaybeUninit::new(0.0); PANEL_ROWS]);
                        } else {
                            load_panel(&mut self.y, panel, first_row, &mut results[..rows]);
                        }
                    }
                    let ahead =
                        OutputPrefetcher::new(&mut self.y, first_row..first_row + rows, group.start * PANEL_ROWS);
                    // SAFETY: `run_tiles` entered the features, the registers are configured, `quant::matmul` checked the
                    // shapes; the range with the first span cleared the results of all rows and of every panel of a group.
                    unsafe {
                        if const { F::TYPE.block_len() == SPAN } {
                            blocks_256::add_blocks::<F>(l, self.weights, group.clone(), &x, ahead, &mut results);
                        } else {
                            blocks_32::add_blocks::<F>(l, self.weights, group.clone(), &x, ahead, &mut results);
                        }
                    }
                    for row in 0..rows {
                        for (panel, results) in group.clone().zip(&results) {
                            // SAFETY: the range with the first span cleared it; all of it was stored since.
                            let result = unsafe { &*(&raw const results[row]).cast::<[f32; PANEL_ROWS]>() };
                            store_panel(&mut self.y, panel, first_row + row, std::array::from_ref(result));
                        }
                    }
                }
            }
        }
    }
}

/// Reads back what [`store_panel`] wrote.
#[inline(always)]
fn load_panel(y: &mut ColumnsMut<'_>, panel: usize, first_row: usize, results: &mut [[MaybeUninit<f32>; PANEL_ROWS]]) {
    let range = y.range();
    let (start, stop) = ((panel * PANEL_ROWS).max(range.start), ((panel + 1) * PANEL_ROWS).min(range.end));
    for (row, result) in results.iter_mut().enumerate() {
        let y = &y.row_mut(first_row + row)[start - range.start..stop - range.start];
        match y.first_chunk() {
            Some(y) => *result = *y, // without a call
            None => result[start - panel * PANEL_ROWS..][..y.len()].copy_from_slice(y),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::isa::Isa;
    use crate::quant::weight_type::WeightType;
    use crate::quant::{ActivationFormat, ActivationLayout, pack, quantize_row, scalar};
    use crate::simd::entry;

    #[test]
    fn products_have_the_bits_of_the_reference() {
        // The features of `entry::amx`: those of AVX-512 with VBMI.
        if !Isa::available().any(|isa| matches!(isa, Isa::Avx512(isa) if isa.has_vbmi())) {
            let line = b"skipped: tile products: this processor has no AVX-512 VBMI\n";
            return std::io::stderr().write_all(line).expect("stderr"); // the harness captures `println!`
        }
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let weight_types = WeightType::ALL.into_iter().filter(|of| of.is_written() && has_tiles(*of));
        // Two groups of panels; two ranges of spans with panels in turn, and panel by panel in two passes.
        let shapes = [(85, 512, 41), (40, 512, 3), (20, 8448, 64), (20, 2 * A_BYTES / PASS_ROWS - 256, PASS_ROWS + 17)];
        for (weight_type, (outputs, inputs, rows)) in weight_types.flat_map(|of| shapes.map(|shape| (of, shape))) {
            // A last span of three blocks of 32.
            let inputs = if weight_type.block_len() == 32 { inputs + 96 } else { inputs };
            let mut source = vec![0; weight_type.bytes_for(outputs, inputs).unwrap()];
            for row_bytes in source.chunks_exact_mut(weight_type.row_bytes(inputs).unwrap()) {
                let row: Vec<f32> = (0..inputs).map(|_| random()).collect();
                quantize_row(Isa::Scalar, weight_type, &row, row_bytes);
            }
            let mut bytes = vec![0; source.len()];
            pack(weight_type, inputs, &source, &mut bytes);
            let weights = PackedMatrix::new(weight_type, outputs, inputs, &bytes);
            let x: Vec<f32> = (0..rows * inputs).map(|_| random()).collect();
            let layouts = [ActivationLayout::RowBlocks, ActivationLayout::Tiles];
            let formats = layouts.map(|layout| ActivationFormat { blocks: weight_type.activation_type(), layout });
            let mut scratch = formats.map(|format| vec![0; format.scratch_len(rows, inputs).unwrap()]);
            let [of_scalars, of_tiles] = &mut scratch;
            let (mut y, mut want) = (vec![0.0; rows * outputs], vec![0.0; rows * outputs]);
            let quantized = Activations::quantize(Isa::Scalar, formats[0], &x, inputs, of_scalars);
            scalar::matmul(&weights, &quantized, ColumnsMut::new(&mut want, rows, outputs));
            let (weights, x) = (&weights, &Activations::quantize(Isa::Scalar, formats[1], &x, inputs, of_tiles));
            with_format!(weight_type, |F| {
                let y = ColumnsMut::new(&mut y, rows, outputs);
                // SAFETY: the features were found.
                unsafe { entry::amx::eval(MatMul::<F> { weights, x, y, format: PhantomData }) }
            });
            assert!(y.iter().zip(&want).all(|(y, want)| y.to_bits() == want.to_bits()), "{weight_type:?}");
        }
    }
}
