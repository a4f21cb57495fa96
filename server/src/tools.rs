//! Tools, `tool_choice` and reasoning options, in the formats of the three APIs.

use foretoken::chat::{CallChoice, ChatOptions, Json, ReasoningStart, ReplyParser, Thinking};
use foretoken::{Engine, Stop};
use foretoken_tools::prompt::RESERVED;
use serde_json::{Value, json};

use crate::api_error::{ApiError, Result};
use crate::call_format::{CallFormat, DeclaredTool, strict_of};
use crate::defaults::GenerateDefaults;
use crate::fields::Fields;
use crate::structured::{Format, Structured};

/// Maximum tools of a request.
const MAX_TOOLS: usize = 1024;
/// Maximum variables of a request's template: each is compared with all others.
const MAX_VARIABLES: usize = 1024;

/// How many calls a reply may have.
#[derive(Clone, Copy, Default, PartialEq)]
pub(crate) enum Calls {
    #[default]
    Any,
    One,
}

impl Calls {
    /// Of one call: the text ends with the first token that ends a call, whether or not the call is well-formed.
    pub fn limit(self, engine: &Engine, stop: &mut Stop) {
        if self == Self::One {
            let tokenizer = engine.tokenizer().ok();
            let parser = tokenizer.map(|tokenizer| ReplyParser::new(tokenizer, &ChatOptions::default()));
            stop.tokens.extend(parser.and_then(|parser| parser.call_end()));
        }
    }
}

/// The tools of a request, and the calls that it requires.
#[derive(Default)]
pub(crate) struct Tools {
    pub list: Vec<Json>,
    /// For each of `list`.
    declared: Vec<DeclaredTool>,
    /// The calls that are required, if any.
    forced: Option<CallChoice>,
    pub calls: Calls,
}

impl Tools {
    fn add(&mut self, (json, tool): (Json, DeclaredTool)) {
        self.list.push(json);
        self.declared.push(tool);
    }

    /// Applies `tool_choice`. Without tools, no call can be required.
    fn choose(&mut self, fields: &Fields, choice: Choice, calls: Calls) -> Result<()> {
        let forced = match choice {
            Choice::None => {
                *self = Self::default();
                return Ok(());
            }
            Choice::Auto => None,
            Choice::Any if calls == Calls::One => Some(CallChoice::One),
            Choice::Any => Some(CallChoice::Required),
            Choice::Named(name) if self.declared.iter().all(|tool| tool.name != name) => {
                return Err(fields.error("tool_choice", "names a tool that is not in tools"));
            }
            Choice::Named(name) => Some(CallChoice::Named(name)),
        };
        if forced.is_some() && self.list.is_empty() {
            return Err(fields.error("tool_choice", "requires a tool call, but tools is empty"));
        }
        // Without tools there are no calls, and the token that ends one is text.
        (self.forced, self.calls) = (forced, if self.list.is_empty() { Calls::Any } else { calls });
        Ok(())
    }

