//! Replies: reasoning up to `</think>`, calls as
//! `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>..</function></tool_call>`, with line ends between.

use serde_json::Value;

use crate::chat::{ChatOptions, Json, ReasoningTokens, ReplyPart, ReplySyntax, Tool, ToolCall, add};
use crate::constraint::references;
use crate::piece::Piece;
use crate::tokenizer::Tokenizer;

const THINK: [&str; 2] = ["<think>", "</think>"];
const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

/// Splits texts at tags, which may be tokens or spelled out. Calls that are malformed, or without
/// offered tools, are text, unchanged.
pub(crate) struct XmlReply {
    tags: [(u32, &'static str); 4], // with their ids: decoded text does not have them
    tools: Vec<Tool>,
    state: State,
    rest: String,    // not emitted: a possible prefix of a tag, or a call
    searched: usize, // bytes of it in which the end of the call does not begin
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// The start of a reply: line ends before a tag are dropped, and before anything else are text.
    Start,
    /// Text; at its start after a tag, where line ends are dropped.
    Text { begin: bool },
    /// Reasoning; at its start or after a call, where a tag and line ends are dropped.
    Reasoning { begin: bool },
    /// A call, which began in reasoning or in text.
    Call { in_reasoning: bool },
}

impl XmlReply {
    /// `None` if a tag is not a token.
    pub(crate) fn new(tokenizer: &Tokenizer, options: &ChatOptions) -> Option<Self> {
        let tag = |tag| Some((tokenizer.id(tag)?, tag));
        let tags = [tag(THINK[0])?, tag(THINK[1])?, tag(CALL[0])?, tag(CALL[1])?];
        let state = if options.prompt_opens_reasoning() { State::Reasoning { begin: true } } else { State::Start };
        Some(Self {
            tags,
            tools: options.tools.iter().map(Tool::of).collect(),
            state,
            rest: String::new(),
            searched: 0,
        })
    }

    /// Emits what is certain; returns whether a tag was consumed, so that there may be more.
    fn step(&mut self, parts: &mut Vec<ReplyPart>) -> bool {
        if self.state == State::Start && !self.start() {
            return false;
        }
        if let State::Text { begin: true } | State::Reasoning { begin: true } = self.state {
            self.rest.drain(..self.rest.len() - self.rest.trim_start_matches('\n').len());
        }
        let offered = &CALL[..usize::from(!self.tools.is_empty())];
        let ends: &[&str] = match self.state {
            State::Text { begin: true } => &[&THINK[..1], offered].concat(),
            State::Start | State::Text { begin: false } => offered,
            State::Reasoning { begin: true } => &[&THINK[..], offered].concat(),
            State::Reasoning { begin: false } => &[&THINK[1..], offered].concat(),
            State::Call { in_reasoning: true } => &[CALL[1], THINK[1]],
            State::Call { in_reasoning: false } => &CALL[1..],
        };
        let unsearched = &self.rest[self.searched..];
        let found = ends.iter().filter_map(|tag| Some((self.searched + unsearched.find(tag)?, *tag)));
        // Reasoning begins a reply.
        let found = found.filter(|(at, tag)| *tag != THINK[0] || *at == 0).min();
        let Some((at, tag)) = found else {
            let sure = self.rest.len() - uncertain(&self.rest, ends, self.state);
            if matches!(self.state, State::Call { .. }) {
                self.searched = sure;
            } else if sure > 0 {
                let text: String = self.rest.drain(..sure).collect();
                self.emit(text, parts);
            }
            return false;
        };
        self.searched = 0;
        let mut before: String = self.rest.drain(..at + tag.len()).collect();
        before.truncate(at);
        match self.state {
            State::Call { in_reasoning } => {
                // What the end of the reasoning cuts short is part of it.
                let (text, end) = if tag == CALL[1] { (&*before, tag) } else { (before.trim_end_matches('\n'), "") };
                let part = self.call(text, end, in_reasoning);
                // Line ends after a call are not part of the text or reasoning that follows.
                let begin = matches!(part, ReplyPart::ToolCall(_));
                add(parts, part);
                if tag == CALL[1] {
                    self.state = if in_reasoning { State::Reasoning { begin } } else { State::Text { begin } };
                    return true;
                }
            }
            State::Reasoning { .. } => self.emit(before.trim_end_matches('\n').to_owned(), parts),
            State::Start | State::Text { .. } => self.emit(before, parts),
        }
        self.state = match tag {
            "<think>" => State::Reasoning { begin: true },
            "<tool_call>" => State::Call { in_reasoning: matches!(self.state, State::Reasoning { .. }) },
            _ => State::Text { begin: true },
        };
        true
    }

    fn emit(&mut self, text: String, parts: &mut Vec<ReplyPart>) {
        match &mut self.state {
            State::Reasoning { begin } => {
                *begin = *begin && text.is_empty();
                add(parts, ReplyPart::Reasoning(text));
            }
            State::Text { begin } => {
                *begin = *begin && text.is_empty();
                add(parts, ReplyPart::Text(text));
            }
            State::Start | State::Call { .. } => {}
        }
    }

    /// Whether what a reply begins with is known. It stays in `rest`.
    fn start(&mut self) -> bool {
        let begun = self.rest.trim_start_matches('\n');
        let mut tags = [THINK[0], CALL[0]].into_iter().take(if self.tools.is_empty() { 1 } else { 2 });
        let is_open = tags.clone().any(|tag| tag.starts_with(begun) && begun.len() < tag.len());
        if !is_open {
            self.state = State::Text { begin: tags.any(|tag| begun.starts_with(tag)) };
        }
        !is_open
    }

    /// The call in `text`, or `text` itself, with its tags.
    fn call(&self, text: &str, end: &str, in_reasoning: bool) -> ReplyPart {
        let written = || format!("{}{text}{end}", CALL[0]);
        match parse(text, &self.tools) {
            Some(call) => ReplyPart::ToolCall(call),
            None if in_reasoning => ReplyPart::Reasoning(written()),
            None => ReplyPart::Text(written()),
        }
    }
}

impl ReplySyntax for XmlReply {
    fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        let (mut parts, mut begin) = (Vec::new(), 0);
        for control in &piece.control {
            self.rest.push_str(&piece.text[begin..control.at]);
            begin = control.at;
            let tag = self.tags.iter().find(|(id, _)| *id == control.id);
            self.rest.push_str(tag.map_or("", |(_, tag)| tag));
        }
        self.rest.push_str(&piece.text[begin..]);
        while self.step(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.rest);
        self.searched = 0;
        match self.state {
            State::Start | State::Text { .. } => add(&mut parts, ReplyPart::Text(rest)),
            State::Reasoning { .. } => add(&mut parts, ReplyPart::Reasoning(rest)),
            State::Call { in_reasoning } => add(&mut parts, self.call(&rest, "", in_reasoning)),
        }
        self.state = State::Start;
        parts
    }

    fn call_end(&self) -> Option<u32> {
        Some(self.tags[3].0)
    }

    fn reasoning(&self) -> ReasoningTokens {
        let [open, close, call, call_end] = self.tags.map(|(id, _)| Some(id));
        let call = [call, call_end].map(|id| id.filter(|_| !self.tools.is_empty()));
        let is_open = matches!(self.state, State::Reasoning { .. });
        ReasoningTokens { tags: [open, close], call, is_open, in_call: false, count: 0 }
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
fn parse(text: &str, tools: &[Tool]) -> Option<ToolCall> {
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
        let (value, after) = until_end(from)?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let separator = if arguments.len() > 1 { "," } else { "" };
        arguments += &format!("{separator}{}:{}", string(key)?, spelled(value, name, key, tools)?);
        rest = after;
    }
}

/// The text before the tag that ends a parameter's value, and what follows the tag. One that no other tag follows is part
/// of the value.
fn until_end(text: &str) -> Option<(&str, &str)> {
    let mut ends =
        text.match_indices("</parameter>").map(|(at, tag)| (&text[..at], text[at + tag.len()..].trim_start()));
    ends.find(|(_, after)| ["<parameter=", "</function>"].iter().any(|tag| after.starts_with(tag)))
}

/// A value as JSON: itself, if it is JSON of a type that the tool's schema has for it, or of any if that is not a
/// string. The template writes `True`, `False` and `None` for what is not a string.
fn spelled(value: &str, name: &str, key: &str, tools: &[Tool]) -> Option<String> {
    let Some(Tool { parameters, .. }) = tools.iter().find(|tool| tool.name == name) else { return string(value) };
    let mut object = parameters;
    for _ in 0..MAX_SCHEMAS {
        let Some(of) = referred(object, parameters) else { break };
        object = of;
    }
    let schemas = [&object["properties"][key], &object["additionalProperties"]];
    let Some(schema) = schemas.into_iter().find(|schema| schema.is_object()) else { return string(value) };
    let text = match value {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let Ok(json) = serde_json::from_str::<Value>(text) else { return string(value) };
    let types = types_of(schema, parameters);
    if types.contains(&"string") && (json.is_string() || !types.iter().any(|of| is_of_type(&json, of))) {
        return string(value);
    }
    Some(text.to_owned())
}

/// The part of `root` that a schema refers to.
fn referred<'s>(schema: &Value, root: &'s Value) -> Option<&'s Value> {
    references::lookup(root, schema["$ref"].as_str()?)
}

/// Schemas that are looked at for a value's types: references may lead to the same ones again and again.
const MAX_SCHEMAS: usize = 64;

/// The names of the types that a schema, part of `root`, lists, or that its constants have; none if it does not say.
fn types_of<'s>(schema: &'s Value, root: &'s Value) -> Vec<&'s str> {
    let (mut open, mut types) = (vec![schema], Vec::new());
    for _ in 0..MAX_SCHEMAS {
        let Some(schema) = open.pop() else { break };
        if let Some(of) = referred(schema, root) {
            open.push(of);
            continue;
        }
        open.extend(["anyOf", "oneOf", "allOf"].into_iter().flat_map(|key| listed(schema, key)));
        match &schema["type"] {
            Value::String(one) => types.push(one.as_str()),
            Value::Array(several) => types.extend(several.iter().filter_map(Value::as_str)),
            _ => types.extend(listed(schema, "enum").iter().chain(schema.get("const")).map(type_of)),
        }
    }
    types
}

fn listed<'s>(schema: &'s Value, key: &str) -> &'s [Value] {
    schema[key].as_array().map(Vec::as_slice).unwrap_or_default()
}

