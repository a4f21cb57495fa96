//! Gemma 4's replies: reasoning in a channel, tool calls between control tokens.

use super::call;
use super::parts::{ReasoningTokens, ReplyPart, ReplySyntax, add};
use crate::piece::Piece;
use crate::tokenizer::Tokenizer;

/// Splits the pieces of a generation at Gemma 4's control tokens: reasoning is a channel,
/// `<|channel>thought\n .. <channel|>`, a tool call is `<|tool_call> .. <tool_call|>`. Calls that are
/// malformed, or without offered tools, are text, including the names of their control tokens: no output is
/// lost. The default has no markers: everything is text.
#[derive(Default)]
pub(crate) struct Channels {
    /// In the order of [`MARKERS`].
    markers: [Option<u32>; MARKERS.len()],
    /// Whether calls are parsed.
    tools: bool,
    state: State,
}

const MARKERS: [(&str, Marker); 5] = [
    ("<|channel>", Marker::OpenChannel),
    ("<channel|>", Marker::CloseChannel),
    ("<|tool_call>", Marker::OpenCall),
    ("<tool_call|>", Marker::CloseCall),
    ("<|\"|>", Marker::Quote),
];

/// The name of the reasoning channel.
const THOUGHT: &str = "thought";

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Marker {
    OpenChannel,
    CloseChannel,
    OpenCall,
    CloseCall,
    Quote,
}

/// The token of a marker, if the tokenizer has it.
pub(super) fn marker(tokenizer: &Tokenizer, marker: Marker) -> Option<u32> {
    let (name, _) = MARKERS.iter().find(|(_, of)| *of == marker)?;
    tokenizer.id(name).filter(|id| tokenizer.is_control(*id))
}

/// An assistant's text without its channels, as Gemma 4's templates strip them: of each piece that a closing marker
/// ends, what is before an opening one. `None` if nothing changes.
pub(super) fn without_channels(tokenizer: &Tokenizer, text: &str) -> Option<String> {
    let [open, close] = [Marker::OpenChannel, Marker::CloseChannel].map(|of| {
        let name = MARKERS.iter().find_map(|(name, marker)| (*marker == of).then_some(*name));
        name.filter(|_| marker(tokenizer, of).is_some())
    });
    let (open, close) = (open?, close?);
    let is_marked = text.contains(open) || text.contains(close);
    is_marked.then(|| text.split(close).flat_map(|piece| piece.split(open).next()).collect())
}

#[derive(Debug, Default, PartialEq)]
enum State {
    #[default]
    Text,
    /// The name of a channel, to the end of its line.
    ChannelName(String),
    /// A channel's text; whether a line end was held back, which is dropped before the channel's end.
    Channel {
        line_end: bool,
    },
    Call(Call),
}

#[derive(Debug, Default, PartialEq)]
struct Call {
    text: String,
    /// The positions of quotes in the text.
    quotes: Vec<usize>,
    /// Whether it began in a channel, which continues after it.
    in_channel: bool,
}

impl Channels {
    /// `tools`: whether tools were offered to the model. `None` if the tokenizer has no such tokens.
    pub(crate) fn new(tokenizer: &Tokenizer, tools: bool) -> Option<Self> {
        let markers = MARKERS.map(|(_, of)| marker(tokenizer, of));
        markers.iter().any(Option::is_some).then_some(Self { markers, tools, state: State::Text })
    }

    fn text(&mut self, text: &str, parts: &mut Vec<ReplyPart>) {
        if text.is_empty() {
            return;
        }
        match &mut self.state {
            State::Text => add(parts, ReplyPart::Text(text.into())),
            State::ChannelName(name) => match text.split_once('\n') {
                None => name.push_str(text),
                Some((_, rest)) => {
                    self.state = State::Channel { line_end: false };
                    self.text(rest, parts);
                }
            },
            State::Channel { line_end } => {
                let held = if *line_end { "\n" } else { "" };
                let own = text.strip_suffix('\n');
                *line_end = own.is_some();
                add(parts, ReplyPart::Reasoning(format!("{held}{}", own.unwrap_or(text))));
            }
            State::Call(call) => call.text.push_str(text),
        }
    }

    /// Reads a control token; `None` is one without meaning here, or the end.
    fn control(&mut self, marker: Option<Marker>, parts: &mut Vec<ReplyPart>) {
        match (&mut self.state, marker) {
            (State::Call(call), Some(Marker::Quote)) => return call.quotes.push(call.text.len()),
            (State::Call(call), marker) => {
                let goes_on = call.in_channel && marker != Some(Marker::CloseChannel);
                add(parts, call.part(marker == Some(Marker::CloseCall)));
                self.state = if goes_on { State::Channel { line_end: false } } else { State::Text };
            }
            (State::ChannelName(name), marker) => {
                // An empty channel, or one without a name.
                let text = if THOUGHT.starts_with(&**name) { String::new() } else { std::mem::take(name) };
                add(parts, ReplyPart::Reasoning(text));
                let is_closed = marker == Some(Marker::CloseChannel);
                self.state = if is_closed { State::Text } else { State::Channel { line_end: false } };
            }
            (State::Channel { .. }, Some(Marker::CloseChannel)) => self.state = State::Text,
            _ => {}
        }
        match marker {
            Some(Marker::OpenChannel) => self.state = State::ChannelName(String::new()),
            Some(Marker::OpenCall) if self.tools => {
                let in_channel = matches!(self.state, State::Channel { .. });
                self.state = State::Call(Call { in_channel, ..Call::default() });
            }
            Some(Marker::OpenCall | Marker::CloseCall | Marker::Quote) if !self.tools => {
                let name = MARKERS.iter().find(|(_, of)| Some(*of) == marker).map_or("", |(name, _)| name);
                self.text(name, parts);
            }
            _ => {}
        }
    }
}