    /// What the reply must match: the calls that are required, else calls or `format`, else the schemas of strict
    /// tools. Reasoning, if it is enabled, may come before that. `options` have the tools.
    ///
    /// # Errors
    /// If both calls and a format are required.
    pub fn constrain(self, options: &ChatOptions, format: Option<Format>) -> Result<Option<Structured>> {
        let Self { list, declared, forced, .. } = self;
        let is_free = match &format {
            None => !declared.iter().any(|tool| tool.is_strict),
            Some(_) if !list.is_empty() => false,
            Some(_) => options.thinking == Thinking::Off && options.reasoning_start != ReasoningStart::Prompt,
        };
        if forced.is_none() && is_free {
            return Ok(format.map(Structured::Format));
        }
        let choice = match (forced, &format) {
            (None, None) => Some(CallChoice::Strict(strict_of(&declared))),
            (Some(forced), None) => Some(forced),
            (Some(_), Some(_)) => {
                let problem = "requires a tool call, which cannot have a response format; omit one of them";
                return Err(ApiError::field("tool_choice", problem));
            }
            (None, Some(_)) if list.is_empty() => None,
            (None, Some((constraint, field))) => match constraint.schema() {
                Some(schema) => Some(CallChoice::OrJson(schema.to_owned())),
                None => return Err(ApiError::field(field, "cannot be combined with tools; omit one of them")),
            },
        };
        let calls = CallFormat { options: options.clone(), choice, declared, format };
        Ok(Some(Structured::Calls(Box::new(calls))))
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
    fields.check_count("tools", list.len(), "tools", MAX_TOOLS)?;
    Fields::each(list, fields.name("tools")).collect()
}

/// A tool in the format that templates expect.
fn tool(fields: &mut Fields, parameters: &str) -> Result<(Json, DeclaredTool)> {
    let name = fields.required("name")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if name.is_empty() || name.len() > 128 || !name.chars().all(plain) {
        return Err(fields.error("name", "must be 1 to 128 letters, digits, '_', '-' and '.'"));
    }
    let description = fields.string("description")?.unwrap_or_default();
    let schema = match fields.value(parameters) {
        None => json!({"type": "object", "properties": {}}),
        Some(schema @ Value::Object(_)) => schema,
        Some(_) => return Err(fields.error(parameters, "must be a JSON schema (an object)")),
    };
    let is_strict = fields.flag("strict")?.unwrap_or(false);
    fields.ignore(&["allowed_callers", "cache_control", "defer_loading"]);
    let tool = DeclaredTool { name: name.clone(), schema_field: fields.name(parameters), is_strict };
    let function = json!({"name": name, "description": description, "parameters": schema});
    let json = Json::of(&json!({"type": "function", "function": function}));
    Ok((json.map_err(|_| fields.error(parameters, "is nested too deeply"))?, tool))
}

/// Handling of OpenAI's tools that are not functions.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum OtherTools {
    Refused,
    /// They are not in the prompt. Coding agents (Codex) offer them beside functions, to every server.
    LeftOut,
}

/// Whether one of OpenAI's tools is a function, as far as it says what it is.
pub(crate) fn is_function(kind: Option<&Value>) -> bool {
    kind.and_then(Value::as_str).is_none_or(|kind| kind == "function")
}

/// Takes OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Chat completions have a tool in the field
/// `function`, responses have its fields beside `type`.
///
/// # Errors
/// If a tool is malformed or refused, or the choice names an unknown tool.
pub(crate) fn openai(fields: &mut Fields, others: OtherTools) -> Result<Tools> {
    let mut tools = Tools::default();
    for mut entry in list(fields)? {
        if others == OtherTools::LeftOut && !is_function(entry.peek("type")) {
            continue;
        }
        entry.only("type", &[json!("function")])?;
        match entry.object("function")? {
            Some(mut function) => {
                tools.add(tool(&mut function, "parameters")?);
                function.end()?;
                entry.ignore(&["cache_control"]);
            }
            None => tools.add(tool(&mut entry, "parameters")?),
        }
        entry.end()?;
    }
    let choice = openai_choice(fields)?;
    let calls = if fields.flag("parallel_tool_calls")? == Some(false) { Calls::One } else { Calls::Any };
    tools.choose(fields, choice, calls)?;
    Ok(tools)
}

fn openai_choice(fields: &mut Fields) -> Result<Choice> {
    let function = match fields.value("tool_choice") {
        None => return Ok(Choice::Auto),
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => return Ok(Choice::Auto),
            "none" => return Ok(Choice::None),
            "required" => return Ok(Choice::Any),
            _ => return Err(fields.error("tool_choice", "must be auto, none, required or a function")),
        },
        Some(function) => function,
    };
    let mut named = Fields::of(function, &fields.name("tool_choice"))?;
    named.only("type", &[json!("function")])?;
    let name = match named.object("function")? {
        Some(mut function) => {
            let name = function.required("name")?;
            function.end()?;
            name
        }
        None => named.required("name")?,
    };
    named.end()?;
    Ok(Choice::Named(name))
}

