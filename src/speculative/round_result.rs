//! The result of a round: emitted tokens and timings.

use std::time::Duration;

use super::{OtherSequences, Proposal};
use crate::sampler::TokenLogprobs;

/// Position and timing of the pass of a proposal.
pub(crate) struct PassTiming {
    /// Position of the pass's first row: that of the last token before the round.
    pub position: usize,
    pub verify: Duration,
    pub others: OtherSequences,
}

/// Result of a round.
pub(crate) struct RoundResult {
    /// What was verified.
    pub proposal: Proposal,
    pub timing: PassTiming,
    /// The emitted tokens, at least one.
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    /// Drafted tokens that were emitted.
    pub accepted: usize,
    /// The last token before the round.
    pub last: u32,
    /// L2 norm of the hidden state that the drafts started from; 0 unless confidence is reported.
    pub hidden_l2: f64,
    pub accept_time: Duration,
}
