//! Messages of a conversation.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::json::Json;
use crate::{Error, Result};

/// The role of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The same, under the name used by some templates.
    Developer,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a tool.
    Tool,
}

const ROLES: [(&str, Role); 5] = [
    ("system", Role::System),
    ("developer", Role::Developer),
    ("user", Role::User),
    ("assistant", Role::Assistant),
    ("tool", Role::Tool),
];

impl Role {
    fn name(self) -> &'static str {
        ROLES.iter().find(|(_, role)| *role == self).map_or("", |(name, _)| name)
    }
}

/// A message's content.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A text.
    Text(String),
    /// Parts, which templates may treat differently from one text.
    Parts(Vec<Part>),
}

/// A part of a message's content. Images, audio and video are not supported.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Part {
    /// A text.
    Text(String),
}

impl<T: Into<String>> From<T> for Content {
    fn from(text: T) -> Self {
        Content::Text(text.into())
    }
}

/// A tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// Its id, repeated by the result.
    pub id: Option<String>,
    /// The tool.
    pub name: String,
    /// Its arguments, an object.
    pub arguments: Json,
}

/// A chat message, for example `Message::user("Hello")`.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Its role.
    pub role: Role,
    /// Its content.
    pub content: Content,
    /// The reasoning before the content, for assistant messages. Templates see it as `reasoning`,
    /// `reasoning_content` and `thinking`. Default: none.
    pub reasoning: Option<String>,
    /// The tool calls. Default: none.
    pub tool_calls: Vec<ToolCall>,
    /// For a tool's result: the id of the call. Default: none.
    pub tool_call_id: Option<String>,
    /// For a tool's result: the tool; otherwise the author. Default: none.
    pub name: Option<String>,
    /// Further fields that a template reads. Default: none.
    pub extra: Vec<(String, Json)>,
}

impl Message {
    /// A message with only a content.
    pub fn new(role: Role, content: impl Into<Content>) -> Self {
        let (content, extra) = (content.into(), Vec::new());
        Self { role, content, reasoning: None, tool_calls: Vec::new(), tool_call_id: None, name: None, extra }
    }

    /// Instructions for the whole conversation.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::new(Role::System, content)
    }

    /// A user message.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::new(Role::User, content)
    }

    /// An assistant message.
    pub fn assistant(content: impl Into<Content>) -> Self {
        Self::new(Role::Assistant, content)
    }

    /// The result of the call `id` of the tool `name`.
    pub fn tool(id: impl Into<String>, name: impl Into<String>, content: impl Into<Content>) -> Self {
        Self { tool_call_id: Some(id.into()), name: Some(name.into()), ..Self::new(Role::Tool, content) }
    }

    /// Parses a JSON list of messages in the format of OpenAI's chat completions and transformers'
    /// `apply_chat_template`: `role`, `content` (a text, null, or parts of the type `text`), `reasoning` (or
    /// `reasoning_content`, `thinking`), `tool_calls`, `tool_call_id`, `name`; other fields become [`Message::extra`].
    /// A call's arguments given as the text of an object become that object.
    ///
    /// # Errors
    /// If it is malformed; the error names the type of a part that is not text.
    pub fn list(json: &Json) -> Result<Vec<Self>> {
        if json.0.kind() != ValueKind::Seq {
            return Err(Error::argument("messages", "must be a list of objects with role and content"));
        }
        (0..).zip(items(&json.0)).map(|(i, message)| read(&message, &format!("[{i}]"))).collect()
    }

    /// The value that templates see.
    pub(super) fn value(&self) -> Value {
        let text = |text: &str| Value::from(text);
        let content = match &self.content {
            Content::Text(content) => text(content),
            Content::Parts(parts) => parts
                .iter()
                .map(|Part::Text(part)| Value::from_pairs([("type", text("text")), ("text", text(part))]))
                .collect(),
        };
        let mut fields = vec![("role", text(self.role.name())), ("content", content)];
        if let Some(reasoning) = &self.reasoning {
            fields.extend(REASONING.map(|name| (name, text(reasoning))));
        }
        if !self.tool_calls.is_empty() {
            fields.push(("tool_calls", self.tool_calls.iter().map(ToolCall::value).collect()));
        }
        fields.extend(self.tool_call_id.iter().map(|id| ("tool_call_id", text(id))));
        fields.extend(self.name.iter().map(|name| ("name", text(name))));
        fields.extend(self.extra.iter().map(|(name, Json(value))| (name.as_str(), value.clone())));
        Value::from_pairs(fields)
    }
}

