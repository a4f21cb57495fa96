//! The tools that a chat offers, and whether the model thinks first, in the forms of the three APIs.

use foretoken::chat::{ChatOptions, Json, Message, Thinking};
use foretoken::{Engine, Stop};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::messages::required;

type Result<T> = std::result::Result<T, ApiError>;

/// A conversation, and what it is rendered with.
pub(crate) struct Chat {
    pub messages: Vec<Message>,
    pub options: ChatOptions,
}

/// Most tools of a request.
const MAX_TOOLS: usize = 1024;

/// How many calls a reply may have.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Calls {
    Any,
    One,
}

impl Calls {
    /// One call: the text ends behind it.
    pub fn limit(self, engine: &Engine, stop: &mut Stop) {
        let end = engine.tokenizer().ok().and_then(|tokenizer| tokenizer.id("<tool_call|>"));
        stop.tokens.extend(end.filter(|_| self == Calls::One));
    }
}

fn list(fields: &mut Fields) -> Result<Vec<Fields>> {
    let list = fields.list("tools")?.unwrap_or_default();
    if list.len() > MAX_TOOLS {
        return Err(fields.error("tools", format!("has {}, may have {MAX_TOOLS}", list.len())));
    }
    (0..).zip(list).map(|(i, tool)| Fields::of(tool, &format!("tools[{i}]"))).collect()
}

/// A tool in the form that templates take.
fn tool(fields: &mut Fields, parameters: &str) -> Result<Json> {
    let name = required(fields, "name")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.len() > 128 || !name.chars().all(plain) {
        return Err(fields.error("name", "must have 1 to 128 letters, digits, '_', '-' and '.'"));
    }
    let description = fields.string("description")?.unwrap_or_default();
    let schema = match fields.value(parameters) {
        None => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema,
        Some(_) => return Err(fields.error(parameters, "must be a JSON schema, an object")),
    };
    // Whether arguments must follow the schema: they are the model's.
    fields.ignore(&["strict"]);
    let tool =
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": schema}});
    Json::of(&tool).map_err(|_| fields.error(parameters, "nests too deeply"))
}

/// Takes OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Chat completions have a tool in the field `function`,
/// responses have its fields beside `type`.
///
/// # Errors
/// If a tool is malformed or no function, or a call is asked for.
pub(crate) fn openai(fields: &mut Fields) -> Result<(Vec<Json>, Calls)> {
    let mut tools = Vec::new();
    for mut entry in list(fields)? {
        entry.only("type", &[json!("function")])?;
        match entry.object("function")? {
            Some(mut function) => {
                tools.push(tool(&mut function, "parameters")?);
                function.end()?;
            }
            None => tools.push(tool(&mut entry, "parameters")?),
        }
        entry.end()?;
    }
    let choice = fields.value("tool_choice");
    let offered = match choice.as_ref().map(|choice| choice.as_str().unwrap_or_default()) {
        None | Some("auto") => true,
        Some("none") => false,
        Some(_) => {
            let problem = "is not implemented but for \"none\" and \"auto\": calls cannot be forced";
            return Err(fields.error("tool_choice", problem).with_code("unsupported_parameter"));
        }
    };
    let calls = if fields.flag("parallel_tool_calls")? == Some(false) { Calls::One } else { Calls::Any };
    Ok(if offered { (tools, calls) } else { (Vec::new(), Calls::Any) })
}

/// Takes Anthropic's `tools` and `tool_choice`.
///
/// # Errors
/// If a tool is malformed or Anthropic's own, or a call is asked for.
pub(crate) fn anthropic(fields: &mut Fields) -> Result<(Vec<Json>, Calls)> {
    let mut tools = Vec::new();
    for mut entry in list(fields)? {
        entry.only("type", &[json!("custom")])?;
        tools.push(tool(&mut entry, "input_schema")?);
        entry.ignore(&["cache_control"]);
        entry.end()?;
    }
    let Some(mut choice) = fields.object("tool_choice")? else { return Ok((tools, Calls::Any)) };
    let offered = match choice.string("type")?.as_deref() {
        Some("auto") => true,
        Some("none") => false,
        _ => {
            let problem = "is not implemented but for \"none\" and \"auto\": calls cannot be forced";
            return Err(choice.error("type", problem).with_code("unsupported_parameter"));
        }
    };
    let calls = if choice.flag("disable_parallel_tool_use")? == Some(true) { Calls::One } else { Calls::Any };
    choice.end()?;
    Ok(if offered { (tools, calls) } else { (Vec::new(), Calls::Any) })
}

/// Takes `reasoning_effort` and `chat_template_kwargs`: vLLM's and llama.cpp's variables of the template. An effort says whether
/// the model thinks; how much is the model's own.
///
/// # Errors
/// If the effort is unknown, or a variable is one that the template has by itself.
pub(crate) fn thinking(fields: &mut Fields) -> Result<ChatOptions> {
    let effort = fields.string("reasoning_effort")?;
    let mut thinking = match effort.as_deref() {
        None => Thinking::Off,
        Some(effort) => thinking_of(effort).ok_or_else(|| fields.error("reasoning_effort", UNKNOWN_EFFORT))?,
    };
    let mut variables = Vec::new();
    if let Some(mut given) = fields.object("chat_template_kwargs")? {
        match given.flag("enable_thinking")? {
            Some(true) => thinking = Thinking::On,
            Some(false) => thinking = Thinking::Off,
            None => {}
        }
        for (name, value) in given.rest() {
            if ["messages", "tools", "add_generation_prompt", "strftime_now"].contains(&name.as_str()) {
                return Err(fields.error(&format!("chat_template_kwargs.{name}"), "is not for requests; leave it out"));
            }
            let value = Json::of(&value).map_err(|_| fields.error("chat_template_kwargs", "nests too deeply"))?;
            variables.push((name, value));
        }
    }
    Ok(ChatOptions { thinking, variables, ..ChatOptions::default() })
}

pub(crate) const UNKNOWN_EFFORT: &str = "is unknown; there are none, minimal, low, medium, high and xhigh";

/// What an effort says.
pub(crate) fn thinking_of(effort: &str) -> Option<Thinking> {
    match effort {
        "none" => Some(Thinking::Off),
        "minimal" | "low" | "medium" | "high" | "xhigh" => Some(Thinking::On),
        _ => None,
    }
}

/// Takes Anthropic's `thinking`. A budget of tokens is taken, and not kept to.
///
/// # Errors
/// If its type is unknown.
pub(crate) fn anthropic_thinking(fields: &mut Fields) -> Result<Thinking> {
    let Some(mut given) = fields.object("thinking")? else { return Ok(Thinking::Off) };
    let thinking = match given.string("type")?.as_deref() {
        Some("disabled") => Thinking::Off,
        Some("enabled" | "adaptive") => Thinking::On,
        _ => return Err(given.error("type", "is unknown; there are enabled, adaptive and disabled")),
    };
    given.count("budget_tokens", 0..=usize::MAX)?;
    given.ignore(&["display"]);
    given.end()?;
    Ok(thinking)
}
