//! Builds modules from named tensors.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use foretoken_kernels::quant::WeightType;
use foretoken_kernels::{ElementType, Isa};
use rayon::prelude::*;

use super::files::Checkpoint;
use super::load_options::{LoadOptions, Progress};
use super::quantize::mix::fitting;
use super::separate_experts::{matrices, parts};
use super::tensor::{RawTensor, TensorType};
use super::unsupported_tensors::{STRAY_SCALE, is_scale, is_unneeded};
use crate::nn::{Arena, Embedding, Linear, RmsNorm, Unpacked, Weight};
use crate::{Error, Result};

/// Cost of the weights in a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepCost {
    /// Bytes read per pass, once for all rows; of experts those of one row, to which further rows add theirs.
    pub bytes: usize,
    /// Multiply-adds per row.
    pub multiply_adds: usize,
}

impl StepCost {
    /// The sum.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { bytes: self.bytes + other.bytes, multiply_adds: self.multiply_adds + other.multiply_adds }
    }
}

/// The role of a matrix, which determines its type under in-situ quantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Matrix,
    /// The output head, whose errors go directly into the logits: at least 6 bits, as in llama.cpp's mixes.
    Head,
    /// Small and sensitive (routers, the projection of per-layer embeddings): never quantized here.
    Exact,
}

/// How an embedding table is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableUse {
    /// Rows are gathered: the table stays in the file.
    LookUp,
    /// It is also the output head.
    Tied,
}

/// What weights are loaded for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WeightUse {
    /// Multiplication on the CPU: quantized ones are packed.
    Multiply,
    /// Upload: dropped afterwards; quantized ones are packed during upload.
    Upload,
}

/// Bytes of every tensor in the checksum: from its middle, which training changes.
const SAMPLE: usize = 256;

/// Loads tensors by name, checks their shapes, and records which were used.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    prefix: String,
    options: LoadOptions,
    weight_use: WeightUse,
    taken: BTreeSet<String>,
    sample: crc32fast::Hasher,
    step: StepCost,
    loaded: Arc<AtomicU64>, // bytes, of all loaders of the load
    total: u64,
    arena: Arena,
}

impl<'a> Loader<'a> {
    /// A loader of the tensors under `prefix`.
    pub fn new(checkpoint: &'a Checkpoint, prefix: &str, options: &LoadOptions) -> Self {
        let options = options.clone();
        let total = if options.progress.is_some() { checkpoint.text_bytes() } else { 0 };
        let (prefix, taken) = (prefix.to_owned(), BTreeSet::new());
        Self {
            checkpoint,
            prefix,
            options,
            weight_use: WeightUse::Multiply,
            taken,
            sample: crc32fast::Hasher::new(),
            step: StepCost::default(),
            loaded: Arc::default(),
            total,
            arena: Arena::default(),
        }
    }

    /// A loader of the tensors under another prefix, for the same use, in the same load: its progress continues.
    pub(crate) fn beside(&self, prefix: &str) -> Self {
        let other = Self::new(self.checkpoint, prefix, &self.options).for_use(self.weight_use);
        Self { loaded: self.loaded.clone(), ..other }
    }

    /// The same loader, for weights with `weight_use`.
    pub(crate) fn for_use(self, weight_use: WeightUse) -> Self {
        Self { weight_use, ..self }
    }

    /// The instruction set of the loaded modules.
    pub fn isa(&self) -> Isa {
        self.options.isa
    }

    /// Identifies a model: the checksums of its configuration, including the type that its matrices are quantized to, and
    /// of a few bytes of every tensor loaded so far.
    pub(crate) fn fingerprint(&self, config: &impl Debug) -> u64 {
        let quantized = self.options.quantize.map_or(String::new(), |to| format!("{to:?}"));
        let config = crc32fast::hash(format!("{config:?}{quantized}").as_bytes());
        u64::from(config) << 32 | u64::from(self.sample.clone().finalize())
    }

    /// Cost of the matrices loaded so far.
    pub fn step_cost(&self) -> StepCost {
        self.step
    }

