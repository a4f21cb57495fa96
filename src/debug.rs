//! `Debug` for types whose content is too large to print, so that results and options that hold them can derive it.

use std::borrow::BorrowMut;
use std::fmt;

use crate::chat::{ChatTemplate, ReplyParser};
use crate::checkpoint::Checkpoint;
use crate::device::DeviceChoice;
use crate::hub::HubOptions;
use crate::tokenizer::Tokenizer;
use crate::{Engine, EngineOptions, Generation, Probe, Session};

macro_rules! by_name {
    ($($type:ident),*) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($type)).finish_non_exhaustive()
            }
        }
    )*};
}

by_name!(ChatTemplate, Probe, ReplyParser, Session, Tokenizer);

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

/// Without the token.
impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { endpoint, cache, token, retries, progress: _ } = self;
        let mut all = f.debug_struct("HubOptions");
        all.field("endpoint", endpoint).field("cache", cache).field("has_token", &token.is_some());
        all.field("retries", retries).finish_non_exhaustive()
    }
}
