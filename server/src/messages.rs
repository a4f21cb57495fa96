//! The messages of a chat in OpenAI's and Anthropic's formats, with tool calls and their results.

use std::collections::HashMap;

use foretoken::chat::{Content, GenerationPrompt, Json, Message, Role, ToolCall};
use serde_json::{Value, json};

use crate::api_error::{ApiError, Result};
use crate::fields::Fields;

/// Messages, and the tool calls in them, to which results may refer.
#[derive(Default)]
pub(crate) struct Conversation {
    messages: Vec<Message>,
    /// Names of the called tools, by the calls' ids.
    calls: HashMap<String, String>,
    /// Of the model's next message.
    reasoning: Option<String>,
}

impl Conversation {
    pub fn push(&mut self, mut message: Message) {
        let reasoning = self.reasoning.take();
        if message.role == Role::Assistant {
            message.reasoning = message.reasoning.or(reasoning);
        }
        // Templates have one system message, and refuse another.
        if let (Role::System, Content::Text(text)) = (message.role, &message.content)
            && let Some(Message { role: Role::System, content: Content::Text(before), .. }) = self.messages.last_mut()
        {
            before.push_str("\n\n");
            before.push_str(text);
            return;
        }
        self.messages.push(message);
    }

    /// Adds to the reasoning that precedes the model's next message or call.
    pub fn reason(&mut self, text: &str) {
        append(&mut self.reasoning, text);
    }

    /// Adds a call to the model's last message, or to a new one.
    pub fn call(&mut self, call: ToolCall) {
        self.calls.extend(call.id.clone().map(|id| (id, call.name.clone())));
        match self.messages.last_mut().filter(|last| last.role == Role::Assistant) {
            Some(last) => {
                if let Some(text) = self.reasoning.take() {
                    append(&mut last.reasoning, &text);
                }
                last.tool_calls.push(call);
            }
            None => self.push(Message { tool_calls: vec![call], ..Message::assistant("") }),
        }
    }

    /// Adds the result of the call `id`, which is the field `name`.
    ///
    /// # Errors
    /// If there is no such call before it.
    pub fn result(&mut self, id: String, content: String, name: &str) -> Result<()> {
        let Some(tool) = self.calls.get(&id) else {
            return Err(ApiError::field(name, "does not match the id of a tool call in an earlier message"));
        };
        // Templates look for results right after the message with the calls: others of the model between are part of it.
        while let [.., before, last] = &*self.messages
            && last.role == Role::Assistant
            && !before.tool_calls.is_empty()
            && let Some(last) = self.messages.pop()
            && let Some(before) = self.messages.last_mut()
        {
            join(before, last);
        }
        self.messages.push(Message::tool(id, tool, content));
        Ok(())
    }

    pub fn into_messages(self) -> Vec<Message> {
        self.messages
    }
}

/// Adds a message of the model to the one before it.
fn join(last: &mut Message, message: Message) {
    if let Some(reasoning) = message.reasoning {
        append(&mut last.reasoning, &reasoning);
    }
    if let (Content::Text(text), Content::Text(more)) = (&mut last.content, message.content) {
        text.push_str(&more);
    }
    last.tool_calls.extend(message.tool_calls);
}

/// Adds to a text that may not have begun.
fn append(to: &mut Option<String>, text: &str) {
    to.get_or_insert_default().push_str(text);
}

/// Takes `messages`, an array with at least one.
fn messages(fields: &mut Fields) -> Result<impl Iterator<Item = Result<Fields>> + use<>> {
    match fields.list("messages")? {
        None => Err(fields.error("messages", "is required; give at least one message")),
        Some(list) if list.is_empty() => Err(fields.error("messages", "is empty; give at least one message")),
        Some(list) => Ok(Fields::each(list, fields.name("messages"))),
    }
}

/// The messages of OpenAI's chat completions.
///
/// # Errors
/// If one is malformed, or the result of an unknown call.
pub(crate) fn openai(fields: &mut Fields) -> Result<Vec<Message>> {
    let mut conversation = Conversation::default();
    for message in messages(fields)? {
        openai_message(message?, &mut conversation)?;
    }
    Ok(conversation.into_messages())
}

/// Takes vLLM's `add_generation_prompt` and `continue_final_message`.
///
/// # Errors
/// If both are true.
pub(crate) fn generation_prompt(fields: &mut Fields) -> Result<GenerationPrompt> {
    let adds = fields.flag("add_generation_prompt")?;
    let continues = fields.flag("continue_final_message")?.unwrap_or(false);
    match (continues, adds) {
        (true, Some(true)) => {
            let problem = "cannot be combined with add_generation_prompt: true; omit one of them";
            Err(fields.error("continue_final_message", problem))
        }
        (true, _) => Ok(GenerationPrompt::Continue),
        (false, Some(false)) => Ok(GenerationPrompt::Omit),
        (false, _) => Ok(GenerationPrompt::Add),
    }
}

