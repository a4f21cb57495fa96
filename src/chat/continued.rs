//! Continuing the last message: the end of its text is tagged before rendering, and the prompt is cut there.

use minijinja::Value;

use super::marks;
use super::message::{Content, Message, Part, Role};
use super::python::is_space;
use crate::{Error, Result};

/// The end of the text that is continued.
pub(super) struct TextEnd {
    /// A character that is in no message.
    tag: char,
    /// The white space before it, which templates that trim texts drop.
    spaces: String,
}

/// The messages with the last one's end tagged. `values`: all that templates see.
///
/// # Errors
/// If it is not the assistant's or has tool calls, or no character is left for the tag.
pub(super) fn tagged(messages: &[Message], values: &[Value]) -> Result<(Vec<Message>, TextEnd)> {
    let tag = marks::unused(values)?.ok_or_else(marks::none_left)?;
    let mut messages = messages.to_vec();
    let last = messages.last_mut().filter(|last| last.role == Role::Assistant && last.tool_calls.is_empty());
    let text = last.and_then(|last| match &mut last.content {
        Content::Text(text) => Some(text),
        Content::Parts(parts) => parts.last_mut().map(|Part::Text(text)| text),
    });
    let problem = "the last one must be the assistant's, with a text and without tool calls, to be continued";
    let text = text.ok_or_else(|| Error::argument("messages", problem))?;
    let without_start = text.trim_start_matches(is_space);
    let spaces = without_start[without_start.trim_end_matches(is_space).len()..].to_owned();
    // A template that trims the text drops the space.
    text.extend([tag, ' ']);
    Ok((messages, TextEnd { tag, spaces }))
}

/// The prompt, up to the end of the text that is continued: as transformers cuts it, but the line end before an empty
/// text stays.
///
/// # Errors
/// If the template does not write the text.
pub(super) fn cut(prompt: String, end: Option<TextEnd>) -> Result<String> {
    let Some(TextEnd { tag, spaces }) = end else { return Ok(prompt) };
    let problem = "does not write the text of the last message, which therefore cannot be continued";
    let (text, rest) = prompt.rsplit_once(tag).ok_or_else(|| Error::Template(problem.into()))?;
    let is_trimmed = !rest.starts_with(' ');
    let text = text.strip_suffix(spaces.as_str()).filter(|_| is_trimmed).unwrap_or(text);
    Ok(text.to_owned())
}
