//! Pointwise functions on tensors.

use candle_core::Tensor;
use foretoken_kernels::Isa;
pub use foretoken_kernels::activation::Gate;

use super::{F32View, row_blocks, same_shape, tensor};
use crate::Result;

/// `f(gate) * up`, elementwise over `(rows, width)`.
///
/// # Errors
/// If the shapes differ.
pub fn gate(function: Gate, gate: &Tensor, up: &Tensor, isa: Isa) -> Result<Tensor> {
    let (rows, width) = gate.dims2()?;
    same_shape("gate", gate, up)?;
    let (of, up) = (F32View::new(gate)?, F32View::new(up)?);
    let y = row_blocks(rows, width, |first, y| {
        let range = first * width..first * width + y.len();
        y.copy_from_slice(&of[range.clone()]);
        function.apply(isa, y, &up[range]);
    });
    tensor(y, gate.dims())
}
