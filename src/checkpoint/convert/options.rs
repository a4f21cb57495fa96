//! Options of a conversion to GGUF.

use std::path::PathBuf;
use std::sync::Arc;

use foretoken_kernels::ElementType;
use foretoken_kernels::quant::WeightType;

use crate::checkpoint::{Progress, TensorType};
use crate::speculative::Cancel;
use crate::{Error, Result};

/// The type of the matrices in a converted file. Norms, scales and routers are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outtype {
    /// Single precision.
    F32,
    /// Half precision; an error if a value is too large for it.
    F16,
    /// bf16, the type of published checkpoints.
    Bf16,
    /// 8 bits; F16 for rows that are not a multiple of 32.
    Q8_0,
}

impl Outtype {
    pub(super) fn tensor_type(self, inputs: usize) -> TensorType {
        match self {
            Self::F32 => TensorType::Float(ElementType::F32),
            Self::F16 => TensorType::Float(ElementType::F16),
            Self::Bf16 => TensorType::Float(ElementType::Bf16),
            Self::Q8_0 if inputs.is_multiple_of(WeightType::Q8_0.block_len()) => {
                TensorType::Quantized(WeightType::Q8_0)
            }
            Self::Q8_0 => TensorType::Float(ElementType::F16),
        }
    }

    /// llama.cpp's file type id (`general.file_type`).
    pub(super) fn file_type(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q8_0 => 7,
            Self::Bf16 => 32,
        }
    }
}

impl std::str::FromStr for Outtype {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name.to_ascii_lowercase().as_str() {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            "q8_0" => Ok(Self::Q8_0),
            _ => Err(Error::argument("outtype", format!("{name:?} is unknown; expected one of f32, f16, bf16, q8_0"))),
        }
    }
}

/// Layout of an assistant's GGUF file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AssistantLayout {
    /// llama.cpp's: `gemma4-assistant`, `nextn.*`. Centroids have names that its loader ignores.
    #[default]
    Nextn,
    /// An older one of a fork: `gemma4_assistant`, `mtp.*`.
    Mtp,
}

impl AssistantLayout {
    /// The architecture name of the layout.
    pub fn architecture(self) -> &'static str {
        match self {
            Self::Nextn => "gemma4-assistant",
            Self::Mtp => "gemma4_assistant",
        }
    }
}

impl std::str::FromStr for AssistantLayout {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let known = [Self::Nextn, Self::Mtp].into_iter().find(|layout| layout.architecture() == name);
        let unknown = || format!("{name:?} is unknown; expected gemma4-assistant or gemma4_assistant");
        known.ok_or_else(|| Error::argument("layout", unknown()))
    }
}

/// Handling of tensors that are not part of a text model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Unknown {
    /// An error that lists them.
    #[default]
    Refused,
    /// They are skipped; the report lists them.
    LeftOut,
}

/// Options of a conversion to GGUF.
#[derive(Clone)]
pub struct ToGgufOptions {
    /// Type of the matrices. Default: F16.
    pub outtype: Outtype,
    /// Layout of an assistant's file. Default: llama.cpp's.
    pub layout: AssistantLayout,
    /// Directory of the tokenizer to include. Default: the checkpoint's own.
    pub tokenizer: Option<PathBuf>,
    /// `general.name`. Default: the directory's name.
    pub name: Option<String>,
    /// Tensors that belong to no text model. Default: refused. Image and audio towers are always skipped.
    pub unknown: Unknown,
    /// Called as tensors are written. Default: none.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Cancels the conversion from any thread, or from `progress`, before the next write. Default: a new handle.
    pub cancel: Cancel,
}

impl Default for ToGgufOptions {
    fn default() -> Self {
        let (outtype, layout, unknown) = (Outtype::F16, AssistantLayout::default(), Unknown::default());
        Self { outtype, layout, tokenizer: None, name: None, unknown, progress: None, cancel: Cancel::default() }
    }
}
