//! foretoken

pub mod chat;
pub mod checkpoint;
mod engine;
mod error;
pub mod gemma4;
mod generation;
pub mod hub;
pub mod kv;
pub mod nn;
mod options;
pub mod sampler;
mod session;
pub mod speculative;
pub mod tokenizer;

pub use engine::Engine;
pub use error::{Error, Result};
pub use foretoken_kernels::{ElementType, Isa};
pub use generation::{Finish, Generation, Piece};
pub use options::{EndOfGeneration, EngineOptions, GenerateOptions, MtpOptions, SessionOptions, Speculation, Stop};
pub use sampler::Sampling;
pub use session::{Session, Statistics};
