//! Lossless speculative decoding for Gemma 4 (MTP drafter) and Qwen3.5 (NextN head), on the CPU and on GPUs.
//!
//! An example, with the demo pair in the repository:
//!
//! ```
//! use foretoken::{Engine, EngineOptions, GenerateOptions, SessionOptions, Speculation};
//!
//! # fn main() -> foretoken::Result<()> {
//! # let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
//! // A target and the assistant that drafts for it. Weights stay in the mapped files.
//! let engine = Engine::load(&EngineOptions::new(models.join("target")).with_assistant(models.join("assistant")))?;
//!
//! // A session is one sequence and its KV cache; sessions of one engine may run from several threads.
//! let mut session = engine.session(&SessionOptions::default())?;
//!
//! // A generation is an iterator: one piece of text per round, streamed as it is accepted.
//! let prompt = engine.tokenizer()?.encode("impl Iterator for Counter {\n")?;
//! let options = GenerateOptions { max_tokens: 48, ..GenerateOptions::default() };
//! let mut generation = session.generate(&prompt, &options)?;
//! let mut text = String::new();
//! for piece in generation.by_ref() {
//!     text += &piece?.text;
//! }
//! println!("{text}");
//!
//! // Statistics of speculation.
//! let statistics = generation.statistics();
//! assert!(statistics.tokens_per_round() > 1.0);
//!
//! // It changed the speed, not the text.
//! let plain = GenerateOptions { speculation: Speculation::Off, ..options };
//! let pieces: Result<Vec<_>, _> = engine.session(&SessionOptions::default())?.generate(&prompt, &plain)?.collect();
//! assert_eq!(text, pieces?.into_iter().map(|piece| piece.text).collect::<String>());
//! # Ok(())
//! # }
//! ```
//!
//! Modules:
//! * [`gemma4`], [`qwen35`]: the models, structured as in the reference; [`checkpoint`]: their files; [`device`]: GPUs.
//! * [`kv`]: the cache. Attention is one of its operations; a round of speculation is staged, then
//!   committed or dropped.
//! * [`speculative`]: draft, verify, accept, commit; [`sampler`]: from logits to distributions.
//! * [`Engine::forward`]: logits and hidden states of a text, for scores and embeddings.
//! * [`Scheduler`]: many sequences per batch; [`Constraint`]: JSON schemas and grammars.
//! * [`tokenizer`], [`chat`], [`hub`]: text, conversations, names on the Hugging Face Hub.
//! * [`verify`], [`perplexity`]: checks of a checkpoint.
//!
//! Cargo features, all off by default:
//! * `constraint`: compiles [`Constraint`]s; without it, they are an error.
//! * `hub`: [`hub::resolve`] downloads; without it, a name on the Hub is an error that has the download command.
//! * `stream`: `Generation::into_stream`, a generation as a `futures_core::Stream`.
//! * `cuda-prebuilt`, or `cuda` with nvcc: [`DeviceChoice::Cuda`]; `metal`: [`DeviceChoice::Metal`].
//!
//! [`Engine`]s are `Send` and `Sync`; sessions, generations and schedulers are `Send`.
//!
//! The library reads no environment variable and prints nothing; it logs through `tracing`.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod chat;
pub mod checkpoint;
mod constraint;
mod debug;
pub mod device;
mod engine;
mod error;
mod family;
mod forward;
pub mod gemma4;
mod generation;
pub mod hub;
pub mod kv;
mod loading;
mod model;
pub mod nn;
mod not_started;
mod ops;
mod options;
pub mod perplexity;
mod piece;
mod probe;
pub mod qwen35;
mod run;
pub mod sampler;
mod scheduler;
mod session;
mod session_file;
pub mod speculative;
mod stop;
#[cfg(feature = "stream")]
mod stream;
pub mod tokenizer;
pub mod verify;

/// Re-exported because its types are in this crate's traits.
pub use candle_core;
pub use checkpoint::{OwnDrafter, TargetFacts};
pub use constraint::{CompiledConstraint, Constraint, ConstraintLimits};
pub use device::DeviceChoice;
pub use engine::{Engine, default_threads};
pub use error::{Error, Result};
pub use family::target_facts;
/// Re-exported because its launches are in [`device::Device`].
pub use foretoken_gpu;
pub use foretoken_kernels::quant::WeightType;
pub use foretoken_kernels::{ElementType, Isa};
pub use generation::Generation;
pub use model::{ChainModel, DraftKv, DraftRows, DraftStep, Model, NextnHead, Output, OutputRows, Request};
pub use not_started::NotStarted;
pub use options::{
    DraftPipeline, EndOfGeneration, EngineOptions, GenerateOptions, ModelOptions, SessionOptions, Speculation,
    SpeculationOptions, Stop,
};
pub use piece::{ControlToken, Piece};
pub use probe::{Probe, RoundTimes, device_bandwidth};
/// Its generator is in [`Drafter`](speculative::Drafter).
pub use rand;
pub use sampler::{LogitsProcessor, Sampling, TokenLogprobs};
pub use scheduler::{Event, PrefixCacheOptions, Scheduler, SchedulerOptions, SequenceId};
pub use session::{Session, Statistics};
pub use speculative::Cancel;
pub use stop::FinishReason;
#[cfg(feature = "stream")]
pub use stream::GenerationStream;

// Compiles its example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
