//! Speculative decoding: draft, verify, accept, commit.
//!
//! * [`Drafter`]: proposes tokens; one file each: an autoregressive model ([`Mtp`], [`NextN`], [`DraftModel`]), prompt lookup
//!   ([`NgramSimple`], [`NgramMapK`], [`NgramMapK4v`], [`NgramMod`], [`NgramCacheDrafter`]), or a constraint ([`Forced`]).
//! * [`Planner`]: chooses the drafter and draft length of each round from measured [`Costs`].
//! * `BatchPlanner`: decides whether the sequences of a batch draft, from measured tokens per second.
//! * [`DraftChain`]: a drafter whose model drafts for many sequences in one pass.
//! * [`accept()`]: decides which drafts are accepted; a pure function.
//! * [`Pending`]: computes the next draft in parallel with the caller.
//! * [`SpeculationStats`]: statistics; [`Trace`]: a log of every round.

mod accept;
mod acceptance;
mod backend;
mod batch_planner;
mod block;
mod chain;
mod costs;
mod decode_state;
mod decoder;
mod draft;
mod draft_model;
mod drafter;
mod drafter_kind;
mod drafter_options;
mod drafting;
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
mod pipeline;
mod planner;
mod proposal;
mod settings;
mod simulated;
mod sources;
mod statistics;
mod streak;
mod trace;
mod tuning;

pub use accept::{Accepted, accept};
pub use block::{BlockSize, MtpPreset};
pub use chain::draft_chain;
pub use costs::{Costs, Estimate, Machine};
pub use decode_state::DecodeState;
pub use draft::{Confidence, Draft, DraftSampling};
pub use draft_model::{ChainedModel, DraftModel};
pub use drafter::{ChainStep, Context, DraftChain, DraftCost, Drafter, Observed, Reads, Verdict};
pub use drafter_kind::DrafterKind;
pub use drafter_options::{CustomDrafter, DrafterOptions, Drafters};
pub use forced::Forced;
pub use mtp::Mtp;
pub use nextn::NextN;
pub use ngram_cache::{NgramCache, NgramCacheOptions};
pub use ngram_cache_drafter::NgramCacheDrafter;
pub use ngram_map_k::{NgramMapK, NgramMapOptions};
pub use ngram_map_k4v::NgramMapK4v;
pub use ngram_mod::{NgramMod, NgramModOptions, NgramPool};
pub use ngram_simple::{NgramSimple, NgramSimpleOptions};
pub use pipeline::{Cancel, Pending};
pub use planner::{Decision, Judged, Observation, Offer, Offered, Others, Plan, Planner, Reason};
pub use statistics::{DrafterStats, SpeculationStats};
pub use trace::Trace;
pub use tuning::Tuning;

pub(crate) use accept::{Verification, accept_rows};
pub(crate) use backend::{Backend, ForwardOutput};
pub(crate) use batch_planner::BatchPlanner;
pub(crate) use decoder::{Done, Proposing, SpeculativeDecoder, Step, Work, complete, run_pass};
pub(crate) use draft_model::check_vocabulary;
pub(crate) use drafting::{Drafting, Round};
pub(crate) use proposal::Proposal;
pub(crate) use settings::{Order, Settings};
pub(crate) use simulated::SimulatedAcceptance;
pub(crate) use sources::Sources;
pub(crate) use statistics::{add_all, count_at};
pub(crate) use trace::{Path, Tracer};
