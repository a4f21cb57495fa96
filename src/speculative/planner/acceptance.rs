//! Acceptance rates by position, with exponential forgetting.

use super::tuning::Tuning;

/// Positions with a count of their own; deeper ones share the last, because few drafts get there.
const POSITIONS: usize = 10;

/// Acceptance probabilities of one drafter: for every position, that its token is accepted given
/// that all before it are.
#[derive(Clone, Debug)]
pub(super) struct Acceptance {
    prior: f64, // of the first position
    accepted: [f64; POSITIONS],
    drafted: [f64; POSITIONS],
    surprise: f64, // accepted minus expected tokens, in the last rounds
    variance: f64, // of `surprise`
}

impl Acceptance {
    pub(super) fn new(prior: f64) -> Self {
        Self { prior, accepted: [0.0; POSITIONS], drafted: [0.0; POSITIONS], surprise: 0.0, variance: 0.0 }
    }

    /// Records a draft whose first `accepted` of `drafted` tokens were accepted.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize, tuning: &Tuning) {
        let reached = drafted.min(accepted + 1);
        let keep = 1.0 - 1.0 / tuning.change_window;
        (self.surprise, self.variance) = (self.surprise * keep, self.variance * keep * keep);
        for (position, chance) in self.chances(reached, tuning).into_iter().enumerate() {
            self.surprise += f64::from(u8::from(position < accepted)) - chance;
            self.variance += chance * (1.0 - chance);
        }
        // A change point: earlier counts are no longer representative. The quarter of a token squared keeps a single
        // accepted token of a drafter that is never right from counting as one.
        if self.surprise.powi(2) > tuning.outlier.powi(2) * (self.variance + 0.25) {
            self.counts().for_each(|count| *count *= tuning.change_keep);
            (self.surprise, self.variance) = (0.0, 0.0);
        }
        self.idle(tuning);
        for position in 0..reached {
            let at = position.min(POSITIONS - 1);
            self.drafted[at] += 1.0;
            self.accepted[at] += f64::from(u8::from(position < accepted));
        }
    }

    /// A round without a draft of this drafter.
    pub(super) fn idle(&mut self, tuning: &Tuning) {
        let keep = 1.0 - 1.0 / tuning.window;
        self.counts().for_each(|count| *count *= keep);
    }

    fn counts(&mut self) -> impl Iterator<Item = &mut f64> {
        self.accepted.iter_mut().chain(&mut self.drafted)
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
        let mut chances: Vec<_> = (self.accepted.iter().zip(&self.drafted).take(count))
            .map(|(accepted, drafted)| {
                chance = (accepted + weight * chance) / (drafted + weight);
                chance
            })
            .collect();
        chances.resize(count, chance);
        chances
    }
}