/// Takes Anthropic's `tools` and `tool_choice`.
///
/// # Errors
/// If a tool is malformed or one of Anthropic's own, or the choice names an unknown tool.
pub(crate) fn anthropic(fields: &mut Fields) -> Result<Tools> {
    let mut tools = Tools::default();
    for mut entry in list(fields)? {
        entry.only("type", &[json!("custom")])?;
        tools.add(tool(&mut entry, "input_schema")?);
        entry.ignore(&["eager_input_streaming", "input_examples"]);
        entry.end()?;
    }
    let Some(mut given) = fields.object("tool_choice")? else { return Ok(tools) };
    let choice = match given.string("type")?.as_deref() {
        Some("auto") => Choice::Auto,
        Some("none") => Choice::None,
        Some("any") => Choice::Any,
        Some("tool") => Choice::Named(given.required("name")?),
        _ => return Err(given.error("type", "must be one of auto, any, tool, none")),
    };
    let calls = if given.flag("disable_parallel_tool_use")? == Some(true) { Calls::One } else { Calls::Any };
    given.end()?;
    tools.choose(fields, choice, calls)?;
    Ok(tools)
}

/// Takes `reasoning_effort` and `chat_template_kwargs`: vLLM's and llama.cpp's variables of the template, beside those
/// of the server.
///
/// # Errors
/// If the effort is unknown, a variable is set by the server itself, or there are too many.
pub(crate) fn template_options(fields: &mut Fields, defaults: &GenerateDefaults) -> Result<ChatOptions> {
    let mut thinking = effort(fields, "reasoning_effort")?.unwrap_or(defaults.thinking);
    let mut variables = defaults.variables.clone();
    if let Some(mut given) = fields.object("chat_template_kwargs")? {
        match given.flag("enable_thinking")? {
            Some(true) => thinking = Thinking::On,
            Some(false) => thinking = Thinking::Off,
            None => {}
        }
        let given: Vec<_> = given.rest().collect();
        fields.check_count("chat_template_kwargs", given.len(), "variables", MAX_VARIABLES)?;
        for (name, value) in given {
            if RESERVED.contains(&name.as_str()) {
                return Err(
                    fields.error(&format!("chat_template_kwargs.{name}"), "cannot be set by requests; remove it")
                );
            }
            let value = Json::of(&value).map_err(|_| fields.error("chat_template_kwargs", "is nested too deeply"))?;
            variables.retain(|(default, _)| *default != name);
            variables.push((name, value));
        }
    }
    Ok(ChatOptions { thinking, variables, ..ChatOptions::default() })
}

/// Takes an effort, which turns reasoning on or off; it does not limit its length.
///
/// # Errors
/// If it is unknown.
pub(crate) fn effort(fields: &mut Fields, field: &str) -> Result<Option<Thinking>> {
    match fields.string(field)?.as_deref() {
        None => Ok(None),
        Some("none") => Ok(Some(Thinking::Off)),
        Some("minimal" | "low" | "medium" | "high" | "xhigh" | "max") => Ok(Some(Thinking::On)),
        Some(_) => Err(fields.error(field, "must be one of none, minimal, low, medium, high, xhigh, max")),
    }
}

/// Takes Anthropic's `thinking`, if it is there. A token budget is ignored.
///
/// # Errors
/// If its type is unknown.
pub(crate) fn anthropic_thinking(fields: &mut Fields) -> Result<Option<Thinking>> {
    let Some(mut given) = fields.object("thinking")? else { return Ok(None) };
    let thinking = match given.string("type")?.as_deref() {
        Some("disabled") => Thinking::Off,
        Some("enabled" | "adaptive") => Thinking::On,
        _ => return Err(given.error("type", "must be one of enabled, adaptive, disabled")),
    };
    given.count("budget_tokens", 0..=usize::MAX)?;
    given.ignore(&["display"]);
    given.end()?;
    Ok(Some(thinking))
}
