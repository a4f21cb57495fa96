//! Drafts: proposed tokens, and how drafters with a distribution choose them.

use crate::sampler::Distribution;

/// A chain of proposed tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Draft {
    /// The tokens, each drafted after the one before it.
    pub tokens: Vec<u32>,
    /// The distributions that they were drawn from; `None` for greedy drafts (one-hot), as a token without one is.
    pub probs: Option<Vec<Distribution>>,
    /// The drafter's probability of each token among those it scored; only with
    /// [`Confidence::Report`] and a drafter that has probabilities.
    pub confidence: Vec<f32>,
    /// The next drawn token and its distribution, if the constraint's check rejected the token, or its row had no
    /// memory. A check that exceeded a limit may reject a token that the mask allows, so the target decides.
    pub dropped: Option<(u32, Distribution)>,
}

impl Draft {
    /// Whether no token was drawn at random: the verified length may then depend on the tokens.
    pub(crate) fn is_certain(&self) -> bool {
        self.probs.iter().flatten().chain(self.dropped.iter().map(|(_, probs)| probs)).all(Distribution::is_certain)
    }

    /// Truncates to the first `tokens` tokens.
    pub(super) fn truncate(&mut self, tokens: usize) {
        if tokens < self.tokens.len() {
            self.dropped = None;
        }
        self.tokens.truncate(tokens);
        self.confidence.truncate(tokens);
        if let Some(probs) = &mut self.probs {
            probs.truncate(tokens);
        }
    }

    /// Drops the tokens from `valid` on, which the constraint rejects or which have no memory. Whether a position has a
    /// draft then depends on the draw, so the first one's distribution is kept for the residual.
    pub(super) fn drop_from(&mut self, valid: usize) {
        if valid < self.tokens.len() {
            let dropped = self.probs.as_ref().and_then(|probs| Some((self.tokens[valid], probs.get(valid)?.clone())));
            self.truncate(valid);
            self.dropped = dropped;
        }
    }
}

/// How drafters with a distribution choose drafts. Both preserve the target's distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSampling {
    /// The most probable token. Better when the target's distribution is peaked.
    #[default]
    Greedy,
    /// A draw from the drafter's distribution with the request's sampling. Better at high temperature.
    Sampled,
}

/// Whether a draft reports the drafter's probabilities of its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Confidence {
    /// No.
    #[default]
    Omit,
    /// Yes, in [`Draft::confidence`].
    Report,
}
