//! What a generation asks of its rounds.

use std::sync::Arc;

use parking_lot::Mutex;

use super::{Confidence, DraftSampling, SimulatedAcceptance, Verification};
use crate::Result;
use crate::constraint::ConstraintState;
use crate::sampler::{LogitsProcessor, Sampler};

/// Whose draft counts where several have one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The first in the list that has one.
    Priority,
    /// The best per millisecond.
    Best,
}

/// What a generation asks for.
pub(crate) struct Settings {
    pub sampler: Sampler,
    pub processor: Option<Arc<dyn LogitsProcessor>>,
    /// What the text must match, behind the newest token.
    pub constraint: Option<Mutex<ConstraintState>>,
    pub drafts: DraftSampling,
    pub order: Order,
    pub confidence: Confidence,
    /// Accepts drafts by chance instead of by the target.
    pub simulated: Option<SimulatedAcceptance>,
    /// How many of the most probable tokens to report beside every emitted one.
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

    /// How a round behind `tokens` is judged.
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

    /// Has the constraint read a round's first tokens, and says whether they complete the text.
    ///
    /// # Errors
    /// The constraint's.
    pub fn read(&self, tokens: &[u32]) -> Result<bool> {
        self.constraint.as_ref().map_or(Ok(false), |constraint| constraint.lock().read(tokens))
    }

    /// The round is over.
    pub fn commit(&self) {
        if let Some(constraint) = &self.constraint {
            constraint.lock().commit();
        }
    }
}
