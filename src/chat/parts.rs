//! Parts of replies, and the parser interface.

use super::message::ToolCall;
use crate::piece::Piece;

/// A part of a reply.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReplyPart {
    /// More of the text.
    Text(String),
    /// More of the reasoning.
    Reasoning(String),
    /// A complete tool call, without an id.
    ToolCall(ToolCall),
}

/// An incremental parser of a reply syntax.
pub(crate) trait ReplySyntax: Send + Sync {
    /// The parts completed by a piece.
    fn push(&mut self, piece: &Piece) -> Vec<ReplyPart>;

    /// The parts completed by the end. A call that lacks only its end marker counts.
    fn finish(&mut self) -> Vec<ReplyPart>;

    /// The token that ends a call, if the tokenizer has one.
    fn call_end(&self) -> Option<u32>;
}

/// Adds a part, merging it with the last one if both are of one kind.
pub(crate) fn add(parts: &mut Vec<ReplyPart>, part: ReplyPart) {
    match (parts.last_mut(), part) {
        (Some(ReplyPart::Text(to)), ReplyPart::Text(text))
        | (Some(ReplyPart::Reasoning(to)), ReplyPart::Reasoning(text)) => to.push_str(&text),
        (_, ReplyPart::Text(text) | ReplyPart::Reasoning(text)) if text.is_empty() => {}
        (_, part) => parts.push(part),
    }
}
