//! A draft that is to be verified.

use std::time::Duration;

use rand::rngs::StdRng;

use super::{Accepted, Cancel, Decision, Draft, DraftOutcome, Plan, Reason};
use crate::Result;
use crate::sampler::TokenLogprobs;

/// One drafter's work in a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub drafter: usize,
    pub tokens: usize,
    pub time: Duration,
}

/// How much of a draft is accepted, and the target's log-probabilities, if requested.
pub(crate) struct Verified {
    pub accepted: Accepted,
    pub logprobs: Vec<TokenLogprobs>,
    pub time: Duration,
}

/// A draft to be verified, once a model has completed it to the planned length.
pub(crate) struct Proposal {
    pub draft: Draft,
    pub planned_len: usize, // tokens of the draft when complete
    pub decision: Decision,
    pub calls: Vec<Call>,
    pub is_shortened: bool, // a pass failed with more
    pub found: Vec<Draft>,  // by drafter: what prompt lookup found; empty for models
    pub forced: Vec<u32>,   // tokens that a constraint forces
    pub time: Duration,
    pub rng: StdRng, // of drafts, before this one was drawn
    /// Set after the pass; `None` on a device, whose passes accept drafts one sequence after the other.
    pub verified: Option<Result<Verified>>,
}

impl Proposal {
    /// A plain step without a decision.
    pub fn nothing(rng: StdRng) -> Self {
        let (plan, reason) = (Plan::Plain, Reason::Nothing);
        Self {
            draft: Draft::default(),
            planned_len: 0,
            decision: Decision { plan, reason, tokens: 1.0, ms: 0.0, plain_ms: 0.0, balance: 0.0 },
            calls: Vec::new(),
            is_shortened: false,
            found: Vec::new(),
            forced: Vec::new(),
            time: Duration::ZERO,
            rng,
            verified: None,
        }
    }

    /// Shortens the draft to `most` tokens. How many rows need memory may depend on what was drawn, as the constraint's
    /// check cuts drafts: the target decides on the first token that is dropped. Returns whether there was one.
    pub fn shorten(&mut self, most: usize) -> bool {
        let drops = most < self.draft.tokens.len();
        if drops {
            self.draft.drop_from(most);
            (self.planned_len, self.is_shortened) = (most, true);
        }
        drops
    }

    /// The drafter whose step extends the draft; `None` if it is complete or cancelled.
    pub fn incomplete(&mut self, cancel: &Cancel) -> Option<usize> {
        if cancel.is_cancelled() {
            self.planned_len = self.draft.tokens.len();
        }
        self.decision.plan.drafter().filter(|_| self.draft.tokens.len() < self.planned_len)
    }

    /// Records that a step from `before` tokens took `time`. If it added none, the draft is complete: its drafter is
    /// at its end, or the constraint cut the draft.
    pub fn record_step(&mut self, before: usize, time: Duration) {
        self.time += time;
        if self.draft.tokens.len() <= before {
            self.planned_len = self.draft.tokens.len();
        }
    }
}

/// Adds a call to those of its drafter.
pub(super) fn count_call(calls: &mut Vec<Call>, new: Call) {
    match calls.iter_mut().find(|call| call.drafter == new.drafter) {
        Some(call) => (call.tokens, call.time) = (call.tokens + new.tokens, call.time + new.time),
        None => calls.push(new),
    }
}

/// How much of `found` would have been accepted, by prompt lookup drafter, where `tokens` were emitted.
pub(super) fn outcomes(found: &[Draft], tokens: &[u32]) -> Vec<DraftOutcome> {
    let found = found.iter().enumerate().filter(|(_, found)| !found.tokens.is_empty());
    let outcome = |(drafter, found): (usize, &Draft)| DraftOutcome {
        drafter,
        drafted: found.tokens.len().min(tokens.len()),
        accepted: found.tokens.iter().zip(tokens).take_while(|(found, token)| found == token).count(),
    };
    found.map(outcome).collect()
}
