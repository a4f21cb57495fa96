//! What replies consist of, and what takes them apart.

use super::message::ToolCall;
use crate::run::Piece;

/// A part of a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReplyPart {
    /// More of the text.
    Text(String),
    /// More of the reasoning.
    Reasoning(String),
    /// A whole call, without an id.
    ToolCall(ToolCall),
}

/// A syntax of replies, and what of one was not handed out yet.
pub(crate) trait ReplySyntax: Send + Sync {
    /// The parts that a piece completes.
    fn push(&mut self, piece: &Piece) -> Vec<ReplyPart>;

    /// The parts that the end completes. A call whose end is missing is one if it is whole otherwise.
    fn finish(&mut self) -> Vec<ReplyPart>;

    /// The token that ends a call, if the tokenizer has one.
    fn call_end(&self) -> Option<u32>;
}

/// Adds a part, to the last one if they are of a kind.
pub(crate) fn add(parts: &mut Vec<ReplyPart>, part: ReplyPart) {
    match (parts.last_mut(), part) {
        (Some(ReplyPart::Text(to)), ReplyPart::Text(text))
        | (Some(ReplyPart::Reasoning(to)), ReplyPart::Reasoning(text)) => to.push_str(&text),
        (_, ReplyPart::Text(text) | ReplyPart::Reasoning(text)) if text.is_empty() => {}
        (_, part) => parts.push(part),
    }
}
