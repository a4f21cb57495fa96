//! From named tensors to modules.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use foretoken_kernels::quant::{PANEL_ROWS, WeightType, pack, quantize_row};
use foretoken_kernels::{ElementType, Isa};

use super::{Checkpoint, RawTensor, TensorType};
use crate::nn::{Arena, Embedding, Linear, RmsNorm, Weight};
use crate::{Error, Result};

/// How a checkpoint becomes modules.
#[derive(Clone)]
pub struct LoadOptions {
    /// Instruction set that the modules compute with.
    pub isa: Isa,
    /// Quantizes floating-point matrices while they are loaded. Default: they stay as they are.
    pub quantize: Option<WeightType>,
    /// Called as tensors are loaded. Default: nobody.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl From<Isa> for LoadOptions {
    fn from(isa: Isa) -> Self {
        Self { isa, quantize: None, progress: None }
    }
}

/// How far a load has come.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Bytes of the checkpoint's tensors that are loaded.
    pub loaded: u64,
    /// Bytes of all its tensors.
    pub total: u64,
}

/// What one row of a pass costs in weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCost {
    /// Bytes that are read, once for all rows of a pass.
    pub bytes: usize,
    /// Multiply-adds per row.
    pub multiply_adds: usize,
}

/// What a matrix is for, which decides the type that in-situ quantization gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Matrix,
    /// The output head, where errors reach the logits directly: never below 6 bits, as llama.cpp's mixes have it.
    Head,
    /// Small and sensitive (routers, the projection of per-layer embeddings): never quantized here.
    Exact,
}

/// How an embedding table is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableUse {
    /// Rows are looked up: the table stays in the file.
    LookUp,
    /// It is the output head as well.
    Tied,
}

/// Takes tensors out of a checkpoint by name, checks their shapes, and remembers which were taken.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    prefix: String,
    options: LoadOptions,
    taken: BTreeSet<String>,
    step: StepCost,
    loaded: u64,
    total: u64,
    arena: Arena,
}

impl<'a> Loader<'a> {
    /// A loader of the tensors under `prefix`.
    pub fn new(checkpoint: &'a Checkpoint, prefix: &str, options: &LoadOptions) -> Self {
        let options = options.clone();
        let total = if options.progress.is_some() { checkpoint.bytes() } else { 0 };
        let (prefix, taken) = (prefix.to_owned(), BTreeSet::new());
        Self {
            checkpoint,
            prefix,
            options,
            taken,
            step: StepCost::default(),
            loaded: 0,
            total,
            arena: Arena::default(),
        }
    }

    /// The instruction set that the loaded modules compute with.
    pub fn isa(&self) -> Isa {
        self.options.isa
    }

    /// What the matrices that were loaded so far cost per row.
    pub fn step_cost(&self) -> StepCost {
        self.step
    }

