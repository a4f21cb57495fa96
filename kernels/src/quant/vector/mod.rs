//! The product over byte lanes: panels of 16 outputs times row blocks of up to 8 rows.
//!
//! A lane is an output, so nothing is reduced across lanes. One vector of weights (a quad of 16 outputs) is multiplied
//! by every row of the row block: one `vpdpbusd` with the row's four quants broadcast from memory, so unpacking is paid
//! once per row block. Integer sums are exact, and the float operations per output are those of `scalar.rs` in their
//! order: neither the row block, nor the column range, nor the instruction set changes a bit.
//!
//! Weights are unpacked in registers, once per row block, and several panels are read side by side. Where registers
//! hold only half a row block, several halves share 256 inputs that are unpacked into the L1 cache before.

mod rows;
mod streams;
mod unpacked;

use crate::columns::ColumnsMut;
use crate::quant::activations::Activations;
use crate::quant::layout::{PANEL_ROWS, ROW_BLOCK, STREAMS};
use crate::quant::output::store_panel;
use crate::quant::packed_matrix::PackedMatrix;
use crate::quant::unpack::{Format, with_format};
use crate::simd::bytes::{ByteLanes, PanelOp};
use crate::simd::dispatch::VectorIsa;
use rows::{PASS_BLOCKS, Results};
use streams::{Multiply, multiply, multiply_streams, prefers_single_stream};
use unpacked::{MultiplyUnpacked, multiply_unpacked};

/// As [`super::matmul`]. Without inputs the results are zeros.
pub(super) fn matmul(isa: VectorIsa, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    isa.run_panels(MatMul { weights, x, y });
}

/// A format's kernels. The loops around them are compiled once for all formats.
struct Kernels<L> {
    multiply: Multiply<L>,
    /// Where registers hold less than a row block.
    multiply_unpacked: Option<MultiplyUnpacked<L>>,
    /// [`Format::UNPACKED_FROM`].
    unpacked_from: usize,
}

impl<L: ByteLanes> Kernels<L> {
    fn of<F: Format>() -> Self {
        let multiply_unpacked = if const { L::MAX_ROWS < ROW_BLOCK } {
            Some(multiply_unpacked::<L, F> as MultiplyUnpacked<L>)
        } else {
            None
        };
        Self { multiply: multiply::<L, F>, multiply_unpacked, unpacked_from: F::UNPACKED_FROM }
    }
}

struct MatMul<'a> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    y: ColumnsMut<'a>,
}

impl PanelOp for MatMul<'_> {
    #[inline(always)]
    fn eval<L: ByteLanes>(mut self, l: L) {
        let kernels = with_format!(self.weights.weight_type(), |F| Kernels::<L>::of::<F>());
        let range = self.y.range();
        let (first, end) = (range.start / PANEL_ROWS, range.end.div_ceil(PANEL_ROWS));
        let mut results: Results = [[0.0; PANEL_ROWS]; _];
        let blocks = self.x.row_blocks();
        // Outer loop over passes: a pass's activations stay in the L2 cache, and reading the weights again
        // for the next 64 rows costs little compared to the arithmetic.
        for pass in (0..blocks.count).step_by(PASS_BLOCKS) {
            let pass = pass..(pass + PASS_BLOCKS).min(blocks.count);
            let (first_row, last) = (blocks.get(pass.start).first, blocks.get(pass.end - 1));
            let rows = last.first + last.rows - first_row;
            if let Some(multiply_unpacked) = kernels.multiply_unpacked
                && self.x.rows() >= kernels.unpacked_from
            {
                for panel in first..end {
                    results[..rows].fill([0.0; PANEL_ROWS]);
                    // SAFETY: `run_panels` entered the features; the kernel is of the matrix's format, and
                    // `super::matmul` checked the shapes.
                    unsafe { multiply_unpacked(l, self.weights, self.x, panel, pass.clone(), &mut results) };
                    store_panel(&mut self.y, panel, first_row, &results[..rows]);
                }
                continue;
            }
            // Streams of panels side by side, then the remaining panels.
            let streams = if self.x.rows() <= L::SINGLE_STREAM_ROWS && prefers_single_stream() { 1 } else { STREAMS };
            let length = (end - first) / streams;
            for i in 0..=length {
                let (start, apart, count) = match i < length {
                    true => (first + i, length, streams),
                    false => (first + length * streams, 1, (end - first) % streams),
                };
                let panels: [usize; STREAMS] = std::array::from_fn(|stream| start + stream * apart);
                // Further row blocks hit the panels in the L2 cache.
                for rows in pass.clone().map(|b| blocks.get(b)) {
                    let (multiply, panels) = (kernels.multiply, &panels[..count]);
                    // SAFETY: `run_panels` entered the features; the kernel is of the matrix's format, and
                    // `super::matmul` checked the shapes.
                    unsafe { multiply_streams(l, multiply, self.weights, self.x, panels, rows, &mut results) };
                    for (stream, panel) in panels.iter().enumerate() {
                        store_panel(&mut self.y, *panel, rows.first, &results[stream * ROW_BLOCK..][..rows.rows]);
                    }
                }
            }
        }
    }
}
