//! Replies: reasoning up to `</think>`, calls as
//! `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>`, with line ends between.

use minijinja::Value;

use crate::chat::{ChatOptions, GenerationPrompt, Json, ReplyPart, ReplySyntax, Thinking, ToolCall, add};
use crate::piece::Piece;
use crate::tokenizer::Tokenizer;

const THINK: [&str; 2] = ["<think>", "</think>"];
const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// Splits texts at tags, which may be tokens or spelled out. Calls that are malformed, or without offered tools, are text,
/// unchanged.
pub(crate) struct XmlReply {
    tags: [(Option<u32>, &'static str); 4], // ids of tokens hidden in decoded text
    tools: Vec<Json>,
    state: State,
    rest: String, // not emitted: a possible prefix of a tag
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Text; at its start after a tag, where line ends are dropped.
    Text { begin: bool },
    /// Reasoning; at its start, where a tag and line ends are dropped.
    Reasoning { begin: bool },
    /// A call.
    Call,
}

impl XmlReply {
    /// `None` if the tokenizer has no such tags, or has the markers of another syntax.
    pub(crate) fn new(tokenizer: &Tokenizer, options: &ChatOptions) -> Option<Self> {
        let tags = [THINK[0], THINK[1], CALL[0], CALL[1]].map(|tag| (tokenizer.id(tag), tag));
        if tags.iter().any(|(id, _)| id.is_none()) {
            return None;
        }
        // The template opens the reasoning in the prompt.
        let thinks = options.thinking == Thinking::On && options.generation_prompt == GenerationPrompt::Add;
        let state = if thinks { State::Reasoning { begin: true } } else { State::Text { begin: true } };
        Some(Self { tags, tools: options.tools.clone(), state, rest: String::new() })
    }

    /// Emits what is certain; returns whether a tag was consumed, so that there may be more.
    fn step(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        if let State::Text { begin: true } | State::Reasoning { begin: true } = self.state {
            self.rest.drain(..self.rest.len() - self.rest.trim_start_matches('\n').len());
        }
        let offered = &CALL[..usize::from(!self.tools.is_empty())];
        let ends: &[&str] = match self.state {
            State::Text { .. } => &[&THINK[..1], offered].concat(),
            State::Reasoning { .. } => &[&THINK[..], offered].concat(),
            State::Call => &CALL[1..],
        };
        let found = ends.iter().filter_map(|tag| Some((self.rest.find(tag)?, *tag))).min();
        let Some((at, tag)) = found else {
            let sure = self.rest.len() - uncertain(&self.rest, ends, self.state);
            if self.state != State::Call && sure > 0 {
                let text: String = self.rest.drain(..sure).collect();
                self.hand_out(text, parts);
            }
            return false;
        };
        let before: String = self.rest.drain(..at + tag.len()).take(at).collect();
        match self.state {
            State::Call => add(parts, self.call(&before, tag)),
            State::Reasoning { .. } => self.hand_out(before.trim_end_matches('\n').to_owned(), parts),
            State::Text { .. } => self.hand_out(before, parts),
        }
        self.state = match tag {
            "<think>" => State::Reasoning { begin: true },
            "<tool_call>" => State::Call,
            _ => State::Text { begin: true },
        };
        true
    }

    fn hand_out(&mut self, text: String, parts: &mut Vec<ReplyPart>) {
        match &mut self.state {
            State::Reasoning { begin } => {
                *begin = *begin && text.is_empty();
                add(parts, ReplyPart::Reasoning(text));
            }
            State::Text { begin } => {
                *begin = *begin && text.is_empty();
                add(parts, ReplyPart::Text(text));
            }
            State::Call => {}
        }
    }

    /// The call in `text`, or `text` itself, with its tags.
    fn call(&self, text: &str, end: &str) -> ReplyPart {
        match parse(text, &self.tools) {
            Some(call) => ReplyPart::ToolCall(call),
            None => ReplyPart::Text(format!("{}{text}{end}", CALL[0])),
        }
    }
}

impl ReplySyntax for XmlReply {
    fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        let (mut parts, mut begin) = (Vec::new(), 0);
        for control in &piece.control {
            self.rest.push_str(&piece.text[begin..control.at]);
            begin = control.at;
            let tag = self.tags.iter().find(|(id, _)| *id == Some(control.id));
            self.rest.push_str(tag.map_or("", |(_, tag)| tag));
        }
        self.rest.push_str(&piece.text[begin..]);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.rest);
        match self.state {
            State::Text { .. } => add(&mut parts, ReplyPart::Text(rest)),
            State::Reasoning { .. } => add(&mut parts, ReplyPart::Reasoning(rest)),
            State::Call => add(&mut parts, self.call(&rest, "")),
        }
        self.state = State::Text { begin: true };
        parts
    }

    fn call_end(&self) -> Option<u32> {
        self.tags[3].0
    }
}

/// Bytes at the end of `text` that may be a prefix of one of `tags`; in reasoning, including line ends before them.
fn uncertain(text: &str, tags: &[&str], state: State) -> usize {
    let longest = |tag: &&str| (1..tag.len()).rev().find(|len| text.ends_with(&tag[..*len])).unwrap_or(0);
    let tag = tags.iter().map(longest).max().unwrap_or(0);
    match state {
        State::Reasoning { .. } => text.len() - text[..text.len() - tag].trim_end_matches('\n').len(),
        _ => tag,
    }
}

