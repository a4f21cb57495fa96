//! Options for loading a checkpoint.

use std::sync::Arc;

use foretoken_kernels::Isa;
use foretoken_kernels::quant::WeightType;

use crate::gemma4::Centroids;
use crate::speculative::Cancel;

/// Options for loading a checkpoint.
#[derive(Clone)]
pub struct LoadOptions {
    /// Instruction set of the modules.
    pub isa: Isa,
    /// Quantizes floating-point matrices while loading. Default: no.
    pub quantize: Option<WeightType>,
    /// An assistant's centroids. Default: its own.
    pub centroids: Centroids,
    /// Loads the NextN head, if the checkpoint has one. Default: yes.
    pub nextn: bool,
    /// Called as tensors are loaded. Default: none.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Cancels the load before the next tensor. Default: a new handle.
    pub cancel: Cancel,
}

impl From<Isa> for LoadOptions {
    fn from(isa: Isa) -> Self {
        Self {
            isa,
            quantize: None,
            centroids: Centroids::default(),
            nextn: true,
            progress: None,
            cancel: Cancel::default(),
        }
    }
}

/// Progress of a load, a conversion or a quantization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of tensors loaded, or written. A load ends with `total`.
    pub loaded: u64,
    /// Bytes of all of them; those of image and audio towers are not loaded.
    pub total: u64,
}
