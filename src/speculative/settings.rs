//! A generation's settings for its rounds.

use std::borrow::Cow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{Confidence, DraftSampling, SimulatedAcceptance};
use crate::constraint::ConstraintState;
use crate::sampler::{Distribution, LogitsProcessor, Sampler};
use crate::{Error, Result};

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

    /// Whether the host needs nothing but the accept result.
    pub fn decides_on_device(&self) -> bool {
        self.sampler.is_plain_greedy() && !self.reads_whole_rows()
    }

    /// Whether a device accepts drafts without the host.
    pub fn accepts_on_device(&self) -> bool {
        self.decides_on_device() && self.simulated.is_none()
    }

    /// The number of largest logits of a row that its distribution depends on; `None` if it depends on all.
    pub fn largest_logits(&self) -> Option<usize> {
        self.sampler.largest_logits().filter(|_| !self.reads_whole_rows())
    }

    /// Whether the host needs all logits of a row, whatever is sampled from them.
    fn reads_whole_rows(&self) -> bool {
        self.processor.is_some() || self.constraint.is_some() || self.logprobs.is_some()
    }

    /// The tokens that the distributions of a round's rows read: the last of `tokens`, then `drafts`.
    pub fn history<'t>(&self, tokens: &'t [u32], drafts: &[u32]) -> Cow<'t, [u32]> {
        let most = if self.processor.is_some() { usize::MAX } else { self.sampler.history() };
        let newest = &tokens[tokens.len().saturating_sub(most)..];
        if drafts.is_empty() { newest.into() } else { [newest, drafts].concat().into() }
    }

    /// The target's distribution after `tokens`, the last `drafts` of which are the round's, from its row of logits:
    /// processor, constraint, penalties, filters, temperature. `tokens` may begin as those of [`Settings::history`].
    ///
    /// # Errors
    /// If a logit is NaN or infinite, the processor leaves no finite one, or the processor's or constraint's.
    pub fn distribution(&self, tokens: &[u32], drafts: usize, logits: &[f32]) -> Result<Distribution> {
        if self.processor.is_none() && self.constraint.is_none() && self.sampler.history() == 0 {
            return self.sampler.distribution(None, logits);
        }
        let mut processed = logits.to_vec();
        if let Some(processor) = &self.processor {
            processor.process(tokens, &mut processed)?;
        }
        if let Some(constraint) = &self.constraint {
            constraint.lock().mask(&tokens[tokens.len() - drafts..], &mut processed)?;
        }
        self.sampler.penalize(tokens, &mut processed)?;
        self.sampler.distribution(None, &processed).map_err(|error| {
            // If the model's own logits have a most probable token, the processor is at fault.
            if self.processor.is_none() || self.sampler.most_probable(None, logits).is_err() {
                return error;
            }
            let problem = "leaves no token: its largest logit is not finite; exclude fewer tokens, and add no NaN";
            Error::argument("logits_processor", problem)
        })
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