/// The call between the tags.
fn parse(text: &str, tools: &[Json]) -> Option<ToolCall> {
    let (name, mut rest) = text.trim().strip_prefix("<function=")?.split_once('>')?;
    if name.is_empty() || name.contains(['<', '\n']) {
        return None;
    }
    let mut arguments = String::from("{");
    loop {
        rest = rest.trim_start();
        if let Some(end) = rest.strip_prefix("</function>") {
            let arguments = Json::parse(&(arguments + "}")).ok().filter(|_| end.is_empty())?;
            return Some(ToolCall { id: None, name: name.to_owned(), arguments });
        }
        let (key, from) = rest.strip_prefix("<parameter=")?.split_once('>')?;
        let (value, behind) = from.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let separator = if arguments.len() > 1 { "," } else { "" };
        arguments += &format!("{separator}{}:{}", string(key)?, spelled(value, name, key, tools)?);
        rest = behind;
    }
}

/// A value as JSON: unchanged, if the tool's schema has a type other than string for it and it is JSON.
fn spelled(value: &str, name: &str, key: &str, tools: &[Json]) -> Option<String> {
    let get = |value: &Value, key: &str| value.get_attr(key).unwrap_or_default();
    let functions = tools.iter().map(|tool| get(&tool.0, "function"));
    let mut schema = functions
        .filter(|function| get(function, "name").as_str() == Some(name))
        .map(|function| get(&get(&get(&function, "parameters"), "properties"), key));
    let is_string = |schema: &Value| schema.is_undefined() || get(schema, "type").as_str() == Some("string");
    let other = schema.next().is_some_and(|schema| !is_string(&schema));
    let is_json = || serde_json::from_str::<serde::de::IgnoredAny>(value).is_ok();
    if other && is_json() { Some(value.to_owned()) } else { string(value) }
}

fn string(text: &str) -> Option<String> {
    serde_json::to_string(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::ControlToken;

    const TOOL: &str = r#"{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties":
        {"a": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}}}}"#;

    fn reply(state: State, tools: bool) -> XmlReply {
        let tools = if tools { vec![Json::parse(TOOL).expect("JSON")] } else { Vec::new() };
        let tags = [(Some(0), THINK[0]), (Some(1), THINK[1]), (Some(2), CALL[0]), (Some(3), CALL[1])];
        XmlReply { tags, tools, state, rest: String::new() }
    }

    /// The parts of a text in pieces of `size` characters.
    fn parts(text: &str, mut reply: XmlReply, size: usize) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        let characters: Vec<char> = text.chars().collect();
        for piece in characters.chunks(size) {
            let piece = Piece { text: piece.iter().collect(), ..Piece::default() };
            reply.push(&piece).into_iter().for_each(|part| add(&mut parts, part));
        }
        reply.finish().into_iter().for_each(|part| add(&mut parts, part));
        parts
    }

    fn text(text: &str) -> ReplyPart {
        ReplyPart::Text(text.into())
    }

    fn reasoning(text: &str) -> ReplyPart {
        ReplyPart::Reasoning(text.into())
    }

    fn call(name: &str, arguments: &str) -> ReplyPart {
        let arguments = Json::parse(arguments).expect("JSON");
        ReplyPart::ToolCall(ToolCall { id: None, name: name.into(), arguments })
    }

    #[test]
    fn replies_are_taken_apart() {
        let f = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n\
                 <parameter=l>\n[1, \"x\"]\n</parameter>\n</function>\n</tool_call>";
        let of_f = || call("f", r#"{"a":"12","n":12,"l":[1,"x"]}"#);
        let two = format!("I look.\n{f}\n{f}\n");
        let cases = [
            ("Hello < there\n", vec![text("Hello < there\n")]),
            ("<think>\nA\n\nB\n</think>\n\nC", vec![reasoning("A\n\nB"), text("C")]),
            (&two, vec![text("I look.\n"), of_f(), of_f()]),
            // Of several lines, of no schema, of the wrong type.
            (
                "<tool_call><function=f><parameter=a>\nx\n\ny\n</parameter><parameter=z>1</parameter>\
                 <parameter=n>one</parameter></function></tool_call>",
                vec![call("f", r#"{"a":"x\n\ny","z":"1","n":"one"}"#)],
            ),
            ("<tool_call><function=g></function>", vec![call("g", "{}")]),
            // Malformed ones are text as it was written.
            ("a<tool_call>{}</tool_call>b", vec![text("a<tool_call>{}</tool_call>b")]),
            (
                "<tool_call><function=f><parameter=a>1</function>",
                vec![text("<tool_call><function=f><parameter=a>1</function>")],
            ),
            (
                "<tool_call><function=></function></tool_call>",
                vec![text("<tool_call><function=></function></tool_call>")],
            ),
        ];
        for (written, want) in cases {
            for size in [1, 2, 7, 1000] {
                let parts = parts(written, reply(State::Text { begin: true }, true), size);
                assert_eq!(parts, want, "{written:?} in pieces of {size}");
            }
        }
        let thinking = || reply(State::Reasoning { begin: true }, true);
        for size in [1, 3, 1000] {
            assert_eq!(parts("A\n</think>\n\nC", thinking(), size), [reasoning("A"), text("C")]);
            assert_eq!(parts("<think>\nA\n", thinking(), size), [reasoning("A\n")]);
            assert_eq!(parts(&format!("A\n{f}"), thinking(), size), [reasoning("A"), of_f()]);
            let without = reply(State::Text { begin: true }, false);
            assert_eq!(parts(f, without, size), [text(f)], "no tool was offered");
        }
    }

    #[test]
    fn tags_that_are_control_tokens_are_seen() {
        let piece = Piece {
            text: "A\n\nB".into(),
            control: vec![ControlToken { id: 0, at: 0 }, ControlToken { id: 1, at: 1 }],
            ..Piece::default()
        };
        let mut reply = reply(State::Text { begin: true }, true);
        assert_eq!([reply.push(&piece), reply.finish()].concat(), [reasoning("A"), text("B")]);
    }
}
