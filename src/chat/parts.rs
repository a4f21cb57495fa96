//! What replies consist of.

use super::message::ToolCall;

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

/// Adds a part, to the last one if they are of a kind.
pub(super) fn add(parts: &mut Vec<ReplyPart>, part: ReplyPart) {
    match (parts.last_mut(), part) {
        (Some(ReplyPart::Text(to)), ReplyPart::Text(text))
        | (Some(ReplyPart::Reasoning(to)), ReplyPart::Reasoning(text)) => to.push_str(&text),
        (_, ReplyPart::Text(text) | ReplyPart::Reasoning(text)) if text.is_empty() => {}
        (_, part) => parts.push(part),
    }
}
