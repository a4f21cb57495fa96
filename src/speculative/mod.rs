//! Speculative decoding: draft, verify, accept, commit.
//!
//! * [`Drafter`] is what proposes tokens, a file each: a model that is chained with itself ([`Mtp`], [`DraftModel`]) or a
//!   look-up in what was written before ([`NgramSimple`], [`NgramMapK`], [`NgramMapK4v`], [`NgramMod`],
//!   [`NgramCacheDrafter`]).
//! * [`Planner`] chooses for every round whose draft is verified and how far, from measured [`Costs`].
//! * [`accept()`] decides which drafts stand: a pure function.
//! * [`Pending`] computes the next draft while the caller is busy.
//! * [`SpeculationStats`] says what came of it, and a [`Trace`] round by round.

mod accept;
mod acceptance;
mod block;
mod costs;
mod draft_model;
mod drafter;
mod driver;
mod ledger;
mod mtp;
mod ngram;
mod ngram_cache;
mod ngram_map_k;
mod ngram_map_k4v;
mod ngram_mod;
mod ngram_simple;
mod passes;
mod pipeline;
mod planner;
mod simulated;
mod statistics;
mod streak;
mod trace;

pub use accept::{Accepted, Confirmed, Draft, accept, confirm};
pub use block::{BlockSize, MtpPreset};
pub use costs::{Costs, Estimate, Machine};
pub use draft_model::DraftModel;
pub use drafter::{Confidence, Context, DraftCost, Drafter, DrafterKind, DrafterOptions, Drafters, Verdict};
pub use driver::Frontier;
pub use mtp::{DraftSampling, Mtp};
pub use ngram_cache::{NgramCache, NgramCacheDrafter, NgramCacheOptions};
pub use ngram_map_k::{NgramMapK, NgramMapOptions};
pub use ngram_map_k4v::NgramMapK4v;
pub use ngram_mod::{NgramMod, NgramModOptions, NgramPool};
pub use ngram_simple::{NgramSimple, NgramSimpleOptions};
pub use pipeline::{Cancel, Pending};
pub use planner::{Decision, Found, Observation, Offer, Offered, Plan, Planner, Verified, Why};
pub use statistics::{DrafterStats, SpeculationStats};
pub use trace::Trace;

pub(crate) use draft_model::check_vocabulary;
pub(crate) use drafter::Sources;
pub(crate) use driver::{Order, Proposal, Round, Settings, Speculator};
pub(crate) use passes::{Passed, Passes};
pub(crate) use simulated::SimulatedAcceptance;
pub(crate) use statistics::{add_all, count_at};
pub(crate) use trace::{Path, Tracer};
