//! `forced`: the tokens that a constraint forces.

use rand::rngs::StdRng;

use crate::Result;
use crate::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind};

/// Proposes [`Context::forced`]: property names, punctuation, constants. Their masks have one token, so they are always
/// accepted and cost only their rows, which plain decoding computes as well.
pub struct Forced;

impl Drafter for Forced {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Forced
    }

    fn cost(&self) -> DraftCost {
        DraftCost::Forced
    }

    fn draft(&mut self, context: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> Result<()> {
        draft.tokens = context.forced[..most.min(context.forced.len())].to_vec();
        Ok(())
    }
}
