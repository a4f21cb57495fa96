//! The tools that a chat offers, and whether the model thinks first, in the forms of the three APIs.

use foretoken::chat::{CallChoice, ChatOptions, Json, Thinking};
use foretoken::{Constraint, Engine, Stop};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::messages::required;
use crate::structured::Structured;

type Result<T> = std::result::Result<T, ApiError>;

/// Most tools of a request.
const MAX_TOOLS: usize = 1024;

/// How many calls a reply may have.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum Calls {
    #[default]
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

/// The tools of a request, and the calls that it asks for.
#[derive(Default)]
pub(crate) struct Tools {
    pub list: Vec<Json>,
    /// Of each tool: its name, the field of its schema, and whether its arguments must follow that.
    given: Vec<Given>,
    /// The calls that the reply must have, if any.
    forced: Option<CallChoice>,
    pub calls: Calls,
}

struct Given {
    name: String,
    schema_field: String,
    is_strict: bool,
}

impl Tools {
    fn add(&mut self, (tool, given): (Json, Given)) {
        self.list.push(tool);
        self.given.push(given);
    }

    /// As `tool_choice` says: without tools, no call can be asked for.
    fn choose(&mut self, fields: &Fields, choice: Choice, calls: Calls) -> Result<()> {
        let forced = match choice {
            Choice::None => {
                *self = Self::default();
                return Ok(());
            }
            Choice::Auto => None,
            Choice::Any if calls == Calls::One => Some(CallChoice::One),
            Choice::Any => Some(CallChoice::Required),
            Choice::Named(name) if self.given.iter().all(|tool| tool.name != name) => {
                return Err(fields.error("tool_choice", "names no tool of the request"));
            }
            Choice::Named(name) => Some(CallChoice::Named(name)),
        };
        if forced.is_some() && self.list.is_empty() {
            return Err(fields.error("tool_choice", "asks for a call, and there are no tools; give some"));
        }
        (self.forced, self.calls) = (forced, calls);
        Ok(())
    }

    /// What the reply must match: the calls that are asked for, else what `structured` says, else calls of strict tools.
    /// `options` have the tools.
    ///
    /// # Errors
    /// If both are asked for, or the checkpoint has no calls.
    pub fn constrain(self, engine: &Engine, options: &ChatOptions, structured: Structured) -> Result<Structured> {
        let strict = || self.given.iter().filter(|tool| tool.is_strict).map(|tool| tool.name.clone()).collect();
        let choice = match (self.forced, structured.constraint.is_some()) {
            (Some(_), true) => {
                return Err(ApiError::field(
                    "tool_choice",
                    "asks for a call, which is no text of the format asked for",
                ));
            }
            (None, true) => return Ok(structured),
            (Some(forced), false) => forced,
            (None, false) => CallChoice::Strict(strict()),
        };
        let may_be_none = match &choice {
            CallChoice::Strict(names) if names.is_empty() => return Ok(structured),
            choice => matches!(choice, CallChoice::Strict(_)),
        };
        let tokenizer = engine.tokenizer().map_err(|error| ApiError::of(&error, "tools"))?;
        match Constraint::tool_calls(tokenizer, options, &choice) {
            // A checkpoint that has no calls makes none that its tools do not allow.
            Err(foretoken::Error::Unsupported { .. }) if may_be_none => Ok(structured),
            Err(error @ foretoken::Error::Unsupported { .. }) => {
                Err(ApiError::field("tool_choice", error.to_string()).with_code("unsupported_parameter"))
            }
            Err(error) => Err(ApiError::of(&error, "tools")),
            Ok(constraint) => {
                let of_tool = |(tool, given): (Json, Given)| {
                    let schema = tool.field("function")?.field("parameters")?.to_string();
                    let is_used = match &choice {
                        CallChoice::Strict(_) => given.is_strict,
                        CallChoice::Named(name) => given.name == *name,
                        _ => true,
                    };
                    is_used.then(|| (Constraint::json_schema(schema), given.schema_field))
                };
                let parts = self.list.into_iter().zip(self.given).filter_map(of_tool).collect();
                Ok(Structured::of_calls(constraint, parts))
            }
        }
    }
}

