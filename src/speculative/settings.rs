//! A generation's settings for its rounds.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Confidence, DraftSampling, SimulatedAcceptance, Verification};
use crate::Result;
use crate::constraint::ConstraintState;
use crate::sampler::{LogitsProcessor, Sampler};

/// Which draft is verified if several drafters have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The first in the list.
    Priority,
    /// The highest expected tokens per millisecond.
    Best,
}

/// A generation's settings.
pub(crate) struct Settings {
    pub sampler: Sampler,
    pub processor: Option<Arc<dyn LogitsProcessor>>,
    /// The constraint's state after the last token.
    pub constraint: Option<Mutex<ConstraintState>>,
    pub drafts: DraftSampling,
    pub order: Order,
    pub confidence: Confidence,
    /// Accepts drafts at random instead of by the target.
    pub simulated: Option<SimulatedAcceptance>,
    /// Number of most probable tokens to report with every emitted one.
    pub logprobs: Option<usize>,
}

impl Settings {
    /// Plain decoding with `sampler`.
    pub fn plain(sampler: Sampler) -> Self {
        Self {
            sampler,
            processor: None,
            constraint: None,
            drafts: DraftSampling::Greedy,
            order: Order::Priority,
            confidence: Confidence::Omit,
            simulated: None,
            logprobs: None,
        }
    }

    /// The verification parameters of a round after `tokens`.
    pub fn rule<'a>(&'a self, tokens: &'a [u32]) -> Verification<'a> {
        Verification {
            sampler: &self.sampler,
            processor: self.processor.as_deref(),
            constraint: self.constraint.as_ref(),
            tokens,
            simulated: self.simulated.as_ref(),
            logprobs: self.logprobs,
        }
    }

    /// Advances the constraint over a round's first tokens; returns whether they complete the text.
    ///
    /// # Errors
    /// The constraint's.
    pub fn read(&self, tokens: &[u32]) -> Result<bool> {
        self.constraint.as_ref().map_or(Ok(false), |constraint| constraint.lock().read(tokens))
    }

    /// Commits the round.
    pub fn commit(&self) {
        if let Some(constraint) = &self.constraint {
            constraint.lock().commit();
        }
    }
}
