//! Files in: a checkpoint is a set of named tensors and a configuration.

mod fields;
pub mod gguf;
mod loader;
mod safetensors;

pub use fields::Fields;
pub use loader::{LoadOptions, Loader, Progress, StepCost, TableUse};
#[cfg(feature = "hub")]
pub(crate) use safetensors::shards;

use std::path::{Path, PathBuf};

use foretoken_kernels::ElementType;
use foretoken_kernels::quant::WeightType;

use crate::nn::Bytes;
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
    /// Blocks of quantized weights.
    Quantized(WeightType),
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

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.names().filter_map(|name| self.get(name)).map(|tensor| tensor.bytes.as_slice().len() as u64).sum()
    }

    /// The tensor `name`, or `None`.
    pub fn get(&self, name: &str) -> Option<RawTensor> {
        self.tensors.get(name)
    }
}
