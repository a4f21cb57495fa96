//! A draft that is to be verified.

use std::time::Duration;

use super::{Cancel, Decision, Draft, Plan, Reason};

/// What one drafter did in a round.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub drafter: usize,
    pub tokens: usize,
    pub time: Duration,
}

/// A draft to be verified, once a model's is as long as was decided.
pub(crate) struct Proposal {
    pub draft: Draft,
    pub wanted: usize, // tokens of the draft when it is complete
    pub decision: Decision,
    pub calls: Vec<Call>,
    pub whose: Option<usize>, // the drafter
    pub found: Vec<Draft>,    // of every prompt lookup drafter
    pub forced: Vec<u32>,     // what a constraint leaves no choice about
    pub time: Duration,
}

impl Proposal {
    /// A plain step that nobody decided on.
    pub fn nothing() -> Self {
        let decision =
            Decision { plan: Plan::Plain, reason: Reason::Nothing, tokens: 1.0, ms: 0.0, plain_ms: 0.0, balance: 0.0 };
        let (draft, calls, time) = (Draft::default(), Vec::new(), Duration::ZERO);
        Self { draft, wanted: 0, decision, calls, whose: None, found: Vec::new(), forced: Vec::new(), time }
    }

    /// Tokens that it verifies, when it is complete.
    pub fn drafted(&self) -> usize {
        self.wanted
    }

    /// Whose step lengthens the draft, unless it is complete. Cancelled, it is.
    pub fn incomplete(&mut self, cancel: &Cancel) -> Option<usize> {
        if cancel.is_cancelled() {
            self.wanted = self.draft.tokens.len();
        }
        self.whose.filter(|_| self.draft.tokens.len() < self.wanted)
    }

    /// A step that began with `before` tokens took `time`. If there are no more now, the draft is complete: its drafter is at its
    /// end, or ahead of what the constraint left of the draft.
    pub fn lengthened(&mut self, before: usize, time: Duration) {
        self.time += time;
        if self.draft.tokens.len() <= before {
            self.wanted = self.draft.tokens.len();
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
