//! Products of rows and matrices, divided among threads.

use std::borrow::Cow;
use std::cell::OnceCell;
use std::ops::Range;

use foretoken_kernels::quant::{self, ActivationFormat, Activations};
use foretoken_kernels::{ColumnsMut, ElementType, Isa, WrittenColumns, gemm};

use super::parallel::{VALUES_PER_TASK, divides};
use super::team::{for_each, threads};
use super::{Aligned, Gate, Matrix};

/// Input rows and their prepared forms (aligned, packed, quantized), each computed once and shared by all matrices.
pub struct Input<'a> {
    x: Cow<'a, [f32]>, // (rows, inputs)
    rows: usize,
    inputs: usize,
    aligned: OnceCell<Aligned<f32>>,
    words: OnceCell<Aligned<u32>>, // packed rows, for the float types that need them
    quantized: [OnceCell<Aligned<i32>>; 4], // one for each format
}

impl<'a> Input<'a> {
    /// `x` is `(rows, inputs)`. There may be no rows.
    ///
    /// # Panics
    /// If `x` has another length.
    pub fn new(x: impl Into<Cow<'a, [f32]>>, (rows, inputs): (usize, usize)) -> Self {
        let x = x.into();
        assert_eq!(Some(x.len()), rows.checked_mul(inputs), "input: x is not (rows, inputs)");
        let (aligned, words, quantized) = Default::default();
        Self { x, rows, inputs, aligned, words, quantized }
    }

    /// The input with the form that products with `matrix` read.
    pub(super) fn prepared_for(self, isa: Isa, matrix: &Matrix<'_>) -> Self {
        self.rows_for(isa, matrix);
        self
    }

    /// The form that products with `matrix` read.
    fn rows_for(&self, isa: Isa, matrix: &Matrix<'_>) -> PreparedInput<'_> {
        match matrix {
            Matrix::Float { elements, .. } => PreparedInput::Float(self.floats(isa, elements.element_type())),
            Matrix::Packed(packed) | Matrix::Scaled(packed, _) => {
                let format = ActivationFormat::new(isa, packed.weight_type(), self.rows);
                PreparedInput::Quantized(self.quantized(isa, format))
            }
        }
    }

    fn floats(&self, isa: Isa, element: ElementType) -> gemm::PreparedRows<'_> {
        let (inputs, count) = (self.inputs, gemm::PreparedRows::scratch_len(isa, element, self.rows, self.inputs));
        if count == 0 {
            let aligned = self.aligned.get_or_init(|| Aligned::copy(&self.x));
            return gemm::PreparedRows::from_words(aligned, inputs, &[]);
        }
        let words = self.words.get_or_init(|| {
            let mut words = Aligned::zeros(count);
            gemm::PreparedRows::new(isa, element, &self.x, inputs, &mut words);
            words
        });
        gemm::PreparedRows::from_words(&self.x, inputs, words)
    }

    fn quantized(&self, isa: Isa, format: ActivationFormat) -> Activations<'_> {
        let index = 2 * format.blocks as usize + format.layout as usize;
        let words = self.quantized[index].get_or_init(|| {
            let len = format.scratch_len(self.rows, self.inputs).unwrap_or(0);
            let write = |words: &mut [_]| {
                let parts = Activations::parts(format, &self.x, self.inputs, words, VALUES_PER_TASK);
                match divides(self.x.len()) {
                    true => for_each(parts, |part| part.quantize(isa)),
                    false => parts.for_each(|part| part.quantize(isa)),
                }
            };
            // SAFETY: every part is quantized, and the parts are all of `words`.
            unsafe { Aligned::written(len, write) }
        });
        Activations::from_words(format, words, self.rows, self.inputs)
    }
}

