//! `Debug` for types whose content is too large to print, so that results and options that hold them can derive it.

use std::borrow::BorrowMut;
use std::fmt;

#[cfg(feature = "stream")]
use crate::GenerationStream;
use crate::chat::{ChatTemplate, ReplyParser};
use crate::checkpoint::convert::{ToGgufOptions, ToHuggingFaceOptions};
use crate::checkpoint::gguf::Gguf;
use crate::checkpoint::quantize::{Importance, QuantizeOptions};
use crate::checkpoint::{Checkpoint, LoadOptions};
use crate::device::DeviceChoice;
use crate::hub::HubOptions;
use crate::kv::{KvCache, PagePool, SequenceState};
use crate::tokenizer::Tokenizer;
use crate::{Engine, EngineOptions, Generation, Probe, Session, gemma4, qwen35};

macro_rules! by_name {
    ($($type:ty),*) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($type)).finish_non_exhaustive()
            }
        }
    )*};
}

by_name!(ChatTemplate, Gguf, KvCache, PagePool, Probe, ReplyParser, SequenceState, Session, Tokenizer);
by_name!(gemma4::Assistant, gemma4::Target, qwen35::Target);
#[cfg(feature = "stream")]
by_name!(GenerationStream);

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("isa", &self.parts.isa).finish_non_exhaustive()
    }
}

impl<S: BorrowMut<Session>> fmt::Debug for Generation<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generation").field("finish_reason", &self.finish_reason()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint").field("path", &self.path()).finish_non_exhaustive()
    }
}

impl fmt::Debug for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("Cpu"),
            Self::Cuda(index) => f.debug_tuple("Cuda").field(index).finish(),
            Self::Metal(index) => f.debug_tuple("Metal").field(index).finish(),
            Self::Auto => f.write_str("Auto"),
            Self::Given(_) => f.write_str("Given(..)"),
        }
    }
}

impl fmt::Debug for EngineOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { model, assistant, draft_model, threads, device, isa, quantize, .. } = self;
        let mut all = f.debug_struct("EngineOptions");
        all.field("model", model).field("assistant", assistant).field("draft_model", draft_model);
        all.field("threads", threads).field("device", device).field("isa", isa).field("quantize", quantize);
        all.finish_non_exhaustive()
    }
}

impl fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { isa, quantize, centroids, nextn, progress: _, cancel: _ } = self;
        let mut all = f.debug_struct("LoadOptions");
        all.field("isa", isa).field("quantize", quantize).field("centroids", centroids).field("nextn", nextn);
        all.finish_non_exhaustive()
    }
}

impl fmt::Debug for ToGgufOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { outtype, layout, tokenizer, name, unknown, progress: _, cancel: _ } = self;
        let mut all = f.debug_struct("ToGgufOptions");
        all.field("outtype", outtype).field("layout", layout).field("tokenizer", tokenizer);
        all.field("name", name).field("unknown", unknown).finish_non_exhaustive()
    }
}

impl fmt::Debug for ToHuggingFaceOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { outtype, unknown, progress: _, cancel: _ } = self;
        let mut all = f.debug_struct("ToHuggingFaceOptions");
        all.field("outtype", outtype).field("unknown", unknown).finish_non_exhaustive()
    }
}

impl fmt::Debug for QuantizeOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { mix, rules, importance, requantize, progress: _, cancel: _ } = self;
        let mut all = f.debug_struct("QuantizeOptions");
        all.field("mix", mix).field("rules", rules).field("importance", &importance.as_ref().map(Importance::path));
        all.field("requantize", requantize).finish_non_exhaustive()
    }
}

/// Without the token.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoint, cache, token, offline, retries, progress: _ } = self;
        let mut all = f.debug_struct("HubOptions");
        all.field("endpoint", endpoint).field("cache", cache).field("has_token", &token.is_some());
        all.field("offline", offline).field("retries", retries).finish_non_exhaustive()
    }
}
