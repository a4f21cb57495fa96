//! The result of a round: emitted tokens and timings.

use std::time::Duration;

use super::proposal::Call;
use super::{Decision, Draft, OtherSequences};
use crate::sampler::TokenLogprobs;

/// Position and timing of the pass of a proposal.
pub(crate) struct PassTiming {
    /// Position of the pass's first row.
    pub position: usize,
    pub verify: Duration,
    pub others: OtherSequences,
}

/// Result of a round.
pub(crate) struct RoundResult {
    /// The emitted tokens, at least one.
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub draft: Draft,
    /// Drafted tokens that were emitted.
    pub accepted: usize,
    pub decision: Decision,
    pub calls: Vec<Call>,
    /// Whether the draft was shortened because a pass with more of it failed.
    pub is_shortened: bool,
    /// The last token before the round, and its position.
    pub last: u32,
    pub position: usize,
    /// L2 norm of the hidden state that the drafts started from; 0 unless confidence is reported.
    pub hidden_l2: f64,
    pub draft_time: Duration,
    pub verify_time: Duration,
    pub accept_time: Duration,
}
