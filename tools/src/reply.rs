//! The output of a generation, printed as it arrives or collected.

use std::io::Write;

use anyhow::Result;
use foretoken::Piece;
use foretoken::chat::{ReplyParser, ReplyPart};

/// When the output is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Part by part.
    AsItArrives,
    /// By the caller.
    AtTheEnd,
}

/// The output; for a chat, parsed into text, reasoning and tool calls.
pub struct Reply {
    parser: Option<ReplyParser>,
    shown: Shown,
    /// Whether what was printed does not end with a line end.
    in_line: bool,
    /// The same of the reasoning.
    in_reasoning: bool,
    text: String,
    reasoning: String,
    calls: Vec<serde_json::Value>,
}

impl Reply {
    /// An empty output. Without a parser, everything is text.
    pub fn new(parser: Option<ReplyParser>, shown: Shown) -> Self {
        let (text, reasoning, calls) = (String::new(), String::new(), Vec::new());
        Self { parser, shown, in_line: false, in_reasoning: false, text, reasoning, calls }
    }

    /// Adds a piece.
    ///
    /// # Errors
    /// If stdout is closed.
    pub fn push(&mut self, piece: &Piece) -> Result<()> {
        let parts = match &mut self.parser {
            Some(parser) => parser.push(piece),
            None => vec![ReplyPart::Text(piece.text.clone())],
        };
        self.take(parts)
    }

    /// Adds what the parser held back, and ends the line of the reasoning.
    ///
    /// # Errors
    /// If stdout is closed.
    pub fn finish(&mut self) -> Result<()> {
        let parts = self.parser.as_mut().map(ReplyParser::finish).unwrap_or_default();
        self.take(parts)?;
        self.end_reasoning(&mut std::io::stderr());
        Ok(())
    }

    fn take(&mut self, parts: Vec<ReplyPart>) -> Result<()> {
        self.write(parts, &mut std::io::stdout().lock(), &mut std::io::stderr())
    }

    /// Text and tool calls (one per line) go to `out`, reasoning to `err`, in lines of its own.
    fn write(&mut self, parts: Vec<ReplyPart>, out: &mut impl Write, err: &mut impl Write) -> Result<()> {
        for part in parts {
            if !matches!(part, ReplyPart::Reasoning(_)) {
                self.end_reasoning(err);
            }
            match part {
                ReplyPart::Text(text) => {
                    if self.shown == Shown::AsItArrives {
                        write!(out, "{text}")?;
                        out.flush()?;
                        self.in_line = text.chars().next_back().map_or(self.in_line, |last| last != '\n');
                    }
                    self.text += &text;
                }
                ReplyPart::Reasoning(text) => {
                    if self.shown == Shown::AsItArrives {
                        // Failing to print it must not stop the command.
                        let _ = write!(err, "{text}");
                        self.in_reasoning = text.chars().next_back().map_or(self.in_reasoning, |last| last != '\n');
                    }
                    self.reasoning += &text;
                }
                ReplyPart::ToolCall(call) => {
                    let arguments: serde_json::Value = serde_json::from_str(&call.arguments.to_string())?;
                    let call = serde_json::json!({"name": call.name, "arguments": arguments});
                    if self.shown == Shown::AsItArrives {
                        let line_end = if std::mem::take(&mut self.in_line) { "\n" } else { "" };
                        writeln!(out, "{line_end}{call}")?;
                    }
                    self.calls.push(call);
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Ends the line of the reasoning: its parser drops the last line end.
    fn end_reasoning(&mut self, err: &mut impl Write) {
        if std::mem::take(&mut self.in_reasoning) {
            let _ = writeln!(err);
        }
    }

    /// The output as fields of a JSON object.
    pub fn json(&self, tokens: &[u32], load_seconds: f64) -> serde_json::Value {
        let mut own = serde_json::json!({"text": self.text, "tokens": tokens, "load_seconds": load_seconds});
        if !self.reasoning.is_empty() {
            own["reasoning"] = serde_json::json!(self.reasoning);
        }
        if !self.calls.is_empty() {
            own["tool_calls"] = serde_json::json!(self.calls);
        }
        own
    }
}

#[cfg(test)]
mod tests {
    use foretoken::chat::{Json, ToolCall};

    use super::*;

    #[test]
    fn calls_have_lines_of_their_own() {
        let arguments = Json::parse("{}").expect("JSON");
        let call = ReplyPart::ToolCall(ToolCall { id: None, name: "f".into(), arguments });
        let text = |text: &str| ReplyPart::Text(text.into());
        let parts = vec![text("a"), call.clone(), call.clone(), text("b\n"), text(""), call];
        let (mut reply, mut out) = (Reply::new(None, Shown::AsItArrives), Vec::new());
        reply.write(parts, &mut out, &mut std::io::sink()).expect("no error");
        let out = String::from_utf8(out).expect("a text");
        let are_calls: Vec<_> = out.lines().map(|line| line.starts_with('{')).collect();
        assert_eq!(are_calls, [false, true, true, false, true], "{out}");
    }

    /// Otherwise the text (on a terminal) or the next message on stderr (in a file) would continue its last line.
    #[test]
    fn reasoning_has_lines_of_its_own() {
        let reasoning = |text: &str| ReplyPart::Reasoning(text.into());
        let (mut reply, mut out, mut err) = (Reply::new(None, Shown::AsItArrives), Vec::new(), Vec::new());
        let parts = vec![reasoning("a"), reasoning("b"), ReplyPart::Text("c".into()), reasoning("d\n")];
        reply.write(parts, &mut out, &mut err).expect("no error");
        reply.write(vec![ReplyPart::Text("e".into()), reasoning("f")], &mut out, &mut err).expect("no error");
        reply.end_reasoning(&mut err);
        reply.end_reasoning(&mut err);
        assert_eq!([out, err].map(|bytes| String::from_utf8(bytes).expect("a text")), ["ce", "ab\nd\nf\n"]);
        let (mut reply, mut err) = (Reply::new(None, Shown::AtTheEnd), Vec::<u8>::new());
        let parts = vec![reasoning("a"), ReplyPart::Text("b".into())];
        reply.write(parts, &mut std::io::sink(), &mut err).expect("no error");
        assert!(err.is_empty());
    }
}
