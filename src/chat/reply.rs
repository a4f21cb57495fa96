//! What a model writes in a chat, taken apart as it comes: text, reasoning, calls of tools.

use super::parts::{ReplyPart, ReplySyntax};
use super::template::ChatOptions;
use crate::family;
use crate::run::Piece;
use crate::tokenizer::Tokenizer;

/// Takes the pieces of a generation apart. The syntax is that of the family whose marks are tokens of the tokenizer; without
/// any, all is text.
pub struct ReplyParser(Box<dyn ReplySyntax>);

impl ReplyParser {
    /// For replies to prompts that were rendered with `options`, and the tokenizer of the checkpoint.
    pub fn new(tokenizer: &Tokenizer, options: &ChatOptions) -> Self {
        Self(family::reply_syntax(tokenizer, options))
    }

    /// The parts that a piece completes.
    pub fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        self.0.push(piece)
    }

    /// The parts that the end completes. A call whose end is missing is one if it is whole otherwise.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        self.0.finish()
    }

    /// The token that ends a call of a tool, if the tokenizer has one. As a stop token, it limits a reply to one call.
    pub fn call_end(&self) -> Option<u32> {
        self.0.call_end()
    }
}
