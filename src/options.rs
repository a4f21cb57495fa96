//! What a caller may choose, with the defaults in sight.

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use foretoken_kernels::Isa;
use foretoken_kernels::quant::WeightType;

use crate::checkpoint::Progress;
use crate::device::Device;
use crate::kv::KvOptions;
use crate::sampler::Sampling;
use crate::speculative::{BlockSize, DraftSampling, DrafterOptions, Drafters, Trace};
use crate::{Error, Result};

/// What to load, and what to compute with.
#[derive(Clone)]
pub struct EngineOptions {
    /// Directory of the target's checkpoint.
    pub model: PathBuf,
    /// Directory of its assistant's; without one there is no speculation.
    pub assistant: Option<PathBuf>,
    /// Directory of a smaller Gemma 4 for the drafter `draft-model`. Default: none.
    pub draft_model: Option<PathBuf>,
    /// Threads. Default: the physical cores that the process may use.
    pub threads: Option<usize>,
    /// Where the models compute. Default: the CPU.
    pub device: DeviceChoice,
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
        Self {
            model: model.into(),
            assistant: None,
            draft_model: None,
            threads: None,
            device: DeviceChoice::default(),
            isa: None,
            quantize: None,
            progress: None,
        }
    }

    /// With the assistant in directory `assistant`.
    pub fn with_assistant(mut self, assistant: impl Into<PathBuf>) -> Self {
        self.assistant = Some(assistant.into());
        self
    }
}

/// Where models compute.
#[derive(Clone, Default)]
pub enum DeviceChoice {
    /// On the processor.
    #[default]
    Cpu,
    /// On the CUDA device of this number, from 0 on (features `cuda` and `cuda-prebuilt`).
    Cuda(usize),
    /// On the Metal device of this number, from 0 on (feature `metal`).
    Metal(usize),
    /// On the first CUDA or Metal device if one can be used, else on the processor.
    Auto,
    /// On a device of the caller's.
    Given(Arc<dyn Device>),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    /// `cpu`, `cuda`, `cuda:1`, `metal`, `metal:1` or `auto`.
    fn from_str(text: &str) -> Result<Self> {
        let (name, number) = text.split_once(':').unwrap_or((text, "0"));
        match (name, number.parse()) {
            ("cuda", Ok(number)) => Ok(Self::Cuda(number)),
            ("metal", Ok(number)) => Ok(Self::Metal(number)),
            _ if text == "cpu" => Ok(Self::Cpu),
            _ if text == "auto" => Ok(Self::Auto),
            _ => {
                let problem = format!("{text:?} is no device; there are cpu, cuda, cuda:N, metal, metal:N and auto");
                Err(Error::Input(problem))
            }
        }
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
    /// Whether and how tokens are drafted. Default: where the engine has an assistant or a draft model.
    pub speculation: Speculation,
    /// Accepts drafts by chance, drawn from `seed`, instead of by the target: for measuring speed at any acceptance. The
    /// rates are by position, each the share of rounds that accept the draft there; behind the last, a draft is accepted
    /// as often after the one before it as the last was. So one rate is the chance of every draft. The text is
    /// meaningless then. Default: none, the target accepts.
    pub simulate_acceptance: Vec<f64>,
    /// Where to tell what every round did. Default: nowhere, at no cost.
    pub trace: Option<Trace>,
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
            simulate_acceptance: Vec::new(),
            trace: None,
            stop: Stop::default(),
        }
    }
}

/// Whether and how tokens are drafted.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Speculation {
    /// With the defaults of [`SpeculationOptions`] if the engine has an assistant or a draft model, else not at all.
    #[default]
    WherePossible,
    /// Never: one token per pass.
    Off,
    /// With the assistant alone and blocks of one size.
    Mtp(MtpOptions),
    /// As the options say.
    With(SpeculationOptions),
}

/// Drafting with the assistant in blocks of one size.
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

/// Drafting by any drafters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeculationOptions {
    /// Which drafters. Default: those that the engine can offer.
    pub drafters: Drafters,
    /// Rows of a verification. Default: chosen for every round from measured costs.
    pub block: BlockSize,
    /// Rests a model after this many drafts in a row (1 to 32) of which nothing stood; look-ups go on. Default: never.
    pub skip_streak: Option<usize>,
    /// How models choose their drafts. Default: greedily.
    pub drafts: DraftSampling,
    /// Whether drafts are made while the caller is busy. Default: they are not.
    pub pipeline: Pipeline,
}

impl SpeculationOptions {
    /// No drafters.
    pub(crate) fn off() -> Self {
        Self { drafters: Drafters::Priority(Vec::new()), ..Self::default() }
    }
}

impl From<MtpOptions> for SpeculationOptions {
    fn from(mtp: MtpOptions) -> Self {
        Self {
            drafters: Drafters::Priority(vec![DrafterOptions::Mtp]),
            block: BlockSize::Fixed(mtp.block_size),
            drafts: mtp.drafts,
            ..Self::default()
        }
    }
}

/// When drafts are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pipeline {
    /// When the next round is asked for (depth 1).
    #[default]
    InTurn,
    /// As soon as a round is over, on the engine's threads, while the caller does something with its tokens (depth 2).
    Ahead,
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
