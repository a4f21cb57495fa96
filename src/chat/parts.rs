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

/// Counts the tokens between one that opens reasoning and one that closes it, without these two.
pub(crate) struct ReasoningTokens {
    pub open: Option<u32>,
    /// The end of the reasoning, and the beginning of a call.
    pub close: [Option<u32>; 2],
    /// Whether the next token is reasoning.
    pub is_open: bool,
    pub count: usize,
}

impl ReasoningTokens {
    pub(crate) fn push(&mut self, tokens: &[u32]) {
        for token in tokens.iter().map(|token| Some(*token)) {
            if token == self.open {
                self.is_open = true;
            } else if self.close.contains(&token) {
                self.is_open = false;
            } else {
                self.count += usize::from(self.is_open);
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
