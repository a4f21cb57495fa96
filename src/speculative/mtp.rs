//! The MTP drafter: the assistant chained with itself.

use rand::Rng;

use super::{Draft, Frontier, Speculator};
use crate::Result;
use crate::gemma4::Assistant;
use crate::kv::Committed;

/// How the drafter picks its tokens. Both keep the target's distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSampling {
    /// The most probable token. Better where the target is sure of itself.
    #[default]
    Greedy,
    /// A draw from the drafter's own distribution under the request's sampling. Better at high temperature.
    Sampled,
}

/// Chains `num_drafts` steps of the assistant from the frontier. Every step stands at `last`'s own position and reads
/// committed rows only; only the token and the hidden state change from step to step.
///
/// # Errors
/// If a tensor operation fails, or the drafter's numbers are none.
pub fn draft(
    assistant: &Assistant,
    speculator: &Speculator<'_>,
    frontier: &Frontier,
    kv: Committed<'_>,
    num_drafts: usize,
    rng: &mut impl Rng,
) -> Result<Draft> {
    let mut token = frontier.last;
    let mut hidden = frontier.hidden.clone();
    let mut tokens = Vec::with_capacity(num_drafts);
    let mut probs = Vec::with_capacity(num_drafts);
    for _ in 0..num_drafts {
        let step = assistant.step(speculator.target, token, &hidden, kv)?;
        let (ids, logits) = (step.scores.ids.as_deref(), &step.scores.logits);
        token = match speculator.drafts {
            DraftSampling::Greedy => speculator.sampler.most_probable(ids, logits)?,
            DraftSampling::Sampled => {
                let distribution = speculator.sampler.distribution(ids, logits)?;
                let token = distribution.sample(rng);
                probs.push(distribution);
                token
            }
        };
        tokens.push(token);
        hidden = step.hidden;
    }
    let probs = (speculator.drafts == DraftSampling::Sampled).then_some(probs);
    Ok(Draft { tokens, probs })
}
