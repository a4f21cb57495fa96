//! What a model writes in a chat, taken apart as it comes: text, reasoning, calls of tools.

use super::channels::Channels;
use super::parts::ReplyPart;
use super::template::ChatOptions;
use super::xml::XmlReply;
use crate::run::Piece;
use crate::tokenizer::Tokenizer;

/// Takes the pieces of a generation apart. The syntax is that whose marks are tokens of the tokenizer: Gemma 4's control
/// tokens, or Qwen3.5's tags; if it has neither, all is text.
pub struct ReplyParser(Syntax);

enum Syntax {
    Channels(Channels),
    Xml(Box<XmlReply>),
}

impl ReplyParser {
    /// For replies to prompts that were rendered with `options`, and the tokenizer of the checkpoint.
    pub fn new(tokenizer: &Tokenizer, options: &ChatOptions) -> Self {
        Self(match XmlReply::new(tokenizer, options) {
            Some(xml) => Syntax::Xml(Box::new(xml)),
            None => Syntax::Channels(Channels::new(tokenizer, !options.tools.is_empty())),
        })
    }

    /// The parts that a piece completes.
    pub fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        match &mut self.0 {
            Syntax::Channels(channels) => channels.push(piece),
            Syntax::Xml(xml) => xml.push(piece),
        }
    }

    /// The parts that the end completes. A call whose end is missing is one if it is whole otherwise.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        match &mut self.0 {
            Syntax::Channels(channels) => channels.finish(),
            Syntax::Xml(xml) => xml.finish(),
        }
    }
}
