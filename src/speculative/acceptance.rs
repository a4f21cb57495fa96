//! How often drafts are accepted, by position, with exponential forgetting.

use super::Tuning;

/// Positions that are counted for themselves; the deeper ones share the last count, because few drafts get there.
const POSITIONS: usize = 10;

/// A value with its confidence bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Interval {
    pub mean: f64,
    pub low: f64,
    pub high: f64,
}

impl Interval {
    pub(super) fn exact(value: f64) -> Self {
        Self { mean: value, low: value, high: value }
    }
}

/// The acceptance probabilities along the drafts of one drafter: at every position, that its token is accepted if those
/// before it are.
#[derive(Clone, Debug)]
pub(super) struct Acceptance {
    prior: f64, // of the first position
    accepted: [f64; POSITIONS],
    drafted: [f64; POSITIONS],
    surprise: f64, // accepted less expected tokens, of the newest rounds
    variance: f64, // of that
}

impl Acceptance {
    pub(super) fn new(prior: f64) -> Self {
        Self { prior, accepted: [0.0; POSITIONS], drafted: [0.0; POSITIONS], surprise: 0.0, variance: 0.0 }
    }

    /// A draft whose first `accepted` of `drafted` tokens were accepted.
    pub(super) fn observe(&mut self, drafted: usize, accepted: usize, tuning: &Tuning) {
        let reached = drafted.min(accepted + 1);
        let keep = 1.0 - 1.0 / tuning.change_window;
        (self.surprise, self.variance) = (self.surprise * keep, self.variance * keep * keep);
        let (mut prior, weight) = (self.prior, tuning.prior_weight);
        for position in 0..reached {
            let at = position.min(POSITIONS - 1);
            prior = (self.accepted[at] + weight * prior) / (self.drafted[at] + weight);
            self.surprise += f64::from(u8::from(position < accepted)) - prior;
            self.variance += prior * (1.0 - prior);
        }
        // A text that changes: what was counted before says little any more. A quarter of a token squared keeps a single
        // accepted token of a drafter that is never right from being one.
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

    /// Expected tokens of rounds that verify 0 to `most` drafts, the target's own token included. The prior of a position
    /// is the mean of the one before it.
    pub(super) fn tokens(&self, most: usize, tuning: &Tuning) -> Vec<Interval> {
        let (mut prior, weight) = (self.prior, tuning.prior_weight);
        let (mut sum, mut all_accepted) = (Interval::exact(1.0), Interval::exact(1.0));
        let mut tokens = vec![sum];
        for position in 0..most {
            let at = position.min(POSITIONS - 1);
            let trials = self.drafted[at] + weight;
            let mean = (self.accepted[at] + weight * prior) / trials;
            let error = tuning.confidence * (mean * (1.0 - mean) / trials).sqrt();
            all_accepted.mean *= mean;
            all_accepted.low *= (mean - error).max(0.0);
            all_accepted.high *= (mean + error).min(1.0);
            sum.mean += all_accepted.mean;
            sum.low += all_accepted.low;
            sum.high += all_accepted.high;
            tokens.push(sum);
            prior = mean;
        }
        tokens
    }
}
