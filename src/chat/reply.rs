//! Incrementally splits a chat model's output into text, reasoning and tool calls.

use super::parts::{ReasoningTokens, ReplyPart, ReplySyntax};
use super::template::ChatOptions;
use crate::family;
use crate::piece::Piece;
use crate::tokenizer::Tokenizer;

/// Splits the pieces of a generation. The syntax is that of the family whose markers are tokens of
/// the tokenizer; without any, everything is text.
pub struct ReplyParser {
    syntax: Box<dyn ReplySyntax>,
    reasoning: ReasoningTokens,
}

impl ReplyParser {
    /// For replies to prompts rendered with `options`, and the checkpoint's tokenizer.
    pub fn new(tokenizer: &Tokenizer, options: &ChatOptions) -> Self {
        let syntax = family::reply_syntax(tokenizer, options);
        Self { reasoning: syntax.reasoning(), syntax }
    }

    /// The parts completed by a piece.
    pub fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        self.reasoning.push(&piece.tokens);
        self.syntax.push(piece)
    }

    /// The parts completed by the end. A call that lacks only its end marker counts.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        self.syntax.finish()
    }

    /// The token that ends a call of a tool, if the tokenizer has one. As a stop token, it limits a reply to one call.
    pub fn call_end(&self) -> Option<u32> {
        self.syntax.call_end()
    }

    /// Number of tokens of the reasoning so far, without those that begin and end it.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning.count
    }
}
