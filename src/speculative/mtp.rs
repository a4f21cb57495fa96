//! `mtp`: the assistant chained with itself.

use std::sync::Arc;

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::{Context, Draft, DraftCost, Drafter, DrafterKind, Observed};
use crate::Result;
use crate::gemma4::{Assistant, Target};

/// How drafts are chosen by drafters that have a distribution. Both keep the target's distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSampling {
    /// The most probable token. Better where the target is sure of itself.
    #[default]
    Greedy,
    /// A draw from the drafter's own distribution under the request's sampling. Better at high temperature.
    Sampled,
}

/// Chains steps of the assistant from the newest token. Every step stands at that token's own position and reads
/// committed rows only; only the token and the hidden state change from step to step.
pub struct Mtp {
    target: Arc<Target>,
    assistant: Arc<Assistant>,
    hidden: Option<Tensor>, // behind the last token of the draft that is being made
}

impl Mtp {
    /// The drafter of a checked pair.
    pub fn new(target: Arc<Target>, assistant: Arc<Assistant>) -> Self {
        Self { target, assistant, hidden: None }
    }
}

impl Drafter for Mtp {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn begin(&mut self, _: &[u32]) {}

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, rng: &mut StdRng) -> Result<()> {
        if draft.tokens.is_empty() {
            self.hidden = None;
        }
        while draft.tokens.len() < most {
            let hidden = self.hidden.as_ref().unwrap_or(context.hidden);
            let token = draft.tokens.last().or(context.tokens.last()).copied().unwrap_or_default();
            let step = self.assistant.step(&self.target, token, hidden, context.kv)?;
            draft.push(context, step.scores.ids.as_deref(), &step.scores.logits, rng)?;
            self.hidden = Some(step.hidden);
        }
        Ok(())
    }

    fn observe(&mut self, _: &Observed<'_>) -> Result<()> {
        Ok(())
    }
}
