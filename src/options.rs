//! What a caller may choose, with the defaults in sight.

use std::path::PathBuf;
use std::sync::Arc;

use foretoken_kernels::Isa;
use foretoken_kernels::quant::WeightType;

use crate::checkpoint::Progress;
use crate::kv::KvOptions;
use crate::sampler::Sampling;
use crate::speculative::DraftSampling;

/// What to load, and what to compute with.
#[derive(Clone)]
pub struct EngineOptions {
    /// Directory of the target's checkpoint.
    pub model: PathBuf,
    /// Directory of its assistant's; without one there is no speculation.
    pub assistant: Option<PathBuf>,
    /// Threads. Default: the physical cores that the process may use.
    pub threads: Option<usize>,
    /// Instruction set. Default: the widest that the processor has.
    pub isa: Option<Isa>,
    /// Quantizes floating-point matrices while they are loaded. Default: they stay as they are.
    pub quantize: Option<WeightType>,
    /// Called as tensors are loaded. Default: nobody.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl EngineOptions {
    /// The checkpoint in directory `model`, with every default.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self { model: model.into(), assistant: None, threads: None, isa: None, quantize: None, progress: None }
    }

    /// With the assistant in directory `assistant`.
    pub fn with_assistant(mut self, assistant: impl Into<PathBuf>) -> Self {
        self.assistant = Some(assistant.into());
        self
    }
}

/// One sequence's memory.
#[derive(Clone, Debug, Default)]
pub struct SessionOptions {
    /// How K and V are kept.
    pub kv: KvOptions,
}

/// One generation.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Tokens to generate at most. Default: 128.
    pub max_tokens: usize,
    /// How tokens are chosen. Default: greedy.
    pub sampling: Sampling,
    /// Seed of the draws. Default: 0.
    pub seed: u64,
    /// Whether tokens are drafted. Default: where the engine has an assistant.
    pub speculation: Speculation,
    /// What ends the text. Default: the checkpoint's end-of-generation tokens.
    pub stop: Stop,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 128,
            sampling: Sampling::default(),
            seed: 0,
            speculation: Speculation::default(),
            stop: Stop::default(),
        }
    }
}

/// Whether and how tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Speculation {
    /// With the defaults of [`MtpOptions`] if the engine has an assistant, else not at all.
    #[default]
    WherePossible,
    /// Never: one token per pass.
    Off,
    /// With the assistant.
    Mtp(MtpOptions),
}

/// Drafting with the assistant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MtpOptions {
    /// Rows of a verification: `block_size - 1` tokens are drafted. Default: 4.
    pub block_size: usize,
    /// How drafts are chosen. Default: greedily.
    pub drafts: DraftSampling,
}

impl Default for MtpOptions {
    fn default() -> Self {
        Self { block_size: 4, drafts: DraftSampling::Greedy }
    }
}

/// What ends a text before `max_tokens`.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Whether the checkpoint's own end-of-generation tokens do.
    pub end_of_generation: EndOfGeneration,
    /// Further tokens that do. The token itself is emitted.
    pub tokens: Vec<u32>,
    /// Strings that do. They are not part of the text.
    pub strings: Vec<String>,
}

/// What the checkpoint's end-of-generation tokens do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EndOfGeneration {
    /// They end the text.
    #[default]
    Stops,
    /// They are tokens like any other (for benchmarks of a fixed length).
    Ignored,
}
