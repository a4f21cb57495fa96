//! Log-probabilities of emitted tokens.

use foretoken_kernels::vocabulary;

/// Log-probabilities under the target's own distribution: its logits at temperature 1, before any
/// [`LogitsProcessor`](crate::LogitsProcessor), penalty and filter.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The emitted token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most probable tokens with theirs, the most probable first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Log-probabilities of `token` and of the `top` most probable tokens, from a row of logits.
    pub(crate) fn of(logits: &[f32], token: u32, top: usize) -> Self {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
        let logprob = |id: u32| (f64::from(logits[id as usize]) - max - sum.ln()) as f32;
        let mut best = Vec::new();
        vocabulary::top_k(logits, top, &mut best);
        Self { token, logprob: logprob(token), top: best.into_iter().map(|id| (id, logprob(id))).collect() }
    }
}
