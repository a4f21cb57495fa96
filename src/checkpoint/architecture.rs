//! Model families as far as reading files needs them: by `model_type` (config.json) or `general.architecture` (GGUF).

use super::gguf::names::Names;
use crate::{gemma4, qwen35};

/// A model family's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Architecture {
    /// Gemma 4 and its assistants; also every unknown name, whose error lists what is supported.
    Gemma4,
    /// Qwen3.5, and names that begin with `qwen`, even if only to refuse them by name.
    Qwen35,
}

impl Architecture {
    /// The family of a `model_type` or `general.architecture`.
    pub fn of(name: &str) -> Self {
        if name.starts_with("qwen") { Self::Qwen35 } else { Self::Gemma4 }
    }

    /// Tensor names, given the block of the NextN head in a GGUF file, if any.
    pub fn names(self, nextn: Option<u32>) -> Names {
        match self {
            Self::Gemma4 => gemma4::names::NAMES,
            Self::Qwen35 => qwen35::names(nextn),
        }
    }

    /// Rows of the query projection per query channel: Qwen3.5's has a gate next to each query.
    pub fn rows_per_query(self) -> usize {
        match self {
            Self::Gemma4 => 1,
            Self::Qwen35 => 2,
        }
    }

    /// Whether targets have assistants, in checkpoints of their own.
    pub fn takes_assistants(self) -> bool {
        self == Self::Gemma4
    }

    /// The pre-tokenizer of byte-level tokenizers, if the family has those: its name in GGUF files, and the regular
    /// expression that splits texts.
    pub fn pre_tokenizer(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Gemma4 => None,
            Self::Qwen35 => Some(qwen35::SPLIT),
        }
    }

    /// The regular expression of the pre-tokenizer of that name in GGUF files, of any family.
    pub fn pre_tokenizer_pattern(name: &str) -> Option<&'static str> {
        let mut all = [Self::Gemma4, Self::Qwen35].into_iter().filter_map(Self::pre_tokenizer);
        all.find(|(own, _)| *own == name).map(|(_, pattern)| pattern)
    }
}
