//! The rule that decides which drafts stand: a pure function of ids, probabilities and an RNG.

use rand::Rng;

use super::{Confidence, Context, DraftSampling};
use crate::Result;
use crate::sampler::Distribution;

/// A chain of proposed tokens.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// The tokens, each drafted after the one before it.
    pub tokens: Vec<u32>,
    /// The distribution that each was drawn from; `None` where they were chosen, not drawn (one-hot).
    pub probs: Option<Vec<Distribution>>,
    /// How probable its drafter thinks each token, among those it scored; empty unless [`Confidence::Said`] was wanted of
    /// a drafter that has probabilities.
    pub confidence: Vec<f32>,
}

impl Draft {
    /// Adds the token that a model's logits give. `ids[i]` is the token of `logits[i]`; without ids, token `i` is.
    ///
    /// # Errors
    /// If the logits are no finite numbers.
    pub(super) fn push(
        &mut self,
        context: &Context<'_>,
        ids: Option<&[u32]>,
        logits: &[f32],
        rng: &mut impl Rng,
    ) -> Result<()> {
        let token = match context.drafts {
            DraftSampling::Greedy => context.sampler.most_probable(ids, logits)?,
            DraftSampling::Sampled => {
                let distribution = context.sampler.distribution(ids, logits)?;
                let token = distribution.sample(rng);
                self.probs.get_or_insert_default().push(distribution);
                token
            }
        };
        self.tokens.push(token);
        if context.confidence == Confidence::Said {
            let at = ids.map_or(Some(token as usize), |ids| ids.iter().position(|id| *id == token));
            let own = at.map_or(f32::NAN, |at| logits[at]);
            self.confidence.push(1.0 / logits.iter().map(|logit| (logit - own).exp()).sum::<f32>());
        }
        Ok(())
    }

    /// The first `tokens` tokens.
    pub(super) fn truncate(&mut self, tokens: usize) {
        self.tokens.truncate(tokens);
        self.confidence.truncate(tokens);
        if let Some(probs) = &mut self.probs {
            probs.truncate(tokens);
        }
    }
}

/// What a model's first token said about a look-up's draft.
#[derive(Clone, Debug)]
pub enum Confirmed {
    /// They have the same first token: the look-up's draft.
    Yes(Draft),
    /// They differ: the model's draft, to be gone on with.
    No(Draft),
}

/// Puts a look-up's draft to the first token of a model's, `first`, which must be all there is of it yet.
///
/// Which draft goes on depends on which token the model drew. So a drawn token is not distributed as its distribution
/// says any more once it is known to differ from the look-up's, and it counts as chosen: one-hot. What the model draws
/// behind it depends on nothing of the sort.
pub fn confirm(mut first: Draft, look_up: Draft) -> Confirmed {
    if first.tokens.first() == look_up.tokens.first() {
        return Confirmed::Yes(look_up);
    }
    if let Some(probs) = &mut first.probs {
        *probs = first.tokens.iter().map(|token| Distribution::certain(*token)).collect();
    }
    Confirmed::No(first)
}

/// The verdict: `count` drafts stand, and `next` follows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Leading drafts that stand.
    pub count: usize,
    /// The target's own token after them: the correction of the first rejected draft, or a bonus if all stand.
    pub next: u32,
}

/// Accepts draft `i` with probability `min(1, target / draft)`, and draws the correction of the first rejected one from
/// what the target's distribution has beyond the draft's: the emitted tokens are distributed as the target's own
/// (Leviathan et al. 2023, section 2.3). With certain (greedy) target distributions this compares ids.
///
/// `target_probs` has one row more than there are drafts.
///
/// # Panics
/// If it has fewer.
pub fn accept(draft: &Draft, target_probs: &[Distribution], rng: &mut impl Rng) -> Accepted {
    for (count, (token, target)) in draft.tokens.iter().zip(target_probs).enumerate() {
        let chosen;
        let proposal = match &draft.probs {
            Some(probs) => &probs[count],
            None => {
                chosen = Distribution::certain(*token);
                &chosen
            }
        };
        let ratio = target.probability(*token) / proposal.probability(*token);
        if ratio < 1.0 && rng.random::<f64>() >= ratio {
            return Accepted { count, next: target.beyond(proposal).sample(rng) };
        }
    }
    let count = draft.tokens.len();
    Accepted { count, next: target_probs[count].sample(rng) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{SeedableRng, rngs::StdRng};

    #[test]
    fn greedy_rows_accept_by_identity() {
        let rows: Vec<_> = [5, 6, 7].map(Distribution::certain).into();
        let mut rng = StdRng::seed_from_u64(0);
        for (tokens, count, next) in [(vec![5, 6], 2, 7), (vec![5, 9], 1, 6), (vec![9, 6], 0, 5), (vec![], 0, 5)] {
            let draft = Draft { tokens, ..Draft::default() };
            assert_eq!(accept(&draft, &rows, &mut rng), Accepted { count, next });
        }
    }
}
