//! Linear layers without bias.

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::Isa;

use super::multiply::{Input, Job, multiply};
use super::{F32View, Gate, Weight, tensor};
use crate::Result;

/// `y = x W^T`, with `W` `(outputs, inputs)` in the checkpoint's type.
#[derive(Clone)]
pub struct Linear {
    weight: Weight,
    isa: Isa,
}

impl Linear {
    /// A layer over the (first) matrix of `weight`, computed with `isa`.
    pub fn new(weight: Weight, isa: Isa) -> Self {
        Self { weight, isa }
    }

    /// The matrix.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// `y = x W^T`, then `then(y)` in place.
    ///
    /// # Errors
    /// If `x` is not `(rows, inputs)`.
    pub fn forward_then(&self, x: &Tensor, then: impl FnOnce(&mut [f32])) -> Result<Tensor> {
        let [mut y] = products([self], x)?;
        then(&mut y);
        tensor(y, (x.dim(0)?, self.weight.outputs()))
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        linear(self, x).map_err(candle_core::Error::wrap)
    }
}

/// `x W^T`: `(rows, outputs)`.
///
/// # Errors
/// If the input is not `(rows, inputs)`.
pub fn linear(layer: &Linear, x: &Tensor) -> Result<Tensor> {
    let [y] = project([layer], x)?;
    Ok(y)
}

/// Applies several layers to one input `(rows, inputs)` in one parallel region (q, k and v).
///
/// # Errors
/// If the input is not `(rows, inputs)` of every layer.
pub fn project<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
    let rows = x.dim(0)?;
    let mut tensors = Vec::with_capacity(N);
    for (layer, y) in layers.into_iter().zip(products(layers, x)?) {
        tensors.push(tensor(y, (rows, layer.weight.outputs()))?);
    }
    tensors.try_into().map_err(|_| missing_output())
}

fn products<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Vec<f32>; N]> {
    let (view, shape) = checked(&layers, x)?;
    let input = Input::new(&view[..], shape);
    let jobs = layers.map(|layer| Job::product(layer.weight.matrix(0), &input));
    multiply(layers[0].isa, &jobs).try_into().map_err(|_| missing_output())
}

/// `function(x G^T) * (x U^T)`, `(rows, outputs)`: the first half of a gated MLP.
///
/// # Errors
/// If the input is not `(rows, inputs)` of both layers, or these differ in outputs.
pub fn gated(function: Gate, gate: &Linear, up: &Linear, x: &Tensor) -> Result<Tensor> {
    let (view, shape) = checked(&[gate, up], x)?;
    let outputs = gate.weight.outputs();
    if up.weight.outputs() != outputs {
        let problem = format!("gated: {outputs} gates of {} values", up.weight.outputs());
        return Err(candle_core::Error::Msg(problem).into());
    }
    let input = Input::new(&view[..], shape);
    let job = Job::gated(function, gate.weight.matrix(0), up.weight.matrix(0), outputs, &input);
    let y = multiply(gate.isa, &[job]).pop().ok_or_else(missing_output)?;
    tensor(y, (shape.0, outputs))
}

/// The input of `layers`, and its `(rows, inputs)`.
fn checked<'x>(layers: &[&Linear], x: &'x Tensor) -> Result<(F32View<'x>, (usize, usize))> {
    let (rows, inputs) = x.dims2()?;
    for layer in layers {
        if layer.weight.inputs() != inputs {
            let problem = format!("linear: the input has {inputs} columns, the weight {}", layer.weight.inputs());
            return Err(candle_core::Error::Msg(problem).into());
        }
    }
    Ok((F32View::new(x)?, (rows, inputs)))
}

fn missing_output() -> crate::Error {
    candle_core::Error::Msg("linear: an output is missing".into()).into()
}