impl ReplySyntax for Channels {
    fn push(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        let (mut parts, mut begin) = (Vec::new(), 0);
        for control in &piece.control {
            self.text(&piece.text[begin..control.at], &mut parts);
            begin = control.at;
            let found = MARKERS.iter().zip(self.markers).find(|(_, id)| *id == Some(control.id));
            self.control(found.map(|((_, marker), _)| *marker), &mut parts);
        }
        self.text(&piece.text[begin..], &mut parts);
        parts
    }

    fn finish(&mut self) -> Vec<ReplyPart> {
        let mut parts = Vec::new();
        self.control(None, &mut parts);
        if let State::Channel { line_end: true } = self.state {
            add(&mut parts, ReplyPart::Reasoning("\n".into()));
        }
        self.state = State::Text;
        parts
    }

    fn call_end(&self) -> Option<u32> {
        self.markers[3]
    }

    fn reasoning(&self) -> ReasoningTokens {
        let [open, close, call, call_end, _] = self.markers;
        let call = [call, call_end].map(|id| id.filter(|_| self.tools));
        ReasoningTokens { tags: [open, close], call, is_open: false, in_call: false, count: 0 }
    }
}

impl Call {
    /// The call, or its text as the model wrote it, with the names of its markers.
    fn part(&self, is_closed: bool) -> ReplyPart {
        if let Some(call) = call::parse(&self.text, &self.quotes) {
            return ReplyPart::ToolCall(call);
        }
        let mut written = String::from("<|tool_call>");
        let mut begin = 0;
        for at in &self.quotes {
            written += &self.text[begin..*at];
            written += "<|\"|>";
            begin = *at;
        }
        written += &self.text[begin..];
        written += if is_closed { "<tool_call|>" } else { "" };
        if self.in_channel { ReplyPart::Reasoning(written) } else { ReplyPart::Text(written) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::{Json, ToolCall};
    use crate::piece::ControlToken;

    /// The parts of a text in which markers are tokens, in pieces of `size` characters.
    fn parts(text: &str, tools: bool, size: usize) -> Vec<ReplyPart> {
        let mut parser = Channels { markers: [0, 1, 2, 3, 4].map(Some), tools, state: State::Text };
        let (mut parts, mut piece, mut rest) = (Vec::new(), Piece::default(), text);
        while !rest.is_empty() {
            match (0..).zip(MARKERS).find(|(_, (name, _))| rest.starts_with(name)) {
                Some((id, (name, _))) => {
                    piece.control.push(ControlToken { id, at: piece.text.len() });
                    rest = &rest[name.len()..];
                }
                None => {
                    let c = rest.chars().next().expect("a character");
                    piece.text.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
            if piece.text.chars().count() >= size {
                parser.push(&std::mem::take(&mut piece)).into_iter().for_each(|part| add(&mut parts, part));
            }
        }
        let last = [parser.push(&piece), parser.finish()].concat();
        last.into_iter().for_each(|part| add(&mut parts, part));
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
    fn replies_are_parsed() {
        let cases = [
            ("Hello\n", vec![text("Hello\n")]),
            ("<|channel>thought\nA\n\nB\n<channel|>C", vec![reasoning("A\n\nB"), text("C")]),
            ("<|channel>thought\n<channel|>C", vec![text("C")]),
            ("<|channel>thought<channel|>C", vec![text("C")]),
            ("<|channel>odd<channel|>C", vec![reasoning("odd"), text("C")]),
            // Ending inside a channel.
            ("<|channel>thought\nA\n", vec![reasoning("A\n")]),
            ("<|channel>tho", vec![]),
            (
                "I look.<|tool_call>call:f{a:<|\"|>}<|\"|>}<tool_call|><|tool_call>call:g{}<tool_call|>",
                vec![text("I look."), call("f", r#"{"a":"}"}"#), call("g", "{}")],
            ),
            ("<|channel>thought\nA\n<|tool_call>call:g{}<tool_call|>", vec![reasoning("A"), call("g", "{}")]),
            // Only its marker ends a channel.
            (
                "<|channel>thought\nA\n<|tool_call>call:g{}<tool_call|>B<|tool_call>g<tool_call|>\n<channel|>C",
                vec![reasoning("A"), call("g", "{}"), reasoning("B<|tool_call>g<tool_call|>"), text("C")],
            ),
            ("<|channel>thought\nA<|tool_call>call:g{}<channel|>C", vec![reasoning("A"), call("g", "{}"), text("C")]),
            (
                "<|channel>thought<|tool_call>call:g{}<tool_call|>B<channel|>C",
                vec![call("g", "{}"), reasoning("B"), text("C")],
            ),
            // Missing end markers.
            ("<|tool_call>call:f{}<|tool_call>call:g{}", vec![call("f", "{}"), call("g", "{}")]),
            // Malformed ones are text as it was written.
            ("a<|tool_call>call:f{b:<|\"|>c", vec![text("a<|tool_call>call:f{b:<|\"|>c")]),
            ("<|tool_call>f()<tool_call|>b", vec![text("<|tool_call>f()<tool_call|>b")]),
            ("<|tool_call><|\"|>", vec![text("<|tool_call><|\"|>")]),
            // A marker spelled in ordinary tokens is text.
            ("a <| tool_call>", vec![text("a <| tool_call>")]),
        ];
        for (written, want) in cases {
            for size in [1, 2, 7, 1000] {
                assert_eq!(parts(written, true, size), want, "{written:?} in pieces of {size}");
            }
        }
        let written = "a<|tool_call>call:f{b:<|\"|>c<|\"|>}<tool_call|>";
        assert_eq!(parts(written, false, 3), [text(written)], "no tool was offered");
    }
}
