//! The drafters of a proposal, with their inputs, the constraint and the RNG.

use std::time::Instant;

use parking_lot::Mutex;
use rand::rngs::StdRng;

use super::proposal::{Call, count_call};
use super::{Context, Draft, Drafter};
use crate::constraint::ConstraintState;
use crate::{Error, Result};

/// The drafters and context of one proposal.
pub(super) struct DraftingContext<'a> {
    pub context: Context<'a>,
    pub drafters: &'a mut [Box<dyn Drafter>],
    pub constraint: Option<&'a Mutex<ConstraintState>>,
    pub rng: &'a mut StdRng,
}

impl DraftingContext<'_> {
    /// Tokens left in the context of a drafter's model.
    pub fn left(&self, drafter: usize) -> usize {
        self.drafters[drafter].max_context().saturating_sub(self.context.tokens.len())
    }

    /// Makes the draft of a drafter that is not a model; returns its length.
    ///
    /// # Errors
    /// The drafter's, or if it drew tokens at random.
    pub fn look_up(&mut self, drafter: usize, most: usize, draft: &mut Draft, calls: &mut Vec<Call>) -> Result<usize> {
        self.draft(drafter, most, draft, calls)?;
        if draft.is_certain() {
            return Ok(draft.tokens.len());
        }
        let (kind, cost) = (self.drafters[drafter].kind(), self.drafters[drafter].cost());
        let problem = format!("{kind:?} draws tokens at `DraftCost::{cost:?}`; use `PerToken`");
        Err(Error::argument("drafters", problem))
    }

    /// Lengthens a draft with a drafter, to at most `most` tokens, up to what the constraint rejects.
    ///
    /// # Errors
    /// The drafter's.
    pub fn draft(&mut self, drafter: usize, most: usize, draft: &mut Draft, calls: &mut Vec<Call>) -> Result<()> {
        let (start, before) = (Instant::now(), draft.tokens.len());
        self.drafters[drafter].draft(&self.context, most, draft, self.rng)?;
        // A custom drafter may have drafted more: `max_tokens` and the rows of a round are limits.
        draft.truncate(most);
        let (tokens, time) = (draft.tokens.len().saturating_sub(before), start.elapsed());
        if let Some(constraint) = self.constraint {
            draft.drop_from(constraint.lock().valid(&draft.tokens));
        }
        count_call(calls, Call { drafter, tokens, time });
        Ok(())
    }
}
