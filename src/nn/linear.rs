//! Linear layers without bias.

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::Isa;

use super::multiply::{Input, Job, multiply};
use super::{F32View, Gate, Weight, row_blocks, tensor};
use crate::{Error, Result};

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

/// `x W^T`, `(rows, outputs)`, whose columns from `start` on are those of `rows`, ascending, and zero in all others.
///
/// # Errors
/// If the input is not `(rows, inputs)`.
///
/// # Panics
/// If the layer has fewer outputs than `start`, or the input has no such row.
pub fn linear_narrowed(layer: &Linear, x: &Tensor, start: usize, rows: &[usize]) -> Result<Tensor> {
    let (view, (count, inputs)) = checked(&[layer], x)?;
    let (matrix, outputs) = (layer.weight.matrix(0), layer.weight.outputs());
    let selected: Vec<f32> = rows.iter().flat_map(|row| &view[row * inputs..][..inputs]).copied().collect();
    let (all, some) = (Input::new(&view[..], (count, inputs)), Input::new(selected, (rows.len(), inputs)));
    let jobs = [Job::columns(matrix, 0..start, &all), Job::columns(matrix, start..outputs, &some)];
    let [left, right]: [Vec<f32>; 2] = multiply(layer.isa, &jobs).try_into().map_err(|_| missing_output())?;
    let y = row_blocks(count, outputs, |first, y| {
        for (row, y) in (first..).zip(y.chunks_exact_mut(outputs)) {
            let (y_left, y_right) = y.split_at_mut(start);
            y_left.copy_from_slice(&left[row * start..][..start]);
            if let Ok(index) = rows.binary_search(&row) {
                y_right.copy_from_slice(&right[index * y_right.len()..][..y_right.len()]);
            }
        }
    });
    tensor(y, (count, outputs))
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

fn missing_output() -> Error {
    candle_core::Error::Msg("linear: an output is missing".into()).into()
}

#[cfg(test)]
mod tests {
    use foretoken_kernels::ElementType;
    use foretoken_kernels::quant::WeightType;

    use super::*;
    use crate::nn::{Arena, Bytes};

    /// Of floats and of a quantized matrix. All columns, some or none are narrowed, to no row, some or all.
    #[test]
    fn narrowed_products_have_the_bits_of_whole_ones() {
        let (outputs, inputs, count) = (160, 64, 40);
        let values = |len: usize, by: usize| (0..len).map(move |i| ((i * by + 11) % 101) as f32 / 50.0 - 1.0);
        let floats = || {
            let bytes: Vec<u8> = values(outputs * inputs, 37).flat_map(f32::to_le_bytes).collect();
            Weight::float(Bytes::from(bytes), ElementType::F32, [1, outputs, inputs]).expect("as many bytes")
        };
        let x = tensor(values(count * inputs, 29).collect(), (count, inputs)).expect("rows");
        for (threads, isa) in [1, 3].into_iter().flat_map(|threads| Isa::available().map(move |isa| (threads, isa))) {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            let packed = floats().quantized(WeightType::Q8_0, isa).expect("whole blocks");
            let packed = Weight::packed(&mut Arena::default(), &packed, [1, outputs]).expect("memory");
            for layer in [floats(), packed].map(|weight| Linear::new(weight, isa)) {
                let whole = linear(&layer, &x).expect("a product");
                let whole = F32View::new(&whole).expect("floats");
                for (start, rows) in [(0, vec![39]), (64, vec![]), (64, vec![3, 17, 39]), (160, (0..40).collect())] {
                    let narrowed = pool.install(|| linear_narrowed(&layer, &x, start, &rows)).expect("a product");
                    let narrowed = F32View::new(&narrowed).expect("floats");
                    for (i, (y, whole)) in narrowed.iter().zip(whole.iter()).enumerate() {
                        let (row, column) = (i / outputs, i % outputs);
                        let want = if column < start || rows.contains(&row) { *whole } else { 0.0 };
                        assert_eq!(y.to_bits(), want.to_bits(), "row {row}, column {column} from {start} on");
                    }
                }
            }
        }
    }
}