fn openai_message(mut fields: Fields, conversation: &mut Conversation) -> Result<()> {
    let role = match fields.string("role")?.as_deref() {
        Some("system" | "developer") => Role::System,
        Some("user") => Role::User,
        Some("assistant") => Role::Assistant,
        Some("tool") => Role::Tool,
        Some(_) => {
            let problem = "must be one of system, developer, user, assistant, tool";
            return Err(fields.error("role", problem));
        }
        None => return Err(fields.error("role", "is required: system, developer, user, assistant or tool")),
    };
    let content = text_of(&mut fields, "content")?;
    fields.ignore(&["cache_control", "name"]);
    if role == Role::Assistant {
        let mut reasoning = None;
        for name in ["reasoning_content", "reasoning"] {
            reasoning = reasoning.or(fields.string(name)?);
        }
        let calls = fields.list("tool_calls")?.unwrap_or_default();
        if content.is_none() && calls.is_empty() {
            return Err(fields.error("content", "is required, or tool_calls"));
        }
        // Fields that clients send back from the replies of other services.
        fields.ignore(&["refusal", "annotations", "audio", "id", "parsed"]);
        fields.ignore(&["provider_specific_fields", "reasoning_details", "thinking_blocks"]);
        conversation.push(Message { reasoning, ..Message::assistant(content.unwrap_or_default()) });
        for call in Fields::each(calls, fields.name("tool_calls")) {
            conversation.call(openai_call(call?)?);
        }
        return fields.end();
    }
    fields.only("tool_calls", &[json!([])])?;
    let content = content.ok_or_else(|| fields.error("content", "is required"))?;
    if role == Role::Tool {
        let id = fields.required("tool_call_id")?;
        conversation.result(id, content, &fields.name("tool_call_id"))?;
    } else {
        conversation.push(Message::new(role, content));
    }
    fields.end()
}

fn openai_call(mut fields: Fields) -> Result<ToolCall> {
    let id = fields.string("id")?;
    fields.only("type", &[json!("function")])?;
    fields.ignore(&["index"]);
    let mut function = fields.object("function")?.ok_or_else(|| fields.error("function", "is required"))?;
    let call = ToolCall { id, ..function_call(&mut function)? };
    function.end()?;
    fields.end()?;
    Ok(call)
}

/// Takes `name` and `arguments`, the JSON text of an object.
pub(crate) fn function_call(fields: &mut Fields) -> Result<ToolCall> {
    let name = fields.required("name")?;
    fields.ignore(&["parsed_arguments"]); // of OpenAI's client
    let spelled = fields.string("arguments")?.filter(|text| !text.trim().is_empty());
    let arguments =
        Json::parse(spelled.as_deref().unwrap_or("{}")).ok().filter(|json| json.clone().into_fields().is_ok());
    let arguments = arguments.ok_or_else(|| fields.error("arguments", "must be a string with a JSON object"))?;
    Ok(ToolCall { id: None, name, arguments })
}

/// The messages of Anthropic's API. The last one is continued if it is the model's.
///
/// # Errors
/// If one is malformed, or the result of an unknown call.
pub(crate) fn anthropic(fields: &mut Fields) -> Result<(Vec<Message>, GenerationPrompt)> {
    let mut conversation = Conversation::default();
    if let Some(system) = text_of(fields, "system")? {
        conversation.push(Message::system(without_billing_header(&system)));
    }
    for message in messages(fields)? {
        let mut message = message?;
        let role = match message.string("role")?.as_deref() {
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("system") => Role::System,
            Some(_) => return Err(message.error("role", "must be user or assistant")),
            None => return Err(message.error("role", "is required: user or assistant")),
        };
        if message.peek("content").is_some_and(Value::is_array) {
            let blocks = message.list("content")?.unwrap_or_default();
            if blocks.is_empty() && role != Role::Assistant {
                return Err(message.error("content", "is empty; give at least one block"));
            }
            let blocks = Fields::each(blocks, message.name("content")).collect::<Result<Vec<_>>>()?;
            anthropic_blocks(role, blocks, &mut conversation)?;
        } else {
            let text = text_of(&mut message, "content")?;
            let text = text.ok_or_else(|| message.error("content", "is required: a string or an array of blocks"))?;
            conversation.push(Message::new(role, text));
        }
        message.end()?;
    }
    let messages = conversation.into_messages();
    let continues = messages.last().is_some_and(|message| message.role == Role::Assistant);
    Ok((messages, if continues { GenerationPrompt::Continue } else { GenerationPrompt::Add }))
}