    /// A tensor of exactly this shape.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<RawTensor> {
        let full = self.full(name);
        let Some(tensor) = self.checkpoint.get(&full)? else {
            return Err(self.error(name, "is missing; the checkpoint is incomplete or of another architecture"));
        };
        if tensor.shape != shape {
            let problem = format!("has shape {:?}, the configuration implies {shape:?}", tensor.shape);
            return Err(self.error(name, problem));
        }
        self.taken.insert(full);
        self.loaded += tensor.bytes.as_slice().len() as u64;
        Ok(tensor)
    }

    /// A linear layer `(outputs, inputs)`.
    ///
    /// # Errors
    /// As [`Loader::tensor`], or if its type is none that the kernels read.
    pub fn linear(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        self.linear_in(Role::Matrix, name, outputs, inputs)
    }

    /// A linear layer that in-situ quantization leaves alone.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn exact_linear(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        self.linear_in(Role::Exact, name, outputs, inputs)
    }

    /// An output head `(vocabulary, inputs)`.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn head(&mut self, name: &str, vocabulary: usize, inputs: usize) -> Result<Linear> {
        self.linear_in(Role::Head, name, vocabulary, inputs)
    }

    fn linear_in(&mut self, role: Role, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        let tensor = self.tensor(name, &[outputs, inputs])?;
        let weight = self.multiplied(role, name, tensor, [1, outputs, inputs])?;
        self.charge(&weight, 1);
        Ok(Linear::new(weight, self.options.isa))
    }

    /// A stack of matrices `(count, outputs, inputs)`, of which a row uses `used`.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn stack(&mut self, name: &str, shape: [usize; 3], used: usize) -> Result<Weight> {
        let tensor = self.tensor(name, &shape)?;
        let weight = self.multiplied(Role::Matrix, name, tensor, shape)?;
        self.charge(&weight, used);
        Ok(weight)
    }

    /// A table whose rows come out multiplied by `scale(its element type)`; quantized tables have no element type.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn embedding(
        &mut self,
        name: &str,
        [vocabulary, width]: [usize; 2],
        table_use: TableUse,
        scale: impl FnOnce(Option<ElementType>) -> f32,
    ) -> Result<Embedding> {
        let tensor = self.tensor(name, &[vocabulary, width])?;
        let element = match tensor.dtype {
            TensorType::Float(element) => Some(element),
            _ => None,
        };
        let weight = match (table_use, tensor.dtype) {
            (TableUse::LookUp, TensorType::Quantized(weight_type)) => {
                Weight::table(tensor.bytes, weight_type, vocabulary, width).ok_or_else(|| self.short(name))?
            }
            (TableUse::LookUp, _) => self.multiplied(Role::Exact, name, tensor, [1, vocabulary, width])?,
            (TableUse::Tied, _) => {
                let weight = self.multiplied(Role::Head, name, tensor, [1, vocabulary, width])?;
                self.charge(&weight, 1);
                weight
            }
        };
        Ok(Embedding::new(weight, scale(element)))
    }

    /// The matrix `name` `(count * outputs, inputs)` with its rows in the order `order`, as a stack.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn reordered(&mut self, name: &str, shape: [usize; 3], order: &[u32]) -> Result<Weight> {
        let [count, outputs, inputs] = shape;
        let mut tensor = self.tensor(name, &[count * outputs, inputs])?;
        let source = tensor.bytes.as_slice();
        let row = source.len() / order.len().max(1);
        let mut bytes = Vec::with_capacity(source.len());
        for id in order {
            let id = *id as usize;
            bytes.extend_from_slice(source.get(id * row..(id + 1) * row).ok_or_else(|| self.short(name))?);
        }
        tensor.bytes.release(0..tensor.bytes.as_slice().len());
        tensor.bytes = bytes.into();
        self.multiplied(Role::Head, name, tensor, shape)
    }

    /// A vector `(width)`, widened.
    ///
    /// # Errors
    /// As [`Loader::tensor`], or if it is not floating point.
    pub fn vector(&mut self, name: &str, width: usize) -> Result<Vec<f32>> {
        let tensor = self.tensor(name, &[width])?;
        let mut vector = vec![0.0; width];
        self.multiplied(Role::Exact, name, tensor, [1, 1, width])?.row(0, &mut vector);
        Ok(vector)
    }

    /// A norm over `width`.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn norm(&mut self, name: &str, width: usize, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.vector(name, width)?, eps, self.options.isa))
    }

    /// Matrices that will be multiplied, in the type that their role asks for.
    fn multiplied(&mut self, role: Role, name: &str, tensor: RawTensor, shape: [usize; 3]) -> Result<Weight> {
        let weight = match tensor.dtype {
            TensorType::Quantized(weight_type) => Weight::packed(&mut self.arena, tensor.bytes, weight_type, shape),
            TensorType::Float(element) => {
                let [_, _, inputs] = shape;
                let as_it_lies = Weight::float(tensor.bytes.clone(), element, shape);
                match (as_it_lies, self.options.quantize.and_then(|to| in_situ_type(to, role, inputs))) {
                    (Some(source), Some(weight_type)) => {
                        let quantized = quantize(&mut self.arena, self.options.isa, &source, weight_type, shape);
                        tensor.bytes.release(0..tensor.bytes.as_slice().len());
                        quantized
                    }
                    (as_it_lies, _) => as_it_lies,
                }
            }
            _ => return Err(self.error(name, "has a type that the kernels do not read; convert or quantize it anew")),
        };
        if let Some(progress) = &self.options.progress {
            progress(Progress { loaded: self.loaded, total: self.total });
        }
        weight.ok_or_else(|| self.short(name))
    }

    fn charge(&mut self, weight: &Weight, used: usize) {
        self.step.bytes += weight.bytes() / weight.count() * used;
        self.step.multiply_adds += weight.outputs() * weight.inputs() * used;
    }

    fn short(&self, name: &str) -> Error {
        self.error(name, "is not as long as its shape and type imply, or memory ran out; download the file again")
    }

    /// An error about the tensor `name`.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        let path = self.checkpoint.path().to_owned();
        Error::Tensor { path, tensor: self.full(name), problem: problem.into() }
    }

    /// Takes over what a loader of the same checkpoint, under another prefix, has taken.
    pub fn absorb(&mut self, other: Self) {
        self.taken.extend(other.taken);
    }

    /// Ends the load: tensors that nothing asked for and `known` does not explain are logged, so that a checkpoint with
    /// something this library does not compute never passes in silence.
    pub fn finish(self, known: impl Fn(&str) -> bool) {
        let mut strangers = self.checkpoint.names();
        // `rope_freqs` is GGUF's own; it was compared with the configuration.
        let taken = |name: &String| {
            // An assistant's tensors are asked for with the prefix that its safetensors have, and GGUF's names lack.
            self.taken.contains(name) || self.taken.contains(&format!("model.{name}"))
        };
        strangers.retain(|name| !taken(name) && name != "rope_freqs.weight" && !known(name));
        if !strangers.is_empty() {
            let path = self.checkpoint.path().display();
            tracing::warn!(%path, tensors = ?strangers, "tensors that no module uses");
        }
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// The type that in-situ quantization to `to` gives a matrix, with llama.cpp's fallbacks for rows that are not whole
/// blocks of 256; `None` leaves it as it is.
fn in_situ_type(to: WeightType, role: Role, inputs: usize) -> Option<WeightType> {
    use WeightType::*;
    let wanted = match (role, to) {
        (Role::Exact, _) => return None,
        (Role::Head, Q8_0) => Q8_0,
        (Role::Head, _) => Q6_K,
        (Role::Matrix, to) => to,
    };
    let fitting = match (inputs.is_multiple_of(wanted.block_len()), wanted) {
        (true, wanted) => wanted,
        (false, Q2_K | Q3_K) => Q4_0,
        (false, Q4_K) => Q5_0,
        (false, Q5_K) => Q5_1,
        (false, _) => Q8_0,
    };
    inputs.is_multiple_of(fitting.block_len()).then_some(fitting)
}

/// Quantizes and packs, a piece at a time on all threads: memory grows by the quantized size only.
fn quantize(
    arena: &mut Arena,
    isa: Isa,
    source: &Weight,
    weight_type: WeightType,
    shape: [usize; 3],
) -> Option<Weight> {
    let inputs = shape[2];
    let row_bytes = weight_type.row_bytes(inputs)?;
    Weight::fill_packed(arena, weight_type, shape, |index, rows: Range<usize>, panels| {
        let mut floats = vec![0.0; inputs];
        let mut quantized = vec![0; PANEL_ROWS * row_bytes];
        let crate::nn::Matrix::Float { elements, .. } = source.matrix(index) else { return };
        for (panel, packed) in panels.chunks_mut(PANEL_ROWS * row_bytes).enumerate() {
            let quantized = &mut quantized[..packed.len()];
            for (i, out) in quantized.chunks_exact_mut(row_bytes).enumerate() {
                let row = rows.start + panel * PANEL_ROWS + i;
                elements.slice(row * inputs..(row + 1) * inputs).widen(&mut floats);
                quantize_row(isa, weight_type, &floats, out);
            }
            pack(weight_type, inputs, quantized, packed);
        }
    })
}