/// The prepared rows of a task.
#[derive(Clone, Copy)]
enum PreparedInput<'a> {
    Float(gemm::PreparedRows<'a>),
    Quantized(Activations<'a>),
}

/// Tasks per thread, if these bounds allow: the threads end at about the same time.
const TASKS_PER_THREAD: usize = 4;

/// Maximum weight bytes per task, of each of its matrices, except that panels are whole: a preempted thread delays
/// little work.
const MAX_TASK_BYTES: usize = 256 << 10;

/// Minimum weight bytes per task: a few microseconds, more than its scheduling takes.
const MIN_TASK_BYTES: usize = 32 << 10;

/// A product `x W^T`, or `function(x G^T) * (x U^T)`.
pub struct Job<'a> {
    matrix: Matrix<'a>,
    columns: Range<usize>, // of the result: rows of the matrix
    input: &'a Input<'a>,
    gated: Option<(Gate, Matrix<'a>)>, // U
}

impl<'a> Job<'a> {
    /// `input` by `matrix`.
    pub fn product(matrix: Matrix<'a>, input: &'a Input<'a>) -> Self {
        Self::columns(matrix, 0..matrix.outputs(), input)
    }

    /// The columns `columns` of `input` by `matrix`; there may be none.
    ///
    /// # Panics
    /// If the matrix has fewer rows.
    pub fn columns(matrix: Matrix<'a>, columns: Range<usize>, input: &'a Input<'a>) -> Self {
        assert!(columns.end <= matrix.outputs(), "product: fewer than {} rows", columns.end);
        Self { matrix, columns, input, gated: None }
    }

    /// `function(input G^T) * (input U^T)`, G the first `outputs` rows of `gate`, U the last ones of `up`.
    ///
    /// # Panics
    /// If a matrix has fewer rows.
    pub fn gated(function: Gate, gate: Matrix<'a>, up: Matrix<'a>, outputs: usize, input: &'a Input<'a>) -> Self {
        assert!(gate.outputs().min(up.outputs()) >= outputs, "gated: fewer than {outputs} rows");
        Self { matrix: gate, columns: 0..outputs, input, gated: Some((function, up)) }
    }

    /// Bytes of a row of the matrix.
    fn row_bytes(&self) -> usize {
        self.matrix.bytes() / self.matrix.outputs().max(1)
    }

    /// The columns of a task, in whole panels, if the task of a single product should read `bytes` bytes of weights.
    /// Panels are read four side by side, so a task has a multiple of four, unless one of the `threads` would get none.
    /// (With one to three panels, where rows are long, one row of 12B took 58 ms with two threads of a Zen 5 instead of
    /// 40.)
    fn columns_per_task(&self, bytes: usize, threads: usize) -> usize {
        let are_many = bytes > MAX_TASK_BYTES && self.columns.len() >= threads * quant::STREAMS * quant::PANEL_ROWS;
        let least = if are_many { quant::STREAMS } else { 1 };
        let bytes = bytes.clamp(MIN_TASK_BYTES, MAX_TASK_BYTES);
        let panels = (bytes / self.row_bytes().max(1)).div_ceil(quant::PANEL_ROWS).max(least);
        panels.next_multiple_of(quant::STREAMS.min(panels)) * quant::PANEL_ROWS
    }
}

/// Columns of a job's result.
struct Task<'a> {
    matrix: &'a Matrix<'a>,
    rows: PreparedInput<'a>,
    gated: Option<Gated<'a>>,
    y: ColumnsMut<'a>,
}

/// The gated product's up projection.
#[derive(Clone, Copy)]
struct Gated<'a> {
    function: Gate,
    matrix: &'a Matrix<'a>,
    first: usize, // of its rows
    rows: PreparedInput<'a>,
}

/// Prepares the inputs, then computes all jobs in one parallel region: `(rows, columns)` each.
///
/// # Panics
/// If an input's columns do not match its matrix.
pub fn multiply(isa: Isa, jobs: &[Job<'_>]) -> Vec<Vec<f32>> {
    // Uninitialised: zeroing would cost 1 % of a round of four rows of E2B.
    let mut outputs: Vec<_> = jobs.iter().map(|job| Vec::with_capacity(job.input.rows * job.columns.len())).collect();
    let threads = threads();
    let bytes: usize = jobs.iter().map(|job| job.row_bytes() * job.columns.len()).sum();
    let mut tasks = Vec::new();
    for (job, y) in jobs.iter().zip(&mut outputs) {
        let (matrix, rows) = (&job.matrix, job.input.rows_for(isa, &job.matrix));
        let gated = job.gated.as_ref().map(|(function, matrix)| {
            let (function, first) = (*function, matrix.outputs() - job.columns.len());
            Gated { function, matrix, first, rows: job.input.rows_for(isa, matrix) }
        });
        let spare = &mut y.spare_capacity_mut()[..job.input.rows * job.columns.len()];
        let y = ColumnsMut::of_range(spare, job.input.rows, job.columns.clone());
        if threads == 1 {
            run_task(isa, Task { matrix, rows, gated, y });
        } else {
            let columns = job.columns_per_task(bytes / (TASKS_PER_THREAD * threads), threads);
            tasks.extend(split(y, columns).map(|y| Task { matrix, rows, gated, y }));
        }
    }
    for_each(tasks.into_iter(), |task| run_task(isa, task));
    for (job, y) in jobs.iter().zip(&mut outputs) {
        // SAFETY: the tasks cover all columns of all rows, and `run_task` wrote every one.
        unsafe { y.set_len(job.input.rows * job.columns.len()) };
    }
    outputs
}

fn run_task(isa: Isa, task: Task<'_>) {
    let mut y = product(isa, task.matrix, task.rows, task.y);
    let Some(Gated { function, matrix, first, rows }) = task.gated else { return };
    let range = first + y.range().start..first + y.range().end;
    let mut up = Vec::with_capacity(y.rows() * range.len());
    let spare = &mut up.spare_capacity_mut()[..y.rows() * range.len()];
    let mut up = product(isa, matrix, rows, ColumnsMut::of_range(spare, y.rows(), range));
    for row in 0..y.rows() {
        function.apply(isa, y.row_mut(row), up.row_mut(row));
    }
}

/// The columns of `x W^T` that `y` holds.
fn product<'y>(isa: Isa, matrix: &Matrix<'_>, rows: PreparedInput<'_>, y: ColumnsMut<'y>) -> WrittenColumns<'y> {
    let mut y = match (matrix, rows) {
        (Matrix::Packed(packed) | Matrix::Scaled(packed, _), PreparedInput::Quantized(x)) => {
            quant::matmul(isa, packed, &x, y)
        }
        (Matrix::Float { elements, .. }, PreparedInput::Float(x)) => gemm::matmul(isa, x, *elements, y),
        _ => unreachable!("`rows_for` pairs matrices with matching rows"),
    };
    let Matrix::Scaled(packed, factors) = matrix else { return y };
    let (range, run) = (y.range(), packed.outputs() / factors.len());
    for (i, factor) in factors.iter().enumerate() {
        let (start, end) = ((i * run).max(range.start), ((i + 1) * run).min(range.end));
        if start >= end {
            continue;
        }
        for row in 0..y.rows() {
            y.row_mut(row)[start - range.start..end - range.start].iter_mut().for_each(|y| *y *= factor);
        }
    }
    y
}