impl ToolCall {
    fn value(&self) -> Value {
        let function =
            Value::from_pairs([("name", self.name.as_str().into()), ("arguments", self.arguments.0.clone())]);
        let id = self.id.iter().map(|id| ("id", Value::from(id)));
        Value::from_pairs(id.chain([("type", "function".into()), ("function", function)]))
    }
}

/// Names of the reasoning in messages; templates read one of them.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

fn malformed(at: &str, problem: impl std::fmt::Display) -> Error {
    Error::argument("messages", format!("{at}: {problem}"))
}

fn items(list: &Value) -> impl Iterator<Item = Value> {
    list.try_iter().into_iter().flatten()
}

/// The field of an object; `None` if it is missing or null.
fn field(object: &Value, name: &str) -> Option<Value> {
    object.get_attr(name).ok().filter(|value| !value.is_undefined() && !value.is_none())
}

fn string(object: &Value, name: &str, at: &str) -> Result<Option<String>> {
    let Some(value) = field(object, name) else { return Ok(None) };
    value
        .as_str()
        .map(|text| Some(text.to_owned()))
        .ok_or_else(|| malformed(&format!("{at}.{name}"), "is not a string"))
}

fn read(message: &Value, at: &str) -> Result<Message> {
    if message.kind() != ValueKind::Map {
        return Err(malformed(at, "is not an object"));
    }
    let name = string(message, "role", at)?.unwrap_or_default();
    let known = ROLES.iter().find(|(known, _)| *known == name);
    let names = ROLES.map(|(name, _)| name).join(", ");
    let role = known.ok_or_else(|| malformed(&format!("{at}.role"), format!("is {name:?}, must be one of {names}")))?.1;
    let reasoning = REASONING.into_iter().map(|name| string(message, name, at)).find(|text| !matches!(text, Ok(None)));
    let calls = field(message, "tool_calls");
    if calls.as_ref().is_some_and(|calls| calls.kind() != ValueKind::Seq) {
        return Err(malformed(&format!("{at}.tool_calls"), "is not a list"));
    }
    let calls = calls.iter().flat_map(items).enumerate();
    let extra = items(message).filter_map(|key| {
        let own = ["role", "content", "tool_calls", "tool_call_id", "name"].into_iter().chain(REASONING);
        let name = key.as_str().filter(|name| !own.clone().any(|own| own == *name))?;
        Some((name.to_owned(), Json(message.get_attr(name).ok()?)))
    });
    Ok(Message {
        role,
        content: content(message, at)?,
        reasoning: reasoning.transpose()?.flatten(),
        tool_calls: calls.map(|(i, call)| tool_call(&call, &format!("{at}.tool_calls[{i}]"))).collect::<Result<_>>()?,
        tool_call_id: string(message, "tool_call_id", at)?,
        name: string(message, "name", at)?,
        extra: extra.collect(),
    })
}

fn content(message: &Value, at: &str) -> Result<Content> {
    let at = format!("{at}.content");
    let Some(content) = field(message, "content") else { return Ok(Content::Text(String::new())) };
    if let Some(text) = content.as_str() {
        return Ok(text.into());
    }
    if content.kind() != ValueKind::Seq {
        return Err(malformed(&at, "is neither a string nor a list of parts"));
    }
    let part = |(i, part): (usize, Value)| {
        let at = format!("{at}[{i}]");
        match string(&part, "type", &at)?.as_deref() {
            Some("text") => match string(&part, "text", &at)? {
                Some(text) => Ok(Part::Text(text)),
                None => Err(malformed(&at, "has no text")),
            },
            kind => {
                let problem = format!("a part of type {:?} is not implemented; use text", kind.unwrap_or("none"));
                Err(malformed(&at, problem))
            }
        }
    };
    items(&content).enumerate().map(part).collect::<Result<_>>().map(Content::Parts)
}

fn tool_call(call: &Value, at: &str) -> Result<ToolCall> {
    let function = field(call, "function").unwrap_or_else(|| call.clone());
    let name = string(&function, "name", at)?.ok_or_else(|| malformed(at, "has no name"))?;
    let arguments = field(&function, "arguments").unwrap_or_else(|| Value::from_pairs(Vec::<(&str, Value)>::new()));
    let spelled = arguments.as_str().and_then(|text| Json::parse(text).ok()).filter(Json::is_object);
    Ok(ToolCall { id: string(call, "id", at)?, name, arguments: spelled.unwrap_or(Json(arguments)) })
}
