//! Files in: a checkpoint is a set of named tensors and a configuration.

mod fields;
mod safetensors;

pub use fields::Fields;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use foretoken_kernels::{ElementType, Isa};

use crate::nn::{Bytes, Embedding, Linear, RmsNorm, Weight};
use crate::{Error, Result};

/// The stored type of a tensor, as far as this library reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// Floating point.
    Float(ElementType),
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
    /// A type of the file format that no kernel reads.
    Other,
}

/// A tensor in a file: its type, its shape (outermost dimension first) and its bytes.
#[derive(Clone)]
pub struct RawTensor {
    /// Stored type.
    pub dtype: TensorType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes, little-endian, row-major.
    pub bytes: Bytes,
}

/// An opened checkpoint: Hugging Face's layout, a directory with `config.json` and one `model.safetensors` or several
/// shards with `model.safetensors.index.json`. Files are mapped, not read.
pub struct Checkpoint {
    path: PathBuf,
    tensors: safetensors::Tensors,
}

impl Checkpoint {
    /// Opens the checkpoint in directory `path`.
    ///
    /// # Errors
    /// If `path` is no such directory, or a file in it is missing or malformed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let meta = std::fs::metadata(path).map_err(Error::io(path))?;
        if !meta.is_dir() {
            let problem = "is a file; give the checkpoint's directory (with config.json and model.safetensors)";
            return Err(Error::file(path, problem));
        }
        Ok(Self { path: path.to_owned(), tensors: safetensors::Tensors::open(path)? })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`.
    ///
    /// # Errors
    /// If it is missing or no JSON object.
    pub fn config(&self) -> Result<Fields> {
        Fields::read(self.path.join("config.json"))
    }

    /// The names of all tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.names()
    }

    /// The tensor `name`, or `None`.
    pub fn get(&self, name: &str) -> Option<RawTensor> {
        self.tensors.get(name)
    }
}

/// Takes tensors out of a checkpoint by name, checks their shapes, and remembers which were taken.
pub struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    prefix: String,
    isa: Isa,
    taken: BTreeSet<String>,
}

impl<'a> Loader<'a> {
    /// A loader of the tensors under `prefix`.
    pub fn new(checkpoint: &'a Checkpoint, prefix: &str, isa: Isa) -> Self {
        Self { checkpoint, prefix: prefix.to_owned(), isa, taken: BTreeSet::new() }
    }

    /// The instruction set that the loaded modules compute with.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether the checkpoint has this tensor.
    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.get(&self.full(name)).is_some()
    }

    /// A tensor of exactly this shape.
    ///
    /// # Errors
    /// If it is missing or has another shape.
    pub fn tensor(&mut self, name: &str, shape: &[usize]) -> Result<RawTensor> {
        let full = self.full(name);
        let Some(tensor) = self.checkpoint.get(&full) else {
            return Err(self.error(name, "is missing; the checkpoint is incomplete or of another architecture"));
        };
        if tensor.shape != shape {
            let problem = format!("has shape {:?}, config.json implies {shape:?}", tensor.shape);
            return Err(self.error(name, problem));
        }
        self.taken.insert(full);
        Ok(tensor)
    }

    /// A matrix `(outputs, inputs)`, where it lies.
    ///
    /// # Errors
    /// As [`Loader::tensor`], or if it is not floating point.
    pub fn weight(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Weight> {
        self.weight_of(name, &[outputs, inputs], outputs, inputs)
    }

    /// A stack of matrices `(count, outputs, inputs)`, as one matrix `(count * outputs, inputs)`.
    ///
    /// # Errors
    /// As [`Loader::weight`].
    pub fn stack(&mut self, name: &str, count: usize, outputs: usize, inputs: usize) -> Result<Weight> {
        self.weight_of(name, &[count, outputs, inputs], count * outputs, inputs)
    }

    fn weight_of(&mut self, name: &str, shape: &[usize], outputs: usize, inputs: usize) -> Result<Weight> {
        let tensor = self.tensor(name, shape)?;
        let TensorType::Float(element) = tensor.dtype else {
            return Err(self.error(name, "is not F32, F16 or BF16; convert the checkpoint to one of these"));
        };
        Weight::new(tensor.bytes, element, outputs, inputs)
            .ok_or_else(|| self.error(name, "is shorter than its shape; download the file again"))
    }

    /// A linear layer `(outputs, inputs)`.
    ///
    /// # Errors
    /// As [`Loader::weight`].
    pub fn linear(&mut self, name: &str, outputs: usize, inputs: usize) -> Result<Linear> {
        Ok(Linear::new(self.weight(name, outputs, inputs)?, self.isa))
    }

    /// A table whose rows come out multiplied by `scale(its type)`.
    ///
    /// # Errors
    /// As [`Loader::weight`].
    pub fn embedding(
        &mut self,
        name: &str,
        vocabulary: usize,
        width: usize,
        scale: impl FnOnce(ElementType) -> f32,
    ) -> Result<Embedding> {
        let weight = self.weight(name, vocabulary, width)?;
        let scale = scale(weight.element());
        Ok(Embedding::new(weight, scale))
    }

    /// A vector `(width)`, widened.
    ///
    /// # Errors
    /// As [`Loader::weight`].
    pub fn vector(&mut self, name: &str, width: usize) -> Result<Vec<f32>> {
        let weight = self.weight_of(name, &[width], 1, width)?;
        let mut vector = vec![0.0; width];
        weight.elements().widen(&mut vector);
        Ok(vector)
    }

    /// A norm over `width`.
    ///
    /// # Errors
    /// As [`Loader::weight`].
    pub fn norm(&mut self, name: &str, width: usize, eps: f64) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.vector(name, width)?, eps, self.isa))
    }

    /// An error about the tensor `name`.
    pub fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        let path = self.checkpoint.path.clone();
        Error::Tensor { path, tensor: self.full(name), problem: problem.into() }
    }

    /// Ends the load: tensors that nothing asked for and `known` does not explain are logged, so that a checkpoint with
    /// something this library does not compute never passes in silence.
    pub fn finish(self, known: impl Fn(&str) -> bool) {
        let strangers: Vec<_> =
            self.checkpoint.names().filter(|name| !self.taken.contains(*name) && !known(name)).collect();
        if !strangers.is_empty() {
            tracing::warn!(path = %self.checkpoint.path.display(), tensors = ?strangers, "tensors that no module uses");
        }
    }

    fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}
