//! The state of a sequence between rounds, besides its cache.

use candle_core::Tensor;

use crate::sampler::TokenLogprobs;

/// State between rounds: every token except `last` has its rows in the sequence state.
#[derive(Clone)]
pub struct DecodeState {
    /// The last token, which the target has not read yet.
    pub last: u32,
    /// `(1, hidden)`: the target's state, after the final norm, that predicted `last`. With the models on a device it
    /// stays there, and is empty here unless a trace needs it.
    pub hidden: Tensor,
}

/// The token drawn after a prompt, not yet part of the sequence.
pub(crate) struct FirstToken {
    /// The state once it is.
    pub state: DecodeState,
    pub logprobs: Vec<TokenLogprobs>,
}
