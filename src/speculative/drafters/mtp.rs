//! `mtp`: the assistant, run autoregressively.

use std::sync::Arc;

use candle_core::Tensor;

use crate::Result;
use crate::gemma4::Assistant;
use crate::model::{ChainModel, DraftKv, DraftRows, DraftStep};
use crate::speculative::{ChainStep, Context, Draft, DraftChain, DraftCost, Drafter, DrafterKind};

/// Runs the assistant autoregressively from the last token. Every step has that token's position and reads only
/// committed rows; only the token and the hidden state change from step to step.
pub struct Mtp {
    assistant: Arc<Assistant>,
    hidden: Option<Tensor>, // after the last token of the current draft
}

impl Mtp {
    /// The drafter of an assistant.
    pub fn new(assistant: Arc<Assistant>) -> Self {
        Self { assistant, hidden: None }
    }
}

impl Drafter for Mtp {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Mtp
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn chain(&mut self) -> Option<&mut dyn DraftChain> {
        Some(self)
    }
}

impl DraftChain for Mtp {
    fn model(&self) -> Arc<dyn ChainModel> {
        self.assistant.clone()
    }

    fn next<'a>(&'a mut self, context: &Context<'a>, draft: &Draft) -> Result<ChainStep<'a>> {
        let token = draft.tokens.last().or(context.tokens.last()).copied().unwrap_or_default();
        let hidden = self.hidden.as_ref().filter(|_| !draft.tokens.is_empty()).unwrap_or(context.hidden).clone();
        Ok(ChainStep::Pass(DraftRows { ids: vec![token], hidden: Some(hidden), kv: DraftKv::Target(context.kv) }))
    }

    fn advance(&mut self, step: &DraftStep) {
        self.hidden = Some(step.hidden.clone());
    }
}