/// A system prompt without the header of `key=value;` fields that Claude Code puts before it: one of them changes with
/// every request, so that no cached prefix would go beyond it.
fn without_billing_header(system: &str) -> &str {
    let Some(mut rest) = system.strip_prefix("x-anthropic-billing-header:") else { return system };
    loop {
        let (field, after) = rest.split_once(';').unwrap_or((rest, ""));
        let field = field.trim();
        if !field.contains('=') || field.contains(char::is_whitespace) {
            return rest.trim_start();
        }
        rest = after;
    }
}

fn anthropic_blocks(role: Role, blocks: Vec<Fields>, conversation: &mut Conversation) -> Result<()> {
    let (mut text, mut reasoning, mut calls) = (None, None, Vec::new());
    for mut block in blocks {
        block.ignore(&["cache_control"]);
        match (block.string("type")?.as_deref().unwrap_or_default(), role) {
            ("text", _) => {
                append(&mut text, &block.required("text")?);
                block.ignore(&["citations"]);
            }
            ("thinking", Role::Assistant) => {
                append(&mut reasoning, &block.required("thinking")?);
                block.ignore(&["signature"]);
            }
            ("redacted_thinking", Role::Assistant) => block.ignore(&["data"]),
            ("tool_use", Role::Assistant) => calls.push(tool_use(&mut block)?),
            ("tool_result", Role::User) => {
                let id = block.required("tool_use_id")?;
                let content = text_of(&mut block, "content")?.unwrap_or_default();
                let content = if block.flag("is_error")? == Some(true) { format!("error: {content}") } else { content };
                conversation.result(id, content, &block.name("tool_use_id"))?;
            }
            (kind, role) => {
                let supported = match role {
                    Role::Assistant => "text, thinking, redacted_thinking, tool_use",
                    Role::User => "text, tool_result",
                    _ => "text",
                };
                let role = format!("{role:?}").to_lowercase();
                let problem =
                    format!("{:?} is not supported in a message of role {role}, only {supported}", shown(kind));
                return Err(block.error("type", problem));
            }
        }
        block.end()?;
    }
    if text.is_some() || role == Role::Assistant {
        conversation.push(Message { reasoning, ..Message::new(role, text.unwrap_or_default()) });
    }
    calls.into_iter().for_each(|call| conversation.call(call));
    Ok(())
}

fn tool_use(block: &mut Fields) -> Result<ToolCall> {
    let input = block.value("input").unwrap_or_else(|| json!({}));
    if !input.is_object() {
        return Err(block.mismatch("input", &input, "an object"));
    }
    let arguments = Json::of(&input).map_err(|_| block.error("input", "is nested too deeply"))?;
    let (id, name) = (block.required("id")?, block.required("name")?);
    block.ignore(&["caller"]);
    Ok(ToolCall { id: Some(id), name, arguments })
}

/// The start of a client's text, for errors.
fn shown(text: &str) -> String {
    text.chars().take(32).filter(|c| !c.is_control()).collect()
}

/// A text: a string, or an array of parts, which are concatenated.
pub(crate) fn text_of(fields: &mut Fields, name: &str) -> Result<Option<String>> {
    match fields.value(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(Value::Array(parts)) => {
            let (mut joined, mut on_own_line) = (String::new(), false);
            for part in Fields::each(parts, fields.name(name)) {
                let (is_reference, text) = text_part(part?)?;
                if !joined.is_empty() && (is_reference || on_own_line) {
                    joined.push('\n');
                }
                joined += &text;
                on_own_line = is_reference;
            }
            Ok(Some(joined))
        }
        Some(other) => Err(fields.mismatch(name, &other, "a string or an array of text parts")),
    }
}

/// Types of the parts of a text: OpenAI's chats have `text`, its responses `input_text` and `output_text`; Anthropic's
/// reference to a tool is a line with the tool's name.
const PARTS: [&str; 5] = ["text", "input_text", "output_text", "refusal", "tool_reference"];

/// Whether a part is a reference to a tool, and its text.
fn text_part(mut part: Fields) -> Result<(bool, String)> {
    let kind = part.string("type")?;
    if let Some(kind) = kind.as_deref().filter(|kind| !PARTS.contains(kind)) {
        let problem = format!("{:?} is not supported, only {}", shown(kind), PARTS.join(", "));
        return Err(part.error("type", problem).with_code("unsupported_parameter"));
    }
    let text = part.string("text")?.or(part.string("refusal")?).or(part.string("tool_name")?);
    let text = text.ok_or_else(|| part.error("text", "is required"))?;
    part.ignore(&["cache_control", "citations", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"]);
    part.end()?;
    Ok((kind.as_deref() == Some("tool_reference"), text))
}
