//! Linear layers without bias.

use std::cell::OnceCell;

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::quant::{self, ActivationType, Activations};
use foretoken_kernels::{ColumnsMut, ElementType, Isa, matmul};
use rayon::prelude::*;

use super::{Aligned, F32View, Matrix, Weight, tensor};
use crate::Result;

/// `y = x W^T`, with `W` `(outputs, inputs)` in the checkpoint's own type.
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

    /// `y = x W^T`, and `then` on what lies in `y`.
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
        let [y] = project([self], x).map_err(candle_core::Error::wrap)?;
        Ok(y)
    }
}

/// Applies several layers to one input `(rows, inputs)` in one parallel region (q, k and v; gate and up).
///
/// # Errors
/// If the input is not `(rows, inputs)` of every layer.
pub fn project<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
    let rows = x.dim(0)?;
    let mut tensors = Vec::with_capacity(N);
    for (layer, y) in layers.into_iter().zip(products(layers, x)?) {
        tensors.push(tensor(y, (rows, layer.weight.outputs()))?);
    }
    tensors.try_into().map_err(|_| lost())
}

fn products<const N: usize>(layers: [&Linear; N], x: &Tensor) -> Result<[Vec<f32>; N]> {
    let (rows, inputs) = x.dims2()?;
    for layer in layers {
        if layer.weight.inputs() != inputs {
            let problem = format!("linear: the input has {inputs} columns, the weight {}", layer.weight.inputs());
            return Err(candle_core::Error::Msg(problem).into());
        }
    }
    let view = F32View::new(x)?;
    let input = Input::new(&view, rows);
    let jobs = layers.map(|layer| (layer.weight.matrix(0), &input));
    multiply(layers[0].isa, &jobs).try_into().map_err(|_| lost())
}

fn lost() -> crate::Error {
    candle_core::Error::Msg("linear: an output was lost".into()).into()
}

/// Rows to be multiplied, and the forms that matrices need, each made once and shared by all that need it.
pub struct Input<'a> {
    x: &'a [f32], // (rows, inputs)
    rows: usize,
    aligned: OnceCell<Aligned<f32>>,
    words: OnceCell<Aligned<u32>>, // for the one type of floats that needs them
    q8_1: OnceCell<Vec<i32>>,
    q8_k: OnceCell<Vec<i32>>,
}

impl<'a> Input<'a> {
    /// `x` is `(rows, inputs)`.
    pub fn new(x: &'a [f32], rows: usize) -> Self {
        Self { x, rows, aligned: OnceCell::new(), words: OnceCell::new(), q8_1: OnceCell::new(), q8_k: OnceCell::new() }
    }

    fn inputs(&self) -> usize {
        self.x.len() / self.rows.max(1)
    }

    fn floats(&self, isa: Isa, element: ElementType) -> matmul::Rows<'_> {
        let (inputs, count) = (self.inputs(), matmul::Rows::scratch_len(isa, element, self.rows, self.inputs()));
        if count == 0 {
            let aligned = self.aligned.get_or_init(|| Aligned::copy(self.x));
            return matmul::Rows::from_words(aligned, inputs, &[]);
        }
        let words = self.words.get_or_init(|| {
            let mut words = Aligned::zeros(count);
            matmul::Rows::new(isa, element, self.x, inputs, &mut words);
            words
        });
        matmul::Rows::from_words(self.x, inputs, words)
    }

    fn quantized(&self, isa: Isa, activation_type: ActivationType) -> Activations<'_> {
        let cell = match activation_type {
            ActivationType::Q8_1 => &self.q8_1,
            ActivationType::Q8_K => &self.q8_k,
        };
        let words = cell.get_or_init(|| {
            let mut words = vec![0; activation_type.scratch_len(self.rows, self.inputs()).unwrap_or(0)];
            Activations::quantize(isa, activation_type, self.x, self.inputs(), &mut words);
            words
        });
        Activations::from_words(activation_type, words, self.rows, self.inputs())
    }
}

/// What a piece of work multiplies by.
#[derive(Clone, Copy)]
enum Rows<'a> {
    Float(matmul::Rows<'a>),
    Quantized(Activations<'a>),
}

/// Weight bytes per piece of work: small enough that a thread which loses its processor leaves little behind, large
/// enough (about 10 microseconds) to outlast the hand-over.
const BYTES_PER_PIECE: usize = 256 << 10;

/// Multiplies each input by its matrix, `(rows, inputs)` to `(rows, outputs)`, all in one parallel region.
///
/// # Panics
/// If an input has not as many columns as its matrix.
pub fn multiply(isa: Isa, jobs: &[(Matrix<'_>, &Input<'_>)]) -> Vec<Vec<f32>> {
    // Not zeroed first: a round of four rows of E2B would spend 1 % of its time with that.
    let mut outputs: Vec<_> =
        jobs.iter().map(|(matrix, input)| Vec::with_capacity(input.rows * matrix.outputs())).collect();
    let mut pieces = Vec::new();
    for ((matrix, input), y) in jobs.iter().zip(&mut outputs) {
        let rows = match matrix {
            Matrix::Float { elements, .. } => Rows::Float(input.floats(isa, elements.element_type())),
            Matrix::Packed(packed) => Rows::Quantized(input.quantized(isa, packed.weight_type().activation_type())),
        };
        let room = &mut y.spare_capacity_mut()[..input.rows * matrix.outputs()];
        let y = ColumnsMut::uninit(room, input.rows, matrix.outputs());
        if rayon::current_num_threads() == 1 {
            run_piece(isa, matrix, rows, y);
        } else {
            pieces.extend(split(matrix, y).into_iter().map(|y| (matrix, rows, y)));
        }
    }
    pieces.into_par_iter().with_max_len(1).for_each(|(matrix, rows, y)| run_piece(isa, matrix, rows, y));
    for ((matrix, input), y) in jobs.iter().zip(&mut outputs) {
        // SAFETY: the pieces cover all columns of all rows, and `run_piece` wrote every piece.
        unsafe { y.set_len(input.rows * matrix.outputs()) };
    }
    outputs
}

fn run_piece(isa: Isa, matrix: &Matrix<'_>, rows: Rows<'_>, y: ColumnsMut<'_>) {
    match (matrix, rows) {
        (Matrix::Packed(packed), Rows::Quantized(x)) => quant::matmul(isa, packed, &x, y),
        (Matrix::Float { elements, .. }, Rows::Float(x)) => matmul::matmul(isa, x, *elements, y),
        _ => unreachable!("`multiply` pairs matrices with the rows that they take"),
    }
}

/// Cuts the columns of `y` into pieces of whole panels.
fn split<'y>(matrix: &Matrix<'_>, mut y: ColumnsMut<'y>) -> Vec<ColumnsMut<'y>> {
    let row_bytes = matrix.bytes() / matrix.outputs().max(1);
    let columns = (BYTES_PER_PIECE / row_bytes.max(1)).max(1).next_multiple_of(quant::PANEL_ROWS);
    let mut pieces = Vec::with_capacity(y.range().len() / columns + 1);
    while y.range().len() > columns {
        let at = y.range().start + columns;
        let (left, right) = y.split_at(at);
        pieces.push(left);
        y = right;
    }
    pieces.push(y);
    pieces
}
