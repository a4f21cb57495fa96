//! The acceptance rule: a pure function of ids, probabilities and an RNG.

use std::convert::Infallible;

use rand::Rng;

use super::draft::Draft;
use crate::Result;
use crate::sampler::Distribution;

/// `count` drafts are accepted, and `next` follows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Leading drafts that are accepted.
    pub count: usize,
    /// The target's own token after them: the correction of the first rejected draft, or a bonus
    /// token if all are accepted.
    pub next: u32,
}

/// The emitted tokens have the target's distribution.
///
/// A greedy draft is accepted if the target's own draw is that token; otherwise, that draw is the correction. One draw
/// per emitted token, in order: for one seed, the text is that of plain decoding, whatever was drafted.
///
/// A drawn draft is accepted with probability `min(1, target / draft)`, which accepts more, and the correction is drawn
/// from the residual distribution `norm(max(0, target - draft))` (Leviathan et al. 2023, section 2.3).
///
/// `target_probs` has one row more than there are drafts.
///
/// # Panics
/// If it has fewer.
pub fn accept(draft: &Draft, target_probs: &[Distribution], rng: &mut impl Rng) -> Accepted {
    match accept_rows(draft, |row| Ok::<_, Infallible>(target_probs[row].clone()), rng) {
        Ok(accepted) => accepted,
        Err(never) => match never {},
    }
}

/// [`accept`] with lazily computed rows: `target_probs(i)` is called only if drafts `0..i` are accepted. If it fails
/// after an accepted draft, the round ends with that draft: its row is the first of the next round, and fails again.
///
/// # Errors
/// Those of `target_probs(0)`.
pub(crate) fn accept_rows<E>(
    draft: &Draft,
    mut target_probs: impl FnMut(usize) -> Result<Distribution, E>,
    rng: &mut impl Rng,
) -> Result<Accepted, E> {
    let mut count = 0;
    loop {
        let target = match target_probs(count) {
            Err(_) if count > 0 => return Ok(Accepted { count: count - 1, next: draft.tokens[count - 1] }),
            target => target?,
        };
        let Some(token) = draft.tokens.get(count) else {
            let next = match draft.dropped.as_ref().filter(|(_, dropped)| !dropped.is_certain()) {
                Some((token, dropped)) if is_accepted(*token, &target, dropped, rng) => *token,
                Some((_, dropped)) => target.residual(dropped).sample(rng),
                None => target.sample(rng),
            };
            return Ok(Accepted { count, next });
        };
        let draft_probs = draft.probs.as_ref().and_then(|probs| probs.get(count));
        let correction = match draft_probs.filter(|probs| !probs.is_certain()) {
            Some(draft_probs) if is_accepted(*token, &target, draft_probs, rng) => None,
            Some(draft_probs) => Some(target.residual(draft_probs).sample(rng)),
            None => Some(target.sample(rng)).filter(|next| next != token),
        };
        if let Some(next) = correction {
            return Ok(Accepted { count, next });
        }
        count += 1;
    }
}

/// Whether a token drawn from `draft_probs` is accepted: with probability `min(1, target / draft)`.
fn is_accepted(token: u32, target: &Distribution, draft_probs: &Distribution, rng: &mut impl Rng) -> bool {
    // The ratio is NaN if the token has probability 0 in both: rejected.
    let ratio = target.probability(token) / draft_probs.probability(token);
    ratio >= 1.0 || rng.random::<f64>() < ratio
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
        // Neither distribution has the token.
        let draft = Draft { tokens: vec![9], probs: Some(vec![Distribution::certain(8)]), ..Draft::default() };
        assert_eq!(accept(&draft, &rows, &mut rng), Accepted { count: 0, next: 5 });
        // The second token has no distribution: it is a greedy draft.
        let draft = Draft { tokens: vec![5, 6], probs: Some(vec![Distribution::certain(5)]), ..Draft::default() };
        assert_eq!(accept(&draft, &rows, &mut rng), Accepted { count: 2, next: 7 });
        // A row that fails after an accepted draft.
        let draft = Draft { tokens: vec![5, 6, 7], ..Draft::default() };
        for (fails, want) in [(0, Err(0)), (1, Ok((0, 5))), (2, Ok((1, 6))), (3, Ok((2, 7)))] {
            let probs = |row: usize| if row == fails { Err(row) } else { Ok(Distribution::certain(5 + row as u32)) };
            let accepted = accept_rows(&draft, probs, &mut rng).map(|accepted| (accepted.count, accepted.next));
            assert_eq!(accepted, want, "row {fails}");
        }
    }

    /// The check rejects a token that the mask allows, or one that it does not.
    #[test]
    fn rejected_by_the_check_a_token_keeps_the_targets_distribution() {
        let proposal = Distribution::new(vec![(1, 0.9), (2, 0.1)]);
        let mut rng = StdRng::seed_from_u64(0);
        for (target, expected) in [(vec![(1, 0.5), (2, 0.5)], 0.5), (vec![(2, 1.0), (3, 1.0)], 0.0)] {
            let rows = [Distribution::certain(7), Distribution::new(target), Distribution::certain(8)];
            let mut ones = 0;
            for _ in 0..10_000 {
                let token = proposal.sample(&mut rng);
                let probs = Some(vec![Distribution::certain(7), proposal.clone()]);
                let mut draft = Draft { tokens: vec![7, token], probs, ..Draft::default() };
                if token == 1 {
                    draft.drop_from(1);
                }
                let accepted = accept(&draft, &rows, &mut rng);
                ones += usize::from(accepted == Accepted { count: 1, next: 1 });
            }
            let share = ones as f64 / 10_000.0;
            assert!((share - expected).abs() < 0.02, "token 1 in {share} of the draws, expected {expected}");
        }
    }
}
