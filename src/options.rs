//! Options of the engine, sessions and generations.

use std::path::PathBuf;
use std::sync::Arc;

use foretoken_kernels::Isa;
use foretoken_kernels::quant::WeightType;

use crate::chat::ChatTemplate;
use crate::checkpoint::Progress;
use crate::constraint::Constraint;
use crate::device::DeviceChoice;
use crate::gemma4::Centroids;
use crate::kv::KvOptions;
use crate::sampler::{LogitsProcessor, Sampling};
use crate::speculative::{BlockSize, Cancel, DraftSampling, DrafterOptions, Drafters, Trace};
use crate::tokenizer::Tokenizer;

/// Options of an engine.
#[derive(Clone)]
pub struct EngineOptions {
    /// The target's checkpoint: a directory or a GGUF file.
    pub model: PathBuf,
    /// Its assistant's directory or file; [`find_assistants`](crate::checkpoint::find_assistants)
    /// finds those next to the target. Default: none.
    pub assistant: Option<PathBuf>,
    /// A smaller model with the same tokenizer for the drafter `draft-model`, a directory or a GGUF
    /// file. Default: none.
    pub draft_model: Option<PathBuf>,
    /// Threads. Default: the physical cores available to the process.
    pub threads: Option<usize>,
    /// Where the models run. Default: the CPU.
    pub device: DeviceChoice,
    /// Instruction set. Default: the widest that the CPU has.
    pub isa: Option<Isa>,
    /// Quantizes floating-point matrices while loading. Default: no.
    pub quantize: Option<WeightType>,
    /// The assistant's centroids. Default: its own.
    pub centroids: Centroids,
    /// Limit in bytes of all sessions' K and V together. Default: none; on a device, 15/16 of
    /// what is free after loading.
    pub kv_memory: Option<u64>,
    /// Called as tensors are loaded. Default: none.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
    /// Cancels every load with this handle from any thread, or from `progress`, before the next tensor. Default: a new
    /// handle.
    pub cancel: Cancel,
}

impl EngineOptions {
    /// The checkpoint at `model` (a directory or a GGUF file), with defaults.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            assistant: None,
            draft_model: None,
            threads: None,
            device: DeviceChoice::default(),
            isa: None,
            quantize: None,
            centroids: Centroids::default(),
            kv_memory: None,
            progress: None,
            cancel: Cancel::default(),
        }
    }

    /// With the assistant at `assistant`.
    pub fn with_assistant(mut self, assistant: impl Into<PathBuf>) -> Self {
        self.assistant = Some(assistant.into());
        self
    }
}

/// Options of an engine for a caller's model: see [`Engine::from_model`](crate::Engine::from_model).
#[derive(Debug, Default)]
pub struct ModelOptions {
    /// Threads. Default: the physical cores available to the process.
    pub threads: Option<usize>,
    /// Instruction set of the sampler. Default: the widest that the CPU has.
    pub isa: Option<Isa>,
    /// Limit in bytes of all sessions' K and V together. Default: none.
    pub kv_memory: Option<u64>,
    /// The model's tokenizer. Default: none; token ids in and out.
    pub tokenizer: Option<Tokenizer>,
    /// The model's chat template. Default: none.
    pub chat_template: Option<ChatTemplate>,
    /// Tokens that end a text. Default: none.
    pub end_of_generation: Vec<u32>,
}

/// Options of a session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionOptions {
    /// K/V cache options.
    pub kv: KvOptions,
}

