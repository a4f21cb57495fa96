//! Pointwise functions on tensors.

use candle_core::Tensor;
use foretoken_kernels::{Isa, activation};

use super::{F32View, for_row_blocks, tensor};
use crate::Result;

/// `gelu_tanh(gate) * up`, elementwise over `(rows, width)`.
///
/// # Errors
/// If the shapes differ.
pub fn gelu_gate(gate: &Tensor, up: &Tensor, isa: Isa) -> Result<Tensor> {
    let (_, width) = gate.dims2()?;
    if gate.dims() != up.dims() {
        let (lhs, rhs) = (gate.shape().clone(), up.shape().clone());
        return Err(candle_core::Error::ShapeMismatchBinaryOp { lhs, rhs, op: "gelu_gate" }.into());
    }
    let mut y = F32View::new(gate)?.to_vec();
    let up = F32View::new(up)?;
    for_row_blocks(&mut y, width, |row, y| {
        activation::gelu_gate(isa, y, &up[row * width..row * width + y.len()]);
    });
    tensor(y, gate.dims())
}
