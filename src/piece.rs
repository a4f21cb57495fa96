//! Pieces of generated text.

use crate::sampler::TokenLogprobs;

/// Output of one round.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The completed text: whole characters, without a possible prefix of a stop string. Empty if the checkpoint has no
    /// tokenizer.
    pub text: String,
    /// The control tokens completed with this text, in order; at the end, the token that ended the text.
    pub control: Vec<ControlToken>,
    /// Number of leading tokens that are accepted drafts. The others are the target's own.
    pub accepted: usize,
    /// The target's log-probabilities of the tokens; empty unless
    /// [`GenerateOptions::logprobs`](crate::GenerateOptions::logprobs) is set.
    pub logprobs: Vec<TokenLogprobs>,
    /// In the first piece, those of the prompt's tokens; empty unless
    /// [`GenerateOptions::prompt_logprobs`](crate::GenerateOptions::prompt_logprobs) is set.
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

/// An emitted control token (`<turn|>`, `<|tool_call>`), or the stop token that ended the text. Its name is not part of
/// the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControlToken {
    /// Its id.
    pub id: u32,
    /// Byte offset in the piece's text.
    pub at: usize,
}
