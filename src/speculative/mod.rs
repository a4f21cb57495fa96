//! Speculative decoding: draft, verify, accept, commit.
//!
//! * [`Drafter`]: proposes tokens; one file each: an autoregressive model ([`Mtp`], [`NextN`],
//!   [`DraftModel`]), prompt lookup ([`NgramSimple`], [`NgramMapK`], [`NgramMapK4v`], [`NgramMod`],
//!   [`NgramCacheDrafter`]), or a constraint ([`Forced`]).
//! * [`Planner`]: chooses the drafter and draft length of each round from measured [`Costs`].
//! * `BatchPlanner`: decides whether the sequences of a batch draft, from measured tokens per second.
//! * [`DraftChain`]: a drafter whose model drafts for many sequences in one pass.
//! * [`accept()`]: decides which drafts are accepted; a pure function.
//! * [`SpeculationStats`]: statistics; [`Trace`]: a log of every round.

mod accept;
mod backend;
mod chain;
mod context;
mod decode_state;
mod decoder;
mod draft;
mod drafter;
mod drafter_kind;
mod drafter_list;
mod drafter_options;
mod drafters;
mod drafting;
mod drafting_context;
mod pipeline;
mod planner;
mod proposal;
mod round_result;
mod settings;
mod simulated;
mod sources;
mod statistics;
mod trace;
mod work;

pub use accept::{Accepted, accept};
pub use chain::{ChainStep, DraftChain};
pub use context::Context;
pub use draft::{Confidence, Draft, DraftSampling};
pub use drafter::{AcceptResult, DraftCost, Drafter, Observed, Reads};
pub use drafter_kind::DrafterKind;
pub use drafter_options::{CustomDrafter, DrafterOptions, Drafters};
pub use drafters::{
    ChainedModel, DraftModel, Forced, Mtp, NextN, NgramCache, NgramCacheDrafter, NgramCacheOptions, NgramMapK,
    NgramMapK4v, NgramMapOptions, NgramMod, NgramModOptions, NgramPool, NgramSimple, NgramSimpleOptions,
};
pub use pipeline::Cancel;
#[cfg(feature = "stream")]
pub(crate) use pipeline::Continuations;
// For tests: callers have no pool to run it on.
#[doc(hidden)]
pub use pipeline::Pending;
pub use planner::{
    AvailableDrafter, BlockSize, Costs, Decision, DecisionInput, DraftOutcome, Estimate, Machine, ModelSteps,
    MtpPreset, Observation, OtherSequences, Plan, Planner, Reason, Tuning,
};
pub use statistics::{DrafterStats, SpeculationStats};
pub use trace::Trace;

pub(crate) use accept::accept_rows;
pub(crate) use backend::{Backend, DeviceSequence, ForwardOutput, States};
pub(crate) use decode_state::{DecodeState, FirstToken};
pub(crate) use decoder::{Done, Proposing, Snapshot, SpeculativeDecoder, Step, complete, run_pass};
pub(crate) use drafters::{MAX_UNREAD, check_vocabulary};
pub(crate) use drafting::{Drafting, Scored};
pub(crate) use planner::{BatchPlanner, PassMode, median};
pub(crate) use proposal::Proposal;
pub(crate) use round_result::RoundResult;
pub(crate) use settings::{Order, Settings};
pub(crate) use simulated::SimulatedAcceptance;
pub(crate) use sources::Sources;
pub(crate) use statistics::{add_all, count_draft};
pub(crate) use trace::Tracer;
pub(crate) use work::Work;
