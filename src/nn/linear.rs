//! Linear layers without bias.

use std::cell::OnceCell;

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::quant::{self, ActivationType, Activations};
use foretoken_kernels::{ColumnsMut, ElementType, Isa, gemm};
use rayon::prelude::*;

use super::{Aligned, F32View, Matrix, Weight, tensor};
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
    tensors.try_into().map_err(|_| missing_output())
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
    let input = Input::new(&view, (rows, inputs));
    let jobs = layers.map(|layer| (layer.weight.matrix(0), &input));
    multiply(layers[0].isa, &jobs).try_into().map_err(|_| missing_output())
}

fn missing_output() -> crate::Error {
    candle_core::Error::Msg("linear: an output is missing".into()).into()
}

/// Input rows and their prepared forms (aligned, packed, quantized), each computed once and shared by all matrices.
pub struct Input<'a> {
    x: &'a [f32], // (rows, inputs)
    rows: usize,
    inputs: usize,
    aligned: OnceCell<Aligned<f32>>,
    words: OnceCell<Aligned<u32>>, // packed rows, for the float types that need them
    q8_1: OnceCell<Vec<i32>>,
    q8_k: OnceCell<Vec<i32>>,
}

impl<'a> Input<'a> {
    /// `x` is `(rows, inputs)`. There may be no rows.
    pub fn new(x: &'a [f32], (rows, inputs): (usize, usize)) -> Self {
        let (aligned, words, q8_1, q8_k) = Default::default();
        Self { x, rows, inputs, aligned, words, q8_1, q8_k }
    }

    fn floats(&self, isa: Isa, element: ElementType) -> gemm::PreparedRows<'_> {
        let (inputs, count) = (self.inputs, gemm::PreparedRows::scratch_len(isa, element, self.rows, self.inputs));
        if count == 0 {
            let aligned = self.aligned.get_or_init(|| Aligned::copy(self.x));
            return gemm::PreparedRows::from_words(aligned, inputs, &[]);
        }
        let words = self.words.get_or_init(|| {
            let mut words = Aligned::zeros(count);
            gemm::PreparedRows::new(isa, element, self.x, inputs, &mut words);
            words
        });
        gemm::PreparedRows::from_words(self.x, inputs, words)
    }

    fn quantized(&self, isa: Isa, activation_type: ActivationType) -> Activations<'_> {
        let cell = match activation_type {
            ActivationType::Q8_1 => &self.q8_1,
            ActivationType::Q8_K => &self.q8_k,
        };
        let words = cell.get_or_init(|| {
            let mut words = vec![0; activation_type.scratch_len(self.rows, self.inputs).unwrap_or(0)];
            Activations::quantize(isa, activation_type, self.x, self.inputs, &mut words);
            words
        });
        Activations::from_words(activation_type, words, self.rows, self.inputs)
    }
}

/// The prepared rows of a task.
#[derive(Clone, Copy)]
enum PreparedInput<'a> {
    Float(gemm::PreparedRows<'a>),
    Quantized(Activations<'a>),
}

/// Weight bytes per task: small enough that a preempted thread delays little work, large enough (about 10 microseconds)
/// to outweigh the scheduling cost.
const BYTES_PER_TASK: usize = 256 << 10;

/// Multiplies each input by its matrix, `(rows, inputs)` to `(rows, outputs)`, all in one parallel region.
///
/// # Panics
/// If an input's columns do not match its matrix.
pub fn multiply(isa: Isa, jobs: &[(Matrix<'_>, &Input<'_>)]) -> Vec<Vec<f32>> {
    // Uninitialised: zeroing would cost 1 % of a round of four rows of E2B.
    let mut outputs: Vec<_> =
        jobs.iter().map(|(matrix, input)| Vec::with_capacity(input.rows * matrix.outputs())).collect();
    let mut tasks = Vec::new();
    for ((matrix, input), y) in jobs.iter().zip(&mut outputs) {
        let rows = match matrix {
            Matrix::Float { elements, .. } => PreparedInput::Float(input.floats(isa, elements.element_type())),
            Matrix::Packed(packed) | Matrix::Scaled(packed, _) => {
                PreparedInput::Quantized(input.quantized(isa, packed.weight_type().activation_type()))
            }
        };
        let spare = &mut y.spare_capacity_mut()[..input.rows * matrix.outputs()];
        let y = ColumnsMut::uninit(spare, input.rows, matrix.outputs());
        if rayon::current_num_threads() == 1 {
            run_task(isa, matrix, rows, y);
        } else {
            tasks.extend(split(matrix, y).into_iter().map(|y| (matrix, rows, y)));
        }
    }
    tasks.into_par_iter().with_max_len(1).for_each(|(matrix, rows, y)| run_task(isa, matrix, rows, y));
    for ((matrix, input), y) in jobs.iter().zip(&mut outputs) {
        // SAFETY: the tasks cover all columns of all rows, and `run_task` wrote every one.
        unsafe { y.set_len(input.rows * matrix.outputs()) };
        if let Matrix::Scaled(_, factors) = matrix {
            let runs = y.chunks_exact_mut(matrix.outputs() / factors.len());
            runs.zip(factors.iter().cycle()).for_each(|(run, factor)| run.iter_mut().for_each(|y| *y *= factor));
        }
    }
    outputs
}

fn run_task(isa: Isa, matrix: &Matrix<'_>, rows: PreparedInput<'_>, y: ColumnsMut<'_>) {
    match (matrix, rows) {
        (Matrix::Packed(packed) | Matrix::Scaled(packed, _), PreparedInput::Quantized(x)) => {
            quant::matmul(isa, packed, &x, y)
        }
        (Matrix::Float { elements, .. }, PreparedInput::Float(x)) => gemm::matmul(isa, x, *elements, y),
        _ => unreachable!("`multiply` pairs matrices with matching rows"),
    }
}

/// Splits the columns of `y` into tasks of whole panels.
fn split<'y>(matrix: &Matrix<'_>, mut y: ColumnsMut<'y>) -> Vec<ColumnsMut<'y>> {
    let row_bytes = matrix.bytes() / matrix.outputs().max(1);
    let columns = (BYTES_PER_TASK / row_bytes.max(1)).max(1).next_multiple_of(quant::PANEL_ROWS);
    let mut tasks = Vec::with_capacity(y.range().len() / columns + 1);
    while y.range().len() > columns {
        let at = y.range().start + columns;
        let (left, right) = y.split_at(at);
        tasks.push(left);
        y = right;
    }
    tasks.push(y);
    tasks
}