fn type_of(constant: &Value) -> &str {
    match constant {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn is_of_type(json: &Value, of: &str) -> bool {
    match of {
        "boolean" => json.is_boolean(),
        "null" => json.is_null(),
        "integer" => json.is_i64() || json.is_u64(),
        "number" => json.is_number(),
        "array" => json.is_array(),
        "object" => json.is_object(),
        _ => false,
    }
}

fn string(text: &str) -> Option<String> {
    serde_json::to_string(text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::ControlToken;

    const TOOL: &str = r##"{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties":
        {"a": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}, "b": {"type": ["boolean", "null"]},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "e": {"enum": ["1", "2"]}, "m": {"enum": ["a", 1, [1]]},
        "r": {"$ref": "#/$defs/e~1f"}, "s": {"allOf": [{"$ref": "#/$defs/e~1f"}]}}, "additionalProperties": {"type": "integer"},
        "$defs": {"e/f": {"enum": ["1"]}}}}}"##;

    fn tool(text: &str) -> Tool {
        Tool::of(&Json::parse(text).expect("JSON"))
    }

    fn reply(state: State, tools: bool) -> XmlReply {
        let tools = if tools { vec![tool(TOOL)] } else { Vec::new() };
        let tags = [(0, THINK[0]), (1, THINK[1]), (2, CALL[0]), (3, CALL[1])];
        XmlReply { tags, tools, state, rest: String::new(), searched: 0 }
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

    /// At the end of a piece, it may be the end of the call.
    #[test]
    fn a_value_may_have_the_beginning_of_the_tag_that_ends_calls() {
        let text =
            "<tool_call><function=f><parameter=a>\u{c4}</tool_</tool_call</tool</parameter></function></tool_call>";
        for size in 1..20 {
            let want = [call("f", "{\"a\":\"\u{c4}</tool_</tool_call</tool\"}")];
            assert_eq!(parts(text, reply(State::Start, true), size), want, "in pieces of {size}");
            let within = parts(&format!("A{text}B</think>"), reply(State::Reasoning { begin: true }, true), size);
            assert_eq!(within, [reasoning("A"), want[0].clone(), reasoning("B")], "in pieces of {size}");
        }
    }

    #[test]
    fn a_value_may_have_the_tag_that_ends_values() {
        let tools = [tool(TOOL)];
        let text =
            "<function=f>\n<parameter=l>\n[\"a</parameter>b\"]\n</parameter>\n<parameter=n>3</parameter></function>";
        let arguments = parse(text, &tools).expect("a call").arguments;
        assert_eq!(arguments, Json::parse(r#"{"l": ["a</parameter>b"], "n": 3}"#).expect("JSON"));
        assert!(parse("<function=f>\n<parameter=n>3</parameter>x</function>", &tools).is_none());
    }

    #[test]
    fn null_parameters_are_absent_ones() {
        let [null, absent] =
            [r#"{"name": "f", "parameters": null}"#, r#"{"name": "f"}"#].map(|text| tool(text).parameters);
        assert_eq!(null, absent);
    }

    #[test]
    fn parameters_may_be_a_reference() {
        let schema = r##"{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"properties": {"n": {"type": "integer"}}}}}"##;
        let function = format!(r#"{{"name": "f", "parameters": {schema}}}"#);
        for text in [format!(r#"{{"type": "function", "function": {function}}}"#), function.clone()] {
            assert_eq!(spelled("5", "f", "n", &[tool(&text)]).as_deref(), Some("5"));
            let circle = tool(&text.replace("defs/b", "defs/a"));
            assert_eq!(spelled("5", "f", "n", &[circle]).as_deref(), Some("\"5\""));
        }
    }

    #[test]
    fn replies_are_parsed() {
        let f = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n\
                 <parameter=l>\n[1, \"x\"]\n</parameter>\n</function>\n</tool_call>";
        let of_f = || call("f", r#"{"a":"12","n":12,"l":[1,"x"]}"#);
        let two = format!("I look.\n{f}\n{f}\n");
        let cases = [
            ("Hello < there\n", vec![text("Hello < there\n")]),
            // Line ends are dropped at tags only.
            ("\n\nHello", vec![text("\n\nHello")]),
            ("\n", vec![text("\n")]),
            ("\n<thin", vec![text("\n<thin")]),
            ("\n\n<think>\nA\n</think>\n\nC", vec![reasoning("A"), text("C")]),
            ("<think></think>\nC", vec![text("C")]),
            ("<think>\nA\n\nB\n</think>\n\nC", vec![reasoning("A\n\nB"), text("C")]),
            (&two, vec![text("I look.\n"), of_f(), of_f()]),
            // Of several lines, of the schema of other names, of the wrong type.
            (
                "<tool_call><function=f><parameter=a>\nx\n\ny\n</parameter><parameter=z>1</parameter>\
                 <parameter=n>one</parameter></function></tool_call>",
                vec![call("f", r#"{"a":"x\n\ny","z":1,"n":"one"}"#)],
            ),
            ("\n<tool_call><function=g></function></tool_call>\na", vec![call("g", "{}"), text("a")]),
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
                let parts = parts(written, reply(State::Start, true), size);
                assert_eq!(parts, want, "{written:?} in pieces of {size}");
            }
        }
        // Values of several types, and as the template writes them.
        for (key, value, want) in [
            ("b", "True", "true"),
            ("b", "None", "null"),
            ("b", "false", "false"),
            ("o", "2024", "\"2024\""),
            ("o", "true", "\"true\""),
            ("o", "None", "null"),
            ("e", "1", "\"1\""),
            ("m", "1", "1"),
            ("m", "a", "\"a\""),
            ("m", "[1]", "[1]"),
            ("r", "1", "\"1\""),
            ("s", "1", "\"1\""),
            ("other", "1", "1"),
            ("n", "1.5", "1.5"),
            ("a", "None", "\"None\""),
        ] {
            let written =
                format!("<tool_call><function=f><parameter={key}>\n{value}\n</parameter></function></tool_call>");
            let parts = parts(&written, reply(State::Start, true), 5);
            assert_eq!(parts, [call("f", &format!("{{\"{key}\":{want}}}"))]);
        }
        let thinking = || reply(State::Reasoning { begin: true }, true);
        for size in [1, 3, 1000] {
            assert_eq!(parts("\u{c4}\n</think>\n\nC", thinking(), size), [reasoning("\u{c4}"), text("C")]);
            assert_eq!(parts("<think>\nA\n", thinking(), size), [reasoning("A\n")]);
            assert_eq!(parts(&format!("A\n{f}"), thinking(), size), [reasoning("A"), of_f()]);
            // Only its tag ends the reasoning.
            let within = format!("A\n{f}\nB\n{f}\n</think>\n\nC");
            assert_eq!(parts(&within, thinking(), size), [reasoning("A"), of_f(), reasoning("B"), of_f(), text("C")]);
            // Tags that are only mentioned.
            let mentioned = "maybe <tool_call> is it\n</think>\n\nThe <think> tag.";
            assert_eq!(
                parts(mentioned, thinking(), size),
                [reasoning("maybe <tool_call> is it"), text("The <think> tag.")]
            );
            let malformed = "a <tool_call>x</tool_call> b</think>c";
            assert_eq!(parts(malformed, thinking(), size), [reasoning("a <tool_call>x</tool_call> b"), text("c")]);
            let without = reply(State::Start, false);
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
        let mut reply = reply(State::Start, true);
        assert_eq!([reply.push(&piece), reply.finish()].concat(), [reasoning("A"), text("B")]);
    }

    /// Ids 0 to 3 are the tags.
    #[test]
    fn reasoning_is_counted() {
        let count = |state: State, tools: bool, tokens: &[u32]| {
            let mut reasoning = reply(state, tools).reasoning();
            tokens.chunks(2).for_each(|tokens| reasoning.push(tokens));
            reasoning.count
        };
        let (thinking, text) = (State::Reasoning { begin: true }, State::Start);
        assert_eq!(count(thinking, false, &[7, 8, 9, 1, 7]), 3, "opened by the prompt");
        assert_eq!(count(text, false, &[0, 7, 8, 1, 9]), 2);
        assert_eq!(count(text, false, &[7, 8]), 0);
        assert_eq!(count(thinking, true, &[7, 2, 8, 9, 3, 9, 1, 9]), 2, "without the call");
        assert_eq!(count(thinking, false, &[7, 2, 8, 1]), 3, "there are no calls");
    }
}
