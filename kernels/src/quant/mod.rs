//! Block-quantized weights: GGUF's formats, packed for vector registers in the bytes that they came in.
//!
//! ```text
//! GGUF rows ── pack ──► PackedMatrix ─┐
//!                                     ├─ matmul ──► y[r][j] = sum_i x[r][i] w[j][i]
//! f32 rows ─ Activations::quantize ───┘
//! ```
//!
//! * `block`: what every byte of a GGUF block means ([`dequantize_row`]); `quantize`: the way there ([`quantize_row`]).
//! * `pack`: the interleaved order. `activations`: 8-bit inputs, in blocks as llama.cpp's dot product of the type has.
//! * `reference`: the scalar matmul. `format`, `lanes`, `products` and `tile`: the same arithmetic in vectors; `matrix` and
//!   `sides`: with AMX, in products of matrices.
//!
//! **Bits.** Every ISA gives the reference's bits: integer products are exact, and the `f32` operations per output are the
//! same in the same order. So a row of `y` depends on that row of `x` alone, whatever the number of rows, the columns of
//! the call, the instruction set or the threads.

mod activations;
mod block;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod format;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod lanes;
#[cfg(target_arch = "x86_64")]
mod matrix;
mod pack;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod products;
mod quantize;
mod reference;
#[cfg(target_arch = "x86_64")]
mod sides;
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
mod tile;
mod weight_type;

pub use activations::{ActivationType, Activations};
pub use block::dequantize_row;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(crate) use lanes::PanelOp;
pub use pack::{PANEL_ROWS, dequantize_packed_row, pack};
pub use quantize::{quantize_row, quantize_row_by_importance};
pub use weight_type::WeightType;

use crate::{ColumnsMut, Isa};
use pack::Panel;

/// A packed `(outputs, inputs)` matrix.
#[derive(Clone, Copy, Debug)]
pub struct PackedMatrix<'a> {
    weight_type: WeightType,
    outputs: usize,
    inputs: usize,
    bytes: &'a [u8],
}

impl<'a> PackedMatrix<'a> {
    /// Takes what [`pack`] wrote. Its beginning should be aligned to 64 bytes: a register then comes from one cache line.
    ///
    /// # Panics
    /// If `bytes` is not [`WeightType::bytes_for`] the shape.
    pub fn new(weight_type: WeightType, outputs: usize, inputs: usize, bytes: &'a [u8]) -> Self {
        let len = weight_type.bytes_for(outputs, inputs);
        assert_eq!(Some(bytes.len()), len, "packed matrix: not the bytes of this shape");
        Self { weight_type, outputs, inputs, bytes }
    }

    /// The format.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Rows of the matrix.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The packed bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    fn blocks(&self) -> usize {
        self.inputs / self.weight_type.block_len()
    }

    fn row_bytes(&self) -> usize {
        self.blocks() * self.weight_type.block_bytes()
    }

    fn panel(&self, panel: usize) -> Panel<'a> {
        let size = PANEL_ROWS * self.row_bytes();
        let rest = &self.bytes[panel * size..];
        match rest.get(..size) {
            Some(packed) => Panel::Packed(packed),
            None => Panel::Rows(rest),
        }
    }
}

/// `y[r][j] = sum_i x[r][i] * weights[j][i]` for all the columns `j` that `y` holds, whatever was there.
///
/// * `x`: `(rows, inputs)`, quantized, where `rows` is `y`'s.
/// * `y`: `(rows, outputs)`.
///
/// Threads share a matrix by columns; ranges that start at multiples of [`PANEL_ROWS`] waste nothing.
///
/// # Panics
/// If the shapes do not fit, or `x` is not of [`WeightType::activation_type`].
pub fn matmul(isa: Isa, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    check(weights, x);
    assert_eq!(x.rows(), y.rows(), "matmul: x and y have different rows");
    assert!(y.range().end <= weights.outputs, "matmul: the weight has too few rows");
    if !y.range().is_empty() && y.rows() > 0 {
        tile::matmul(isa, weights, x, y);
    }
}

/// `out[k] = sum_i x[i] * weights[indices[k]][i]`, with the bits that [`matmul`] gives.
///
/// A packed row cannot be read without its 15 neighbours: neighbouring indices that follow each other in `indices` are
/// computed together, a lone one costs a panel.
///
/// # Panics
/// If the shapes do not fit, `x` has not exactly one row, or an index is not below `outputs`.
pub fn dot_rows(isa: Isa, weights: &PackedMatrix<'_>, indices: &[u32], x: &Activations<'_>, out: &mut [f32]) {
    check(weights, x);
    assert_eq!(x.rows(), 1, "dot_rows: not one row");
    assert_eq!(indices.len(), out.len(), "dot_rows: lengths differ");
    assert!(indices.iter().all(|i| (*i as usize) < weights.outputs), "dot_rows: no such row");
    tile::dot_rows(isa, weights, indices, x, out);
}

fn check(weights: &PackedMatrix<'_>, x: &Activations<'_>) {
    assert_eq!(x.inputs(), weights.inputs, "matmul: x and the weight have different inputs");
    let expected = weights.weight_type.activation_type();
    assert_eq!(x.activation_type(), expected, "matmul: x is quantized for other weights");
}
