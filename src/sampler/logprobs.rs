//! Log-probabilities of emitted tokens.

use foretoken_kernels::{Isa, vocabulary};

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
    pub(crate) fn of(isa: Isa, logits: &[f32], token: u32, top: usize) -> Self {
        let max = vocabulary::maximum(logits);
        let log_sum = vocabulary::sum(&vocabulary::softmax_weights(isa, logits, max, 1.0)).ln();
        let logprob = |id: u32| (f64::from(logits[id as usize]) - f64::from(max) - log_sum) as f32;
        let mut best = Vec::new();
        vocabulary::top_k(logits, top, &mut best);
        Self { token, logprob: logprob(token), top: best.into_iter().map(|id| (id, logprob(id))).collect() }
    }
}
