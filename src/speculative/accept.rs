//! The rule that decides which drafts stand: a pure function of ids, probabilities and an RNG.

use rand::Rng;

use crate::sampler::Distribution;

/// A chain of proposed tokens.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    /// The tokens, each drafted after the one before it.
    pub tokens: Vec<u32>,
    /// The distribution that each was drawn from; `None` where they were chosen, not drawn (one-hot).
    pub probs: Option<Vec<Distribution>>,
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
            let draft = Draft { tokens, probs: None };
            assert_eq!(accept(&draft, &rows, &mut rng), Accepted { count, next });
        }
    }
}