/// Options of a generation.
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    /// Maximum tokens to generate; 0 reads the prompt only. Default: 128.
    pub max_tokens: usize,
    /// Sampling parameters. Default: greedy.
    pub sampling: Sampling,
    /// Seed of the sampler. On the CPU it determines the text, with any speculation and in any batch, unless drafts are
    /// sampled ([`DraftSampling::Sampled`]) and what is drafted depends on measured times or on other sequences.
    /// Default: 0.
    pub seed: u64,
    /// Speculation. Default: if the engine has an assistant, a NextN head or a draft model.
    pub speculation: Speculation,
    /// Accepts drafts at random (from `seed`) instead of by the target, to measure speed at a given acceptance; the
    /// text is meaningless. `rates[i]` is the share of rounds that accept draft `i`; beyond the list, the conditional
    /// acceptance of the last entry is repeated, so one rate is the conditional acceptance of every draft. Default:
    /// none.
    pub simulate_acceptance: Vec<f64>,
    /// Receives a trace of every round. Default: none, at no cost.
    pub trace: Option<Trace>,
    /// Stop conditions. Default: the checkpoint's end-of-generation tokens.
    pub stop: Stop,
    /// Grammar of the text. Needs the cargo feature `constraint`. Default: none.
    pub constraint: Option<Constraint>,
    /// Modifies logits before sampling. Default: none.
    pub logits_processor: Option<Arc<dyn LogitsProcessor>>,
    /// Reports the log-probability of every token, and of this many most probable ones. Default: none.
    pub logprobs: Option<usize>,
    /// As `logprobs`, of the prompt's tokens, in the first piece; if there are none to generate, only a
    /// [`Scheduler`](crate::Scheduler) has a piece. The first token has none in an empty session, nor where the token
    /// before it has been read: after [`Session::rewind`](crate::Session::rewind), or after a prompt from which nothing
    /// was generated. The prompt is read in chunks of at most 32 tokens, and from no cached prefix. Default: none.
    ///
    /// ```
    /// # use foretoken::{Engine, EngineOptions, GenerateOptions, Scheduler, SchedulerOptions, SessionOptions};
    /// # fn main() -> foretoken::Result<()> {
    /// # let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    /// let engine = Engine::load(&EngineOptions::new(models.join("target")))?;
    /// let options = GenerateOptions { max_tokens: 0, prompt_logprobs: Some(0), ..GenerateOptions::default() };
    /// let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
    /// for text in ["impl Iterator for Counter {", "fn main() {"] {
    ///     let ids = engine.tokenizer()?.encode(text)?;
    ///     scheduler.add(engine.session(&SessionOptions::default())?, &ids, &options)?;
    /// }
    /// let mut scores = Vec::new();
    /// while scheduler.is_active() {
    ///     for event in scheduler.step() {
    ///         let score: f32 = event.piece?.prompt_logprobs.iter().map(|of| of.logprob).sum();
    ///         scores.push((event.id, score));
    ///         scheduler.remove(event.id);
    ///     }
    /// }
    /// assert!(scores.len() == 2 && scores.iter().all(|(_, score)| *score < 0.0));
    /// # Ok(())
    /// # }
    /// ```
    pub prompt_logprobs: Option<usize>,
    /// Cancels every generation with this handle from any thread, before the next prefill chunk or
    /// round. Default: a new handle.
    pub cancel: Cancel,
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
            constraint: None,
            logits_processor: None,
            logprobs: None,
            prompt_logprobs: None,
            cancel: Cancel::default(),
        }
    }
}

/// Speculation of a generation.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum Speculation {
    /// With the defaults of [`SpeculationOptions`] if the engine has an assistant, a NextN head or
    /// a draft model, else off.
    #[default]
    Auto,
    /// Off: one token per pass.
    Off,
    /// With these options.
    With(SpeculationOptions),
}

/// Drafting with any drafters.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeculationOptions {
    /// The drafters. Default: [`Drafters::Auto`], `ngram-map-k` and the engine's assistant, NextN head or draft model.
    pub drafters: Drafters,
    /// Rows of a verification. Default: chosen for every round from measured costs.
    pub block: BlockSize,
    /// Pauses a draft model after this many (1 to 32) consecutive drafts without an accepted token; prompt lookup
    /// continues. Default: never.
    pub skip_streak: Option<usize>,
    /// How models choose their drafts. Default: greedily.
    pub drafts: DraftSampling,
    /// Whether drafting overlaps with the caller's work; a [`Scheduler`](crate::Scheduler) ignores it. Default: no.
    pub pipeline: DraftPipeline,
}

impl SpeculationOptions {
    /// No drafters.
    pub(crate) fn off() -> Self {
        Self { drafters: Drafters::Priority(Vec::new()), ..Self::default() }
    }

    /// Only the assistant or the NextN head, with a fixed block size: `block_size - 1` tokens are drafted.
    pub fn mtp(block_size: usize) -> Self {
        let (drafters, block) = (Drafters::Priority(vec![DrafterOptions::Mtp]), BlockSize::Fixed(block_size));
        Self { drafters, block, ..Self::default() }
    }
}

/// When drafting runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftPipeline {
    /// When the next round is requested (depth 1).
    #[default]
    InTurn,
    /// As soon as a round is done, on the engine's threads, in parallel with the caller (depth 2).
    Ahead,
}

/// Stop conditions besides `max_tokens`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stop {
    /// Handling of the checkpoint's end-of-generation tokens.
    pub end_of_generation: EndOfGeneration,
    /// Further stop tokens. They are emitted, and their text is not.
    pub tokens: Vec<u32>,
    /// Stop strings. They are not part of the text.
    pub strings: Vec<String>,
    /// Stop strings within the text of this many leading tokens are part of it, and do not end it. Default: 0.
    pub min_tokens: usize,
}

/// Handling of the checkpoint's end-of-generation tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EndOfGeneration {
    /// They end the text.
    #[default]
    Stops,
    /// They are ordinary tokens (for benchmarks of fixed length).
    Ignored,
}