    /// Whether there is a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.has(&self.full(name))
    }

    /// Whether the tensor `name` is bit for bit that of the full name `original`, which may be in
    /// another form in memory. A copy counts as used.
    ///
    /// # Errors
    /// If one cannot be read.
    pub fn is_copy(&mut self, name: &str, original: &str) -> Result<bool> {
        let full = self.full(name);
        let is_copy = self.checkpoint.is_copy(&full, original)?;
        if is_copy {
            self.taken.insert(full);
        }
        Ok(is_copy)
    }

    /// A tensor of exactly this shape.
    ///
    /// # Errors
    /// If it is missing or has another shape, or the load is cancelled.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<RawTensor> {
        self.options.cancel.check()?;
        let full = self.full(name);
        let Some(tensor) = self.checkpoint.get(&full)? else {
            let own = full.strip_prefix("model.").unwrap_or(&full); // as assistants' are loaded
            let of_gguf = self.checkpoint.gguf().and_then(|gguf| gguf.names().gguf(own).into_iter().next());
            let named = of_gguf.map(|name| format!(" (here {name})")).unwrap_or_default();
            let problem = format!("is missing{named}; the checkpoint is incomplete or of another architecture");
            return Err(self.error(name, problem));
        };
        if !self.checkpoint.is_shape(&tensor.shape, shape) {
            let problem = format!("has shape {:?}, the configuration implies {shape:?}", tensor.shape);
            return Err(self.error(name, problem));
        }
        self.sample.update(name.as_bytes());
        let bytes = tensor.bytes.as_slice();
        self.sample.update(&bytes[bytes.len() / 2..][..SAMPLE.min(bytes.len() - bytes.len() / 2)]);
        self.taken.insert(full);
        self.loaded.fetch_add(tensor.bytes.as_slice().len() as u64, Ordering::Relaxed);
        Ok(tensor)
    }

    /// A linear layer `(outputs, inputs)`.
    ///
    /// # Errors
    /// As [`Loader::tensor`], or if no kernel supports its type.
    pub fn linear(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        self.linear_in(Role::Matrix, name, outputs, inputs)
    }

    /// A linear layer exempt from in-situ quantization.
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

    /// A stack of experts' matrices `(count, outputs, inputs)`, of which each row uses `used`. It is assembled in memory
    /// if each matrix has a tensor.
    ///
    /// # Errors
    /// As [`Loader::linear`], or if two of its tensors differ in type.
    pub fn stack(&mut self, name: &str, shape: [usize; 3], used: usize) -> Result<Weight> {
        let tensor = match self.checkpoint.is_separate(&self.full(name)) {
            true => self.assembled(name, shape)?,
            false => self.tensor(name, &shape)?,
        };
        let weight = self.multiplied(Role::Matrix, name, tensor, shape)?;
        self.charge(&weight, used);
        Ok(weight)
    }

    /// The stack `name` from its separate matrices.
    fn assembled(&mut self, name: &str, shape: [usize; 3]) -> Result<RawTensor> {
        let [count, outputs, inputs] = shape;
        let mut joined: Option<(TensorType, Vec<u8>)> = None;
        for matrix in matrices(name, count) {
            let tensor = self.tensor(&matrix, &[outputs / parts(name).len(), inputs])?;
            let (dtype, bytes) = joined.get_or_insert((tensor.dtype, Vec::new()));
            if *dtype != tensor.dtype {
                let problem = format!("is {}, the experts before it are {}", tensor.dtype.name(), dtype.name());
                return Err(self.error(&matrix, format!("{problem}; use a checkpoint in which all are alike")));
            }
            bytes.extend_from_slice(tensor.bytes.as_slice());
            tensor.bytes.release_all();
        }
        let (dtype, bytes) = joined.ok_or_else(|| self.error(name, "has no experts"))?;
        Ok(RawTensor { dtype, shape: shape.to_vec(), bytes: bytes.into() })
    }

    /// An embedding table whose rows are multiplied by `scale(element type)`; `None` for quantized tables.
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
                let rows = Unpacked::quantized(tensor.bytes, weight_type, vocabulary, width);
                Weight::unpacked(rows.ok_or_else(|| self.short(name))?, [1, vocabulary]).named(&self.full(name))
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

    /// The matrix `name` `(count * outputs, inputs)`, its rows in the order `order`, as a stack.
    ///
    /// # Errors
    /// As [`Loader::linear`].
    pub fn reordered(&mut self, name: &str, shape: [usize; 3], order: &[u32]) -> Result<Weight> {
        let [count, outputs, inputs] = shape;
        let mut tensor = self.tensor(name, &[count * outputs, inputs])?;
        let source = tensor.bytes.as_slice();
        let row = source.len() / order.len().max(1);
        let mut bytes = vec![0u8; row * order.len()];
        let copied = bytes.par_chunks_exact_mut(row.max(1)).zip(order).try_for_each(|(to, id)| {
            let from = *id as usize * row;
            to.copy_from_slice(source.get(from..from + row)?);
            Some(())
        });
        copied.ok_or_else(|| self.short(name))?;
        tensor.bytes.release_all();
        tensor.bytes = bytes.into();
        self.multiplied(Role::Head, name, tensor, shape)
    }

    /// A vector `(width)`, widened.
    ///
    /// # Errors
    /// As [`Loader::tensor`], or if it is not floating point.
    pub fn vector(&mut self, name: &str, width: usize) -> Result<Vec<f32>> {
        self.floats(name, &[width])
    }

    /// All elements of a tensor of exactly this shape, widened.
    ///
    /// # Errors
    /// As [`Loader::vector`].
    pub fn floats(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let tensor = self.tensor(name, shape)?;
        let len = shape.iter().product();
        let weight = self.multiplied(Role::Exact, name, tensor, [1, 1, len])?;
        let mut floats = vec![0.0; len];
        weight.row(0, &mut floats);
        Ok(floats)
    }

    /// A vector `(width)` of factors, widened.
    ///
    /// # Errors
    /// As [`Loader::vector`], or if all are zero, which indicates a truncated download: every layer has
    /// factors, and matrices are too large to scan.
    pub fn factors(&mut self, name: &str, width: usize) -> Result<Vec<f32>> {
        let factors = self.vector(name, width)?;
        match factors.iter().all(|factor| *factor == 0.0) {
            true => Err(self.error(name, "is all zeros, as in a truncated download; download the file again")),
            false => Ok(factors),
        }
    }

    /// A norm over `width`.
    ///
    /// # Errors
    /// As [`Loader::factors`].
    pub fn norm(&mut self, name: &str, width: usize, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.factors(name, width)?, eps, self.options.isa))
    }

    /// Matrices for multiplication, in the type of their role.
    fn multiplied(&mut self, role: Role, name: &str, tensor: RawTensor, shape: [usize; 3]) -> Result<Weight> {
        let [count, outputs, inputs] = shape;
        let weight = match tensor.dtype {
            TensorType::Quantized(weight_type) => {
                let rows = count.checked_mul(outputs);
                let rows = rows.and_then(|rows| Unpacked::quantized(tensor.bytes, weight_type, rows, inputs));
                let rows = rows.ok_or_else(|| self.short(name))?;
                let weight = self.quantized(name, rows, [count, outputs])?;
                if weight_type == WeightType::NVFP4 { weight.scaled(self.scales(name, count)?) } else { weight }
            }
            TensorType::Float(element) => {
                if let Some(to) = self.options.quantize.filter(|to| !to.is_written()) {
                    let problem = format!("{} is load-only; use q4_k or iq4_xs", to.name());
                    return Err(Error::argument("quantize", problem));
                }
                let as_it_lies = Weight::float(tensor.bytes, element, shape).ok_or_else(|| self.short(name))?;
                match self.options.quantize.and_then(|to| in_situ_type(to, role, inputs)) {
                    Some(weight_type) => {
                        let rows = as_it_lies.quantized(weight_type, self.options.isa);
                        self.quantized(name, rows.ok_or_else(|| self.short(name))?, [count, outputs])?
                    }
                    None => as_it_lies,
                }
            }
            other => {
                let (path, what) = (Some(self.checkpoint.path().to_owned()), format!("tensor {}", self.full(name)));
                let problem =
                    format!("is {}, which is not supported; convert or quantize the model again", other.name());
                return Err(Error::Unsupported { path, what, problem });
            }
        };
        if let Some(progress) = &self.options.progress {
            progress(Progress { loaded: self.loaded.load(Ordering::Relaxed), total: self.total });
        }
        Ok(weight.named(&self.full(name)))
    }

    /// Quantized matrices, packed if they are multiplied on the CPU.
    fn quantized(&mut self, name: &str, rows: Unpacked, [count, outputs]: [usize; 2]) -> Result<Weight> {
        match self.weight_use {
            WeightUse::Upload => Ok(Weight::unpacked(rows, [count, outputs])),
            WeightUse::Multiply => Weight::packed(&mut self.arena, &rows, [count, outputs]).ok_or_else(|| {
                let one = rows.weight_type().packed_bytes_for(outputs, rows.inputs());
                self.no_memory(name, one.and_then(|one| one.checked_mul(count)))
            }),
        }
    }

    /// The separate scales of the NVFP4 weight `name` in a GGUF file.
    fn scales(&mut self, name: &str, count: usize) -> Result<Vec<f32>> {
        let (Some(gguf), full) = (self.checkpoint.gguf(), self.full(name)) else { return Ok(Vec::new()) };
        let scales = gguf.scales(full.strip_prefix("model.").unwrap_or(&full), count)?;
        self.taken.extend(scales.tensors);
        Ok(scales.factors)
    }

    fn charge(&mut self, weight: &Weight, used: usize) {
        self.step.bytes += weight.bytes() / weight.count() * used;
        self.step.multiply_adds += weight.outputs() * weight.inputs() * used;
    }

    fn short(&self, name: &str) -> Error {
        self.error(name, "is not as long as its shape and type imply; download the file again")
    }

    fn no_memory(&self, name: &str, bytes: Option<usize>) -> Error {
        Error::Memory {
            what: format!("tensor {}", self.full(name)),
            needed: bytes.map(|bytes| bytes as u64),
            available: None,
            fits: None,
            remedy: "free memory, or use a smaller model or type".into(),
        }
    }

    /// An error about the tensor `name`.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        let path = self.checkpoint.path().to_owned();
        Error::Tensor { path, tensor: self.full(name), problem: problem.into() }
    }

    /// Merges the used tensors of a loader of the same checkpoint with another prefix.
    pub fn absorb(&mut self, other: Self) {
        self.taken.extend(other.taken);
    }

    /// Ends the load, completes its progress, and warns of unused tensors, except those that `known` accepts: they may
    /// belong to modules that are not implemented.
    ///
    /// # Errors
    /// If an unused tensor is a scale of weights, has this loader's prefix, or is in a GGUF file: then the saved model
    /// has another module, or a name or the configuration is damaged.
    pub fn finish(self, known: impl Fn(&str) -> bool) -> Result<()> {
        let mut unused = self.checkpoint.names();
        // `rope_freqs` exists in GGUF only; it is checked against the configuration.
        let taken = |name: &String| {
            // Assistants' tensors are loaded by their safetensors prefix, which GGUF names lack.
            self.taken.contains(name) || self.taken.contains(&format!("model.{name}"))
        };
        unused.retain(|name| !taken(name) && name != "rope_freqs.weight" && !is_unneeded(name) && !known(name));
        if let Some(scale) = unused.iter().find(|name| is_scale(name)) {
            let (path, tensor) = (self.checkpoint.path().to_owned(), scale.clone());
            return Err(Error::Tensor { path, tensor, problem: STRAY_SCALE.into() });
        }
        let is_own = |name: &&String| self.checkpoint.gguf().is_some() || name.starts_with(&self.prefix);
        if let Some(tensor) = unused.iter().find(is_own).cloned() {
            let path = self.checkpoint.path().to_owned();
            let problem = "is a tensor that no module of this configuration has; download or convert the model again";
            return Err(Error::Tensor { path, tensor, problem: problem.into() });
        }
        if !unused.is_empty() {
            let path = self.checkpoint.path().display();
            tracing::warn!(%path, tensors = ?unused, "tensors that no module uses");
        }
        if let Some(progress) = &self.options.progress {
            // With what is known to be unused, such as a second copy of the output head.
            progress(Progress { loaded: self.total, total: self.total });
        }
        Ok(())
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// A matrix's type under in-situ quantization to `to`, with llama.cpp's fallbacks for rows that are not
/// whole blocks of 256; `None` leaves it unchanged.
fn in_situ_type(to: WeightType, role: Role, inputs: usize) -> Option<WeightType> {
    let preferred = match role {
        Role::Exact => return None,
        Role::Head if to != WeightType::Q8_0 => WeightType::Q6_K,
        Role::Head | Role::Matrix => to,
    };
    match fitting(preferred, inputs) {
        TensorType::Quantized(fitting) => Some(fitting),
        _ => None,
    }
}
