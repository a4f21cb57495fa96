//! Pointwise functions on tensors.

use candle_core::Tensor;
use foretoken_kernels::{Isa, activation};

use super::{F32View, row_blocks, same_shape, tensor};
use crate::Result;

/// The function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Gate {
    /// The tanh form of GELU.
    GeluTanh,
    /// `x sigmoid(x)`.
    Silu,
    /// `1 / (1 + e^-x)`.
    Sigmoid,
}

impl Gate {
    /// `gate[i] = f(gate[i]) * up[i]`.
    pub(super) fn apply(self, isa: Isa, gate: &mut [f32], up: &[f32]) {
        match self {
            Gate::GeluTanh => activation::gelu_gate(isa, gate, up),
            Gate::Silu => activation::silu_gate(isa, gate, up),
            Gate::Sigmoid => activation::sigmoid_gate(isa, gate, up),
        }
    }
}

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
