//! The drafters: an autoregressive model, prompt lookup, or a constraint.

mod draft_model;
mod forced;
mod mtp;
mod nextn;
mod ngram;
mod ngram_cache;
mod ngram_cache_drafter;
mod ngram_map_k;
mod ngram_map_k4v;
mod ngram_mod;
mod ngram_simple;
mod out_of_memory;

pub(crate) use draft_model::check_vocabulary;
pub use draft_model::{ChainedModel, DraftModel};
pub use forced::Forced;
pub use mtp::Mtp;
pub(crate) use nextn::MAX_UNREAD;
pub use nextn::NextN;
pub use ngram_cache::{NgramCache, NgramCacheOptions};
pub use ngram_cache_drafter::NgramCacheDrafter;
pub(super) use ngram_map_k::OCCURRENCES;
pub use ngram_map_k::{NgramMapK, NgramMapOptions};
pub use ngram_map_k4v::NgramMapK4v;
pub use ngram_mod::{NgramMod, NgramModOptions, NgramPool};
pub use ngram_simple::{NgramSimple, NgramSimpleOptions};
pub(super) use out_of_memory::OutOfMemory;
