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

    /// A count of reasoning tokens, from the reply's beginning on.
    fn reasoning(&self) -> ReasoningTokens;
}

/// Counts the tokens between one that opens reasoning and one that closes it, without these two and without calls.
pub(crate) struct ReasoningTokens {
    /// The beginning and the end of the reasoning.
    pub tags: [Option<u32>; 2],
    /// The beginning and the end of a call; `None` if no tool was offered.
    pub call: [Option<u32>; 2],
    /// Whether the reasoning has begun.
    pub is_open: bool,
    pub in_call: bool,
    pub count: usize,
}

impl ReasoningTokens {
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        for token in tokens.iter().map(|token| Some(*token)) {
            if self.tags.contains(&token) {
                (self.is_open, self.in_call) = (token == self.tags[0], false);
            } else if self.call.contains(&token) {
                self.in_call = token == self.call[0];
            } else {
                self.count += usize::from(self.is_open && !self.in_call);
            }
        }
    }
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
