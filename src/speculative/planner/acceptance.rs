//! Acceptance rates by position, with exponential forgetting.

use super::tuning::Tuning;

/// Acceptance probabilities of one drafter: for every position, that its token is accepted given
/// that all before it are.
#[derive(Clone, Debug)]
pub(super) struct Acceptance {
    prior: f64,         // of the first position
    counts: Vec<Count>, // by position; deeper ones share the last, because few drafts get there
    excess: f64,        // accepted minus expected tokens, in the last rounds
    variance: f64,      // of `excess`
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    accepted: f64,
    drafted: f64,
}

impl Acceptance {
    pub(super) fn new(prior: f64, tuning: &Tuning) -> Self {
        Self { prior, counts: vec![Count::default(); tuning.positions.max(1)], excess: 0.0, variance: 0.0 }
    }

    /// Records a draft whose first `accepted` of `drafted` tokens were accepted.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize, tuning: &Tuning) {
        let reached = drafted.min(accepted + 1);
        let keep = 1.0 - 1.0 / tuning.change_window;
        (self.excess, self.variance) = (self.excess * keep, self.variance * keep * keep);
        for (position, chance) in self.chances(reached, tuning).into_iter().enumerate() {
            self.excess += f64::from(u8::from(position < accepted)) - chance;
            self.variance += chance * (1.0 - chance);
        }
        // A change point: earlier counts are no longer representative. The quarter of a token squared keeps a single
        // accepted token of a drafter that is never right from counting as one.
        if self.excess.powi(2) > tuning.outlier.powi(2) * (self.variance + 0.25) {
            self.decay(tuning.change_keep);
            (self.excess, self.variance) = (0.0, 0.0);
        }
        self.idle(tuning);
        let last = self.counts.len() - 1;
        for position in 0..reached {
            let count = &mut self.counts[position.min(last)];
            count.drafted += 1.0;
            count.accepted += f64::from(u8::from(position < accepted));
        }
    }

    /// Records a round without a draft of this drafter.
    pub(super) fn idle(&mut self, tuning: &Tuning) {
        self.decay(1.0 - 1.0 / tuning.window);
    }

    fn decay(&mut self, keep: f64) {
        for count in &mut self.counts {
            *count = Count { accepted: keep * count.accepted, drafted: keep * count.drafted };
        }
    }

    /// Expected tokens of rounds that verify 0 to `most` drafts, including the target's own token.
    pub(super) fn tokens(&self, most: usize, tuning: &Tuning) -> Vec<f64> {
        let (mut tokens, mut all_accepted) = (vec![1.0], 1.0);
        for (drafts, chance) in self.chances(most, tuning).into_iter().enumerate() {
            all_accepted *= chance;
            tokens.push(tokens[drafts] + all_accepted);
        }
        tokens
    }

    /// The probabilities of the first `count` positions. A position's prior is the mean of the one before it; those
    /// that share a count share its mean. (As priors of each other they would approach the count's own rate: after a
    /// few deep drafts without a rejection, certainty at any depth.)
    fn chances(&self, count: usize, tuning: &Tuning) -> Vec<f64> {
        let (mut chance, weight) = (self.prior, tuning.prior_weight);
        let mut chances: Vec<_> = (self.counts.iter().take(count))
            .map(|Count { accepted, drafted }| {
                chance = (accepted + weight * chance) / (drafted + weight);
                chance
            })
            .collect();
        chances.resize(count, chance);
        chances
    }
}
