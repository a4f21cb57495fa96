//! Grammars of replies, for constraints: reasoning, then calls of tools, or text under another constraint.

use serde_json::Value;

use super::channels::{Marker, marker};
use super::rules::{MAX_BYTES, Refused, Rules, Tool, argument};
use super::template::{ChatOptions, GenerationPrompt, Thinking};
use crate::constraint::{Constraint, ConstraintLimits, Grammar, rewrite};
use crate::family;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Which calls a reply has.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallChoice {
    /// One or more, of any tools, and no text.
    Required,
    /// One, of any tool, and no text.
    One,
    /// One, of the tool with this name, and no text.
    Named(String),
    /// Any text and calls; those of the tools with these names have arguments under their schemas.
    Strict(Vec<String>),
    /// One or more, of any tools, and no text; or JSON under this schema.
    OrJson(String),
}

impl Constraint {
    /// Constrains replies to a prompt that was rendered with `options`: they have the calls that `choice` requires, in
    /// the syntax of the model's family, with arguments under the JSON schemas of the tools. Properties that a schema
    /// does not name are left out. With [`Thinking::On`], reasoning may come first; it must if the prompt opens it
    /// ([`ReasoningStart::Prompt`](super::ReasoningStart)).
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the tokenizer has no tokens of calls; [`Error::Argument`] if there is no tool, a tool
    /// has no name that a call can have or a schema that a call cannot follow, or none has the name in `choice`.
    pub fn tool_calls(tokenizer: &Tokenizer, options: &ChatOptions, choice: &CallChoice) -> Result<Self> {
        calls(tokenizer, options, choice, |_| Refused::Error)
    }

    /// As [`Constraint::tool_calls`], with wider schemas where they cannot be compiled: parts of the schemas of
    /// tools that `strict` does not name lose the keywords that llguidance does not implement, and what still
    /// cannot be compiled is any JSON of its type. Needs the cargo feature `constraint`, without which nothing
    /// is widened, and takes as long as compiling.
    ///
    /// # Errors
    /// As [`Constraint::tool_calls`].
    pub fn tool_calls_widened(
        tokenizer: &Tokenizer,
        options: &ChatOptions,
        choice: &CallChoice,
        strict: &[String],
    ) -> Result<Self> {
        let refused = |name: &String| if strict.contains(name) { Refused::Error } else { Refused::Widened };
        calls(tokenizer, options, choice, refused)
    }

    /// This constraint for replies to a prompt that was rendered with `options`: with
    /// [`Thinking::On`], reasoning may come first, if the tokenizer has the markers of Gemma 4's or Qwen3.5's
    /// reasoning; it does if the prompt opens it.
    ///
    /// # Errors
    /// If a schema is not valid JSON.
    pub fn after_reasoning(&self, tokenizer: &Tokenizer, options: &ChatOptions) -> Result<Self> {
        let Reasoning { start, rules } = reasoning(tokenizer, options);
        if start.is_empty() {
            return Ok(self.clone());
        }
        let reply = match &self.grammar {
            Grammar::JsonSchema(schema) => format!("%json {}", json_reply(schema, &self.limits)?),
            Grammar::Regex(expression) => format!("%lark {{\nstart: /{}/\n}}", between_slashes(expression)),
            Grammar::Lark(grammar) => format!("%lark {{\n{grammar}\n}}"),
        };
        let text = format!("start: {start}reply\nreply: {reply}\nTEXT: /(?s:.+)/\n{rules}");
        Ok(Self::lark(text).with_limits(self.limits.clone()))
    }
}

/// A regular expression as Lark reads it between slashes, and as llguidance writes one there that stands alone.
fn between_slashes(expression: &str) -> String {
    let (mut text, mut is_escaped) = (String::new(), false);
    for c in expression.chars() {
        let (needs_escape, written) = match c {
            '/' => (true, '/'),
            '\n' => (true, 'n'),
            '\r' => (true, 'r'),
            '\t' => (true, 't'),
            other => (false, other),
        };
        if needs_escape && !is_escaped {
            text.push('\\');
        }
        is_escaped = c == '\\' && !is_escaped;
        text.push(written);
    }
    text
}

