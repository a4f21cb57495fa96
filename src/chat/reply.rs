//! Incrementally splits a chat model's output into text, reasoning and tool calls.

use super::parts::{ReplyPart, ReplySyntax};
use super::template::ChatOptions;
use crate::family;
use crate::piece::Piece;
use crate::tokenizer::Tokenizer;

/// Splits the pieces of a generation. The syntax is that of the family whose markers are tokens of the tokenizer; without any,
/// everything is text.
pub struct ReplyParser(Box<dyn ReplySyntax>);

impl ReplyParser {
    /// For replies to prompts rendered with `options`, and the checkpoint's tokenizer.
    pub fn new(tokenizer: &Tokenizer, options: &ChatOptions) -> Self {
        Self(family::reply_syntax(tokenizer, options))
    }

    /// The parts completed by a piece.
    pub fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        self.0.push(piece)
    }

    /// The parts completed by the end. A call that lacks only its end marker counts.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        self.0.finish()
    }

    /// The token that ends a call of a tool, if the tokenizer has one. As a stop token, it limits a reply to one call.
    pub fn call_end(&self) -> Option<u32> {
        self.0.call_end()
    }
}
