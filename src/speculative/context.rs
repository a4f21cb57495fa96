//! The inputs of a drafter.

use candle_core::Tensor;
use rand::rngs::StdRng;

use super::draft::{Confidence, Draft, DraftSampling};
use crate::kv::Committed;
use crate::sampler::Sampler;
use crate::{Error, Result};

/// Inputs available to a drafter between two rounds.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// All tokens, including the last one, which the target has not read yet.
    pub tokens: &'a [u32],
    /// `(1, hidden)`: the target's state, after the final norm, that predicted the last token.
    pub hidden: &'a Tensor,
    /// The tokens that a constraint forces next; none without a constraint.
    pub forced: &'a [u32],
    /// The target's K and V of all tokens but the last.
    pub kv: Committed<'a>,
    /// The request's sampler.
    pub sampler: &'a Sampler,
    /// How drafters with a distribution choose drafts.
    pub drafts: DraftSampling,
    /// Whether the drafts' probabilities are reported (for a trace).
    pub confidence: Confidence,
}

impl Context<'_> {
    /// Adds the token chosen from a model's logits to `draft`. `ids[i]` is the token of
    /// `logits[i]`; without ids, token `i` is.
    ///
    /// # Errors
    /// If the logits are NaN or infinite.
    pub(crate) fn draft_token(
        &self,
        draft: &mut Draft,
        ids: Option<&[u32]>,
        logits: &[f32],
        rng: &mut StdRng,
    ) -> Result<()> {
        let token = match self.drafts {
            DraftSampling::Greedy => self.sampler.most_probable(ids, logits).map_err(Error::of_draft)?,
            DraftSampling::Sampled => {
                let distribution = self.sampler.distribution(ids, logits).map_err(Error::of_draft)?;
                let token = distribution.sample(rng);
                draft.probs.get_or_insert_default().push(distribution);
                token
            }
        };
        draft.tokens.push(token);
        if self.confidence == Confidence::Report {
            let at = ids.map_or(Some(token as usize), |ids| ids.iter().position(|id| *id == token));
            let own = at.map_or(f32::NAN, |at| logits[at]);
            draft.confidence.push(1.0 / logits.iter().map(|logit| (logit - own).exp()).sum::<f32>());
        }
        Ok(())
    }
}
