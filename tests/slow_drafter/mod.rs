//! A drafter that waits for its test.

use std::sync::Arc;

use foretoken::rand::rngs::StdRng;
use foretoken::speculative::{Context, Draft, DraftCost, Drafter, DrafterKind};

/// Calls a function before every token that it drafts.
pub struct Slow(pub Arc<dyn Fn() + Send + Sync>);

impl Drafter for Slow {
    fn kind(&self) -> DrafterKind {
        DrafterKind::Custom
    }

    fn cost(&self) -> DraftCost {
        DraftCost::PerToken
    }

    fn draft(&mut self, _: &Context<'_>, most: usize, draft: &mut Draft, _: &mut StdRng) -> foretoken::Result<()> {
        while draft.tokens.len() < most {
            (self.0)();
            draft.tokens.push(9);
        }
        Ok(())
    }
}