/// Divides `y` into runs of `columns` columns.
fn split(y: ColumnsMut<'_>, columns: usize) -> impl Iterator<Item = ColumnsMut<'_>> {
    let mut rest = Some(y);
    std::iter::from_fn(move || {
        let y = rest.take()?;
        let (at, end) = (y.range().start + columns, y.range().end);
        if at >= end {
            return Some(y);
        }
        let (left, right) = y.split_at(at);
        rest = Some(right);
        Some(left)
    })
}

#[cfg(test)]
mod tests {
    use foretoken_kernels::quant::WeightType;

    use super::*;
    use crate::nn::{Arena, Bytes, Weight};

    /// `(outputs, inputs)` values.
    fn floats(outputs: usize, inputs: usize) -> Weight {
        let values = (0..outputs * inputs).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0);
        let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        Weight::float(Bytes::from(bytes), ElementType::F32, [1, outputs, inputs]).expect("as many bytes")
    }

    fn quantized(isa: Isa, outputs: usize, inputs: usize, factors: Vec<f32>) -> Weight {
        let rows = floats(outputs, inputs).quantized(WeightType::Q8_0, isa).expect("whole blocks");
        Weight::packed(&mut Arena::default(), &rows, [1, outputs]).expect("memory").scaled(factors)
    }

    /// Stacked and separate, with runs of factors and without, the halves not whole panels.
    #[test]
    fn gated_products_are_gates_times_products() {
        let (inputs, outputs, rows) = (64, 1000, 5);
        let x: Vec<f32> = (0..rows * inputs).map(|i| ((i * 29) % 83) as f32 / 40.0 - 1.0).collect();
        for (threads, isa) in [1, 3].into_iter().flat_map(|threads| Isa::available().map(move |isa| (threads, isa))) {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            let factors = (1..=50).map(|i| i as f32 / 16.0).collect();
            for stack in [floats(2 * outputs, inputs), quantized(isa, 2 * outputs, inputs, factors)] {
                let separate = floats(outputs, inputs);
                for up in [&stack, &separate] {
                    let products = pool.install(|| {
                        let input = Input::new(&x[..], (rows, inputs));
                        let (gate, up) = (stack.matrix(0), up.matrix(0));
                        let gated = Job::gated(Gate::Silu, gate, up, outputs, &input);
                        multiply(isa, &[Job::product(gate, &input), Job::product(up, &input), gated])
                    });
                    let [gates, ups, gated] = &products[..] else { panic!("three products") };
                    let first = up.outputs() - outputs;
                    let mut want: Vec<f32> =
                        gates.chunks_exact(2 * outputs).flat_map(|row| &row[..outputs]).copied().collect();
                    let ups: Vec<f32> = ups.chunks_exact(up.outputs()).flat_map(|row| &row[first..]).copied().collect();
                    Gate::Silu.apply(isa, &mut want, &ups);
                    assert!(want.iter().any(|y| y.abs() > 0.1));
                    assert_eq!(*gated, want, "{threads} threads, {}", isa.name());
                }
            }
        }
    }
}