/// What `tool_choice` says.
enum Choice {
    Auto,
    None,
    Any,
    Named(String),
}

fn list(fields: &mut Fields) -> Result<Vec<Fields>> {
    let list = fields.list("tools")?.unwrap_or_default();
    if list.len() > MAX_TOOLS {
        return Err(fields.error("tools", format!("has {}, may have {MAX_TOOLS}", list.len())));
    }
    (0..).zip(list).map(|(i, tool)| Fields::of(tool, &format!("tools[{i}]"))).collect()
}

/// A tool in the form that templates take.
fn tool(fields: &mut Fields, parameters: &str) -> Result<(Json, Given)> {
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
    let is_strict = fields.flag("strict")?.unwrap_or(false);
    let given = Given { name: name.clone(), schema_field: fields.name(parameters), is_strict };
    let tool =
        json!({"type": "function", "function": {"name": name, "description": description, "parameters": schema}});
    let tool = Json::of(&tool).map_err(|_| fields.error(parameters, "nests too deeply"))?;
    Ok((tool, given))
}

/// Takes OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Chat completions have a tool in the field `function`,
/// responses have its fields beside `type`.
///
/// # Errors
/// If a tool is malformed or no function, or the choice is none of the tools.
pub(crate) fn openai(fields: &mut Fields) -> Result<Tools> {
    let mut tools = Tools::default();
    for mut entry in list(fields)? {
        entry.only("type", &[json!("function")])?;
        match entry.object("function")? {
            Some(mut function) => {
                tools.add(tool(&mut function, "parameters")?);
                function.end()?;
            }
            None => tools.add(tool(&mut entry, "parameters")?),
        }
        entry.end()?;
    }
    let choice = match fields.value("tool_choice") {
        None => Choice::Auto,
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => Choice::Auto,
            "none" => Choice::None,
            "required" => Choice::Any,
            _ => return Err(fields.error("tool_choice", "is unknown; there are auto, none, required and a function")),
        },
        Some(function) => {
            let mut named = Fields::of(function, &fields.name("tool_choice"))?;
            named.only("type", &[json!("function")])?;
            let name = match named.object("function")? {
                Some(mut function) => {
                    let name = required(&mut function, "name")?;
                    function.end()?;
                    name
                }
                None => required(&mut named, "name")?,
            };
            named.end()?;
            Choice::Named(name)
        }
    };
    let calls = if fields.flag("parallel_tool_calls")? == Some(false) { Calls::One } else { Calls::Any };
    tools.choose(fields, choice, calls)?;
    Ok(tools)
}

/// Takes Anthropic's `tools` and `tool_choice`.
///
/// # Errors
/// If a tool is malformed or Anthropic's own, or the choice is none of the tools.
pub(crate) fn anthropic(fields: &mut Fields) -> Result<Tools> {
    let mut tools = Tools::default();
    for mut entry in list(fields)? {
        entry.only("type", &[json!("custom")])?;
        tools.add(tool(&mut entry, "input_schema")?);
        entry.ignore(&["cache_control"]);
        entry.end()?;
    }
    let Some(mut given) = fields.object("tool_choice")? else { return Ok(tools) };
    let choice = match given.string("type")?.as_deref() {
        Some("auto") => Choice::Auto,
        Some("none") => Choice::None,
        Some("any") => Choice::Any,
        Some("tool") => Choice::Named(required(&mut given, "name")?),
        _ => return Err(given.error("type", "is missing or unknown; there are auto, any, tool and none")),
    };
    let calls = if given.flag("disable_parallel_tool_use")? == Some(true) { Calls::One } else { Calls::Any };
    given.end()?;
    tools.choose(fields, choice, calls)?;
    Ok(tools)
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
