//! Linear layers without bias.

use candle_core::{Module, Tensor};
use foretoken_kernels::{ColumnsMut, Isa, matmul::matmul};
use rayon::prelude::*;

use super::{F32View, Weight, tensor};
use crate::Result;

/// `y = x W^T`, with `W` `(outputs, inputs)` in the checkpoint's own type.
#[derive(Clone)]
pub struct Linear {
    weight: Weight,
    isa: Isa,
}

impl Linear {
    /// A layer over `weight`, computed with `isa`.
    pub fn new(weight: Weight, isa: Isa) -> Self {
        Self { weight, isa }
    }

    /// The matrix.
    pub fn weight(&self) -> &Weight {
        &self.weight
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let [y] = project([self], x).map_err(candle_core::Error::wrap)?;
        Ok(y)
    }
}

/// Weight bytes per piece of work: small enough that a thread which loses its processor leaves little behind, large
/// enough (about 10 microseconds) to outlast the hand-over.
const BYTES_PER_PIECE: usize = 256 << 10;

/// Applies several layers to one input `(rows, inputs)` in one parallel region (q, k and v; gate and up).
///
/// # Errors
/// If the input is not `(rows, inputs)` of every layer.
pub fn project<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
    let (rows, inputs) = x.dims2()?;
    for layer in layers {
        if layer.weight.inputs() != inputs {
            let problem = format!("linear: the input has {inputs} columns, the weight {}", layer.weight.inputs());
            return Err(candle_core::Error::Msg(problem).into());
        }
    }
    let x = F32View::new(x)?;
    let mut outputs = layers.map(|layer| vec![0.0; rows * layer.weight.outputs()]);
    let whole =
        layers.iter().zip(&mut outputs).map(|(layer, y)| (*layer, ColumnsMut::new(y, rows, layer.weight.outputs())));
    let run = |(layer, y): (&Linear, ColumnsMut<'_>)| matmul(layer.isa, &x, inputs, layer.weight.elements(), y);
    if rayon::current_num_threads() == 1 {
        whole.for_each(run);
    } else {
        let pieces: Vec<_> = whole.flat_map(|(layer, y)| pieces(layer, y)).collect();
        pieces.into_par_iter().with_max_len(1).for_each(run);
    }
    let mut shapes = layers.iter().map(|layer| (rows, layer.weight.outputs()));
    let tensors: Result<Vec<_>> = outputs.into_iter().map(|y| tensor(y, shapes.next().unwrap_or_default())).collect();
    tensors?.try_into().map_err(|_| candle_core::Error::Msg("linear: an output was lost".into()).into())
}

/// `x` `(rows, inputs)` times the transpose of the rows `outputs` of `weight`: `(rows, outputs)`. For stacks of
/// matrices, of which a caller needs one at a time.
pub fn multiply(isa: Isa, x: &[f32], weight: &Weight, outputs: std::ops::Range<usize>, rows: usize) -> Vec<f32> {
    let width = outputs.len();
    let weight = weight.rows(outputs);
    let mut y = vec![0.0; rows * width];
    matmul(isa, x, x.len() / rows, weight, ColumnsMut::new(&mut y, rows, width));
    y
}

fn pieces<'a, 'y>(layer: &'a Linear, mut y: ColumnsMut<'y>) -> Vec<(&'a Linear, ColumnsMut<'y>)> {
    let row_bytes = layer.weight.inputs() * layer.weight.element().size();
    let columns = (BYTES_PER_PIECE / row_bytes.max(1)).next_multiple_of(16);
    let mut pieces = Vec::with_capacity(y.range().len() / columns + 1);
    while y.range().len() > columns {
        let (left, right) = {
            let at = y.range().start + columns;
            y.split_at(at)
        };
        pieces.push((layer, left));
        y = right;
    }
    pieces.push((layer, y));
    pieces
}