/// # Errors
/// As [`Constraint::tool_calls`].
fn calls(
    tokenizer: &Tokenizer,
    options: &ChatOptions,
    choice: &CallChoice,
    refused: impl Fn(&String) -> Refused,
) -> Result<Constraint> {
    let syntax = family::call_syntax(tokenizer).ok_or_else(|| Error::Unsupported {
        path: None,
        what: "tool calls".into(),
        problem: "the checkpoint's tokenizer has no tokens of calls".into(),
    })?;
    let tools: Vec<_> = options.tools.iter().map(Tool::of).collect();
    tools.iter().try_for_each(Tool::check_name)?;
    if tools.is_empty() {
        return Err(argument("needs a tool"));
    }
    let named: Vec<&String> = match choice {
        CallChoice::Named(name) => vec![name],
        CallChoice::Strict(names) => names.iter().collect(),
        CallChoice::Required | CallChoice::One | CallChoice::OrJson(_) => tools.iter().map(|tool| &tool.name).collect(),
    };
    if let Some(name) = named.iter().find(|name| tools.iter().all(|tool| tool.name != ***name)) {
        return Err(argument(&format!("there is no tool {name:?}")));
    }
    let mut rules = Rules::new(syntax.json_options());
    let mut calls = Vec::new();
    for tool in &tools {
        if named.contains(&&tool.name) {
            rules.refused = refused(&tool.name);
            calls.push(syntax.call(tool, &mut rules)?);
        } else if matches!(choice, CallChoice::Strict(_)) {
            calls.push(syntax.free_call(tool));
        }
    }
    if let CallChoice::OrJson(schema) = choice {
        rules.of_json("json", &json_reply(schema, &ConstraintLimits::default())?);
    }
    if rules.is_full() {
        return Err(argument(&format!("their schemas make a grammar of more than {MAX_BYTES} bytes; simplify them")));
    }
    let reasoning = reasoning(tokenizer, options);
    let first = reasoning.start;
    let [open, close] = syntax.tokens();
    let some = format!("call ({} call)*", syntax.separator());
    let start = match choice {
        CallChoice::Required => format!("{first}{some}"),
        CallChoice::One | CallChoice::Named(_) => format!("{first}call"),
        CallChoice::Strict(_) => format!("(<[^{open}]> | call)*"),
        CallChoice::OrJson(_) => format!("{first}({some} | json)"),
    };
    let calls = calls.join(" | ");
    let rules = rules.text + reasoning.rules;
    Ok(Constraint::lark(format!("start: {start}\ncall: <[{open}]> ({calls}) <[{close}]>\nTEXT: /(?s:.+)/\n{rules}")))
}

/// The schema of a reply that is not a call, with the white space that JSON has under other constraints.
fn json_reply(schema: &str, limits: &ConstraintLimits) -> Result<Value> {
    limits.check_source(schema)?;
    rewrite::parse(schema).map(|schema| limits.with_options(schema))
}

/// Reasoning at the beginning of a reply: its item in the rule `start`, and the rules that it needs besides `TEXT`.
#[derive(Default)]
struct Reasoning {
    start: String,
    rules: &'static str,
}

fn reasoning(tokenizer: &Tokenizer, options: &ChatOptions) -> Reasoning {
    // None follows a text that is continued.
    let thinks = options.thinking == Thinking::On && options.generation_prompt != GenerationPrompt::Continue;
    if let (Some(open), Some(close)) = (marker(tokenizer, Marker::OpenChannel), marker(tokenizer, Marker::CloseChannel))
    {
        let start = format!("(<[{open}]> TEXT? <[{close}]>)? ");
        return if thinks { Reasoning { start, rules: "" } } else { Reasoning::default() };
    }
    let (Some(open), Some(close)) = (tokenizer.id("<think>"), tokenizer.id("</think>")) else {
        return Reasoning::default();
    };
    let is_control = tokenizer.is_control(close);
    match (options.prompt_opens_reasoning(), is_control) {
        (true, true) => Reasoning { start: format!("TEXT? <[{close}]> LINE_ENDS? "), rules: LINE_ENDS },
        (true, false) => Reasoning { start: "think LINE_ENDS? ".into(), rules: THINK },
        (false, _) if !thinks || options.generation_prompt == GenerationPrompt::Omit => Reasoning::default(),
        (false, true) => Reasoning { start: format!("(<[{open}]> TEXT? <[{close}]> LINE_ENDS?)? "), rules: LINE_ENDS },
        (false, false) => Reasoning { start: "(open_think LINE_ENDS?)? ".into(), rules: OPEN_THINK },
    }
}

/// What templates write after reasoning.
const LINE_ENDS: &str = "LINE_ENDS: /\\n{1,2}/\n";
const OPEN_THINK: &str = "open_think[suffix=\"</think>\"]: /<think>(?s:.*)/\nLINE_ENDS: /\\n{1,2}/\n";
const THINK: &str = "think[suffix=\"</think>\"]: /(?s:.*)/\nLINE_ENDS: /\\n{1,2}/\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_schemas_are_not_read() {
        let limits = ConstraintLimits { source_bytes: 20, ..ConstraintLimits::default() };
        json_reply(r#"{"type": "object"}"#, &limits).expect("a short one");
        let problem = json_reply(&"[".repeat(21), &limits).expect_err("a long one").to_string();
        assert!(problem.contains("has 21 bytes, at most 20 "), "{problem}");
    }
}
