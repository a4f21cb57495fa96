//! `POST /v1/responses`: text, reasoning and function calls. Nothing is stored: every request has
//! the whole conversation.

use foretoken::chat::{ChatOptions, Message, ReplyPart, Role, Thinking, ToolCall};
use foretoken::{FinishReason, Piece};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::generate_options;
use crate::ignored::take_ignored;
use crate::job::Ended;
use crate::messages::{Conversation, function_call, text_of};
use crate::prompt::{Chat, Prompt};
use crate::reply::{ChoiceOutput, Generate, Reply, decimal, named};
use crate::served::Served;
use crate::structured;
use crate::timings::timings;
use crate::tools::{self, OtherTools, is_function};

/// Reads the body.
pub(crate) fn request(served: &Served, mut fields: Fields) -> Result<Generate, ApiError> {
    served.check_model(&mut fields)?;
    let instructions = fields.string("instructions")?;
    let messages = input(&mut fields, instructions.as_deref())?;
    let mut echoed = echoed(&fields, instructions.as_deref());
    let tools = tools::openai(&mut fields, OtherTools::LeftOut)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let most = fields.count("max_output_tokens", 1..=usize::MAX)?;
    let mut options =
        ChatOptions { tools: tools.list.clone(), ..tools::template_options(&mut fields, &served.defaults)? };
    options.thinking = reasoning(&mut fields)?.unwrap_or(options.thinking);
    let chat = Chat::new(served, messages, options, fields.body_bytes);
    let (format, echoed_format) = structured::text_format(&mut fields)?;
    let calls = tools.calls;
    let structured = tools.constrain(&chat.options, format)?;
    let base = served.defaults.of_chats();
    let mut common = generate_options::common(&mut fields, served, base, most, Vec::new(), structured)?;
    calls.limit(&served.engine, &mut common.options.stop);
    take_unsupported(&mut fields)?;
    take_ignored(&mut fields, &common.options.sampling)?;
    fields.end()?;
    echoed["max_output_tokens"] = json!(most);
    echoed["text"] = json!({"format": echoed_format});
    let sampling = &common.options.sampling;
    for (name, used) in [("temperature", sampling.temperature), ("top_p", sampling.top_p)] {
        if echoed[name].is_null() {
            echoed[name] = decimal(used);
        }
    }
    Ok(Generate {
        prompts: vec![Prompt::Chat(chat)],
        prompt_field: "input",
        common,
        choices: 1,
        streams,
        reply: Box::new(Answer { echoed, sequence_number: 0, open: None, items: Vec::new() }),
    })
}

/// What a response repeats of the request. [`request`] adds what it reads, and the defaults in use.
fn echoed(fields: &Fields, instructions: Option<&str>) -> Value {
    let given = |name: &str, default: Value| fields.peek(name).cloned().unwrap_or(default);
    let tools = fields.peek("tools").and_then(Value::as_array).into_iter().flatten();
    json!({
        "background": false,
        "instructions": instructions,
        "max_tool_calls": given("max_tool_calls", Value::Null),
        "metadata": given("metadata", json!({})),
        "parallel_tool_calls": given("parallel_tool_calls", json!(true)),
        "prompt_cache_key": given("prompt_cache_key", Value::Null),
        "reasoning": given("reasoning", json!({"effort": null, "summary": null})),
        "safety_identifier": given("safety_identifier", Value::Null),
        "temperature": given("temperature", Value::Null),
        "tool_choice": given("tool_choice", json!("auto")),
        "tools": tools.filter(|tool| is_function(tool.get("type"))).map(flat_tool).collect::<Vec<_>>(),
        "top_p": given("top_p", Value::Null),
        "truncation": given("truncation", json!("disabled")),
        "user": given("user", Value::Null),
        "previous_response_id": null,
        "store": false,
    })
}

/// A tool with its fields next to `type`, as in responses.
fn flat_tool(tool: &Value) -> Value {
    let own = tool.get("function").filter(|function| function.is_object()).unwrap_or(tool);
    let own = |name: &str, default: Value| own.get(name).filter(|value| !value.is_null()).cloned().unwrap_or(default);
    json!({
        "type": "function",
        "name": own("name", Value::Null),
        "description": own("description", Value::Null),
        "parameters": own("parameters", Value::Null),
        "strict": own("strict", json!(false)),
    })
}

/// What `include` adds to items that no response has, and to reasoning, which is not encrypted.
const INCLUDED: [&str; 7] = [
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
];

/// Takes the fields of responses alone that are supported with some values only.
fn take_unsupported(fields: &mut Fields) -> Result<(), ApiError> {
    fields.only("background", &[json!(false)])?;
    let included = fields.list("include")?.unwrap_or_default();
    if let Some(i) = included.iter().position(|name| !name.as_str().is_some_and(|name| INCLUDED.contains(&name))) {
        let problem = format!("only {} are supported", INCLUDED.join(", "));
        return Err(fields.error(&format!("include[{i}]"), problem).with_code("unsupported_parameter"));
    }
    if let Some(mut options) = fields.object("prompt_cache_options")? {
        options.only("prewarm", &[json!(false)])?; // true asks for no text
    }
    fields.only("truncation", &[json!("disabled"), json!("auto")])?;
    fields.ignore(&["client_metadata", "max_tool_calls"]);
    fields.only("top_logprobs", &[json!(0)])?;
    if let Some(mut options) = fields.object("stream_options")? {
        options.ignore(&["include_obfuscation"]);
        options.end()?;
    }
    Ok(())
}

/// Takes `reasoning`.
fn reasoning(fields: &mut Fields) -> Result<Option<Thinking>, ApiError> {
    let Some(mut given) = fields.object("reasoning")? else { return Ok(None) };
    let thinking = tools::effort(&mut given, "effort")?;
    given.ignore(&["context", "generate_summary", "summary"]);
    given.only("mode", &[json!("standard")])?;
    given.end()?;
    Ok(thinking)
}

/// Takes `input`: a string, or items.
fn input(fields: &mut Fields, instructions: Option<&str>) -> Result<Vec<Message>, ApiError> {
    let mut conversation = Conversation::default();
    instructions.into_iter().for_each(|text| conversation.push(Message::system(text)));
    match fields.value("input") {
        Some(Value::String(text)) => conversation.push(Message::user(text)),
        Some(Value::Array(items)) if !items.is_empty() => {
            for item in Fields::each(items, fields.name("input")) {
                input_item(item?, &mut conversation)?;
            }
        }
        None | Some(Value::Array(_)) => return Err(fields.error("input", "is required: a string or an array of items")),
        Some(other) => return Err(fields.mismatch("input", &other, "a string or an array")),
    }
    Ok(conversation.into_messages())
}

fn input_item(mut item: Fields, conversation: &mut Conversation) -> Result<(), ApiError> {
    item.ignore(&["id", "status"]);
    match item.string("type")?.as_deref() {
        None | Some("message") => {
            let role = match item.required("role")?.as_str() {
                "system" | "developer" => Role::System,
                "user" => Role::User,
                "assistant" => Role::Assistant,
                _ => return Err(item.error("role", "must be one of system, developer, user, assistant")),
            };
            let content = text_of(&mut item, "content")?;
            let content = content.ok_or_else(|| item.error("content", "is required"))?;
            item.ignore(&["phase"]);
            conversation.push(Message::new(role, content));
        }
        Some("function_call") => {
            let id = item.required("call_id")?;
            item.ignore(&["caller", "namespace"]);
            conversation.call(ToolCall { id: Some(id), ..function_call(&mut item)? });
        }
        Some("function_call_output") => {
            let id = item.required("call_id")?;
            let output = text_of(&mut item, "output")?;
            let output = output.ok_or_else(|| item.error("output", "is required"))?;
            item.ignore(&["caller", "name", "namespace"]);
            conversation.result(id, output, &item.name("call_id"))?;
        }
        Some("reasoning") => {
            let content = item.list("content")?.unwrap_or_default();
            content.iter().filter_map(|part| part["text"].as_str()).for_each(|text| conversation.reason(text));
            item.ignore(&["summary", "encrypted_content"]);
        }
        Some(_) => {
            let known = "message, function_call, function_call_output, reasoning";
            return Err(item.error("type", format!("must be one of {known}")));
        }
    }
    item.end()
}

struct Answer {
    /// Fields of the request that the response repeats.
    echoed: Value,
    /// Of the next event.
    sequence_number: usize,
    /// The last item's type and text, until it is complete.
    open: Option<(Item, String)>,
    /// All items in order; the open one is null until it is complete.
    items: Vec<Value>,
}

/// The type of an item that has text.
#[derive(Clone, Copy, PartialEq)]
enum Item {
    Reasoning,
    Message,
}

impl Item {
    /// The prefix of its items' ids.
    fn prefix(self) -> &'static str {
        match self {
            Self::Reasoning => "rs",
            Self::Message => "msg",
        }
    }

    /// The name of the text in events.
    fn text_name(self) -> &'static str {
        match self {
            Self::Reasoning => "reasoning_text",
            Self::Message => "output_text",
        }
    }

    /// The only part of an item.
    fn part(self, text: &str) -> Value {
        match self {
            Self::Reasoning => json!({"type": "reasoning_text", "text": text}),
            Self::Message => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        }
    }

    /// An item; without text, it has no part yet.
    fn item(self, id: &str, text: Option<&str>, status: &str) -> Value {
        let content: Vec<_> = text.map(|text| self.part(text)).into_iter().collect();
        match self {
            Self::Reasoning => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": content, "status": status})
            }
            Self::Message => {
                json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content})
            }
        }
    }
}

fn call_item(id: &str, call: &ToolCall, arguments: &str, status: &str) -> Value {
    json!({
        "id": id, "type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments,
        "status": status,
    })
}

impl Answer {
    fn event(&mut self, kind: &str, mut data: Value) -> String {
        data["type"] = json!(kind);
        data["sequence_number"] = json!(self.sequence_number);
        self.sequence_number += 1;
        named(&data)
    }

    /// The id of the last item, from its kind's prefix.
    fn id(&self, prefix: &str, output: &ChoiceOutput) -> String {
        format!("{prefix}_{}_{}", output.request_id, self.at())
    }

    fn at(&self) -> usize {
        self.items.len().saturating_sub(1)
    }

    /// Completes the open item and begins another.
    fn add_item(&mut self, prefix: &str, output: &ChoiceOutput, item: impl Fn(&str) -> Value) -> String {
        let before = self.finish_item(output, "completed");
        self.items.push(Value::Null);
        let item = item(&self.id(prefix, output));
        let at = self.at();
        before + &self.event("response.output_item.added", json!({"output_index": at, "item": item}))
    }

    fn item_done(&mut self, item: Value) -> String {
        let at = self.at();
        self.items[at] = item.clone();
        self.event("response.output_item.done", json!({"output_index": at, "item": item}))
    }

    /// An event of the last item's part, `content` of which is in the field `field`.
    fn part_event(&mut self, event: &str, kind: Item, output: &ChoiceOutput, field: &str, content: Value) -> String {
        let id = self.id(kind.prefix(), output);
        let mut data = json!({"item_id": id, "output_index": self.at(), "content_index": 0});
        data[field] = content;
        if kind == Item::Message && field != "part" {
            data["logprobs"] = json!([]);
        }
        self.event(event, data)
    }

    /// More text of an item of this kind.
    fn text(&mut self, kind: Item, text: &str, output: &ChoiceOutput) -> String {
        let mut events = String::new();
        if self.open.as_ref().is_none_or(|(open, _)| *open != kind) {
            events += &self.add_item(kind.prefix(), output, |id| kind.item(id, None, "in_progress"));
            events += &self.part_event("response.content_part.added", kind, output, "part", kind.part(""));
            self.open = Some((kind, String::new()));
        }
        if let Some((_, all)) = &mut self.open {
            all.push_str(text);
        }
        let name = format!("response.{}.delta", kind.text_name());
        events + &self.part_event(&name, kind, output, "delta", json!(text))
    }

    fn call(&mut self, call: &ToolCall, output: &ChoiceOutput) -> String {
        let mut events = self.add_item("fc", output, |id| call_item(id, call, "", "in_progress"));
        let (id, at) = (self.id("fc", output), self.at());
        let arguments = call.arguments.to_string();
        let delta = json!({"item_id": id, "output_index": at, "delta": arguments});
        events += &self.event("response.function_call_arguments.delta", delta);
        let done = json!({"item_id": id, "output_index": at, "name": call.name, "arguments": arguments});
        events += &self.event("response.function_call_arguments.done", done);
        events + &self.item_done(call_item(&id, call, &arguments, "completed"))
    }

    /// Completes the open item.
    fn finish_item(&mut self, output: &ChoiceOutput, status: &str) -> String {
        let Some((kind, text)) = self.open.take() else { return String::new() };
        let item = kind.item(&self.id(kind.prefix(), output), Some(&text), status);
        let name = format!("response.{}.done", kind.text_name());
        self.part_event(&name, kind, output, "text", json!(text))
            + &self.part_event("response.content_part.done", kind, output, "part", kind.part(&text))
            + &self.item_done(item)
    }

    /// The response, in progress or as it ended.
    fn response(&self, output: &ChoiceOutput, ended: Option<&Ended>) -> Value {
        let mut response = self.echoed.clone();
        let (status, why) = status(ended);
        response["id"] = json!(format!("resp_{}", output.request_id));
        response["object"] = json!("response");
        response["created_at"] = json!(output.created);
        response["status"] = json!(status);
        response["error"] = Value::Null;
        response["incomplete_details"] = why.map_or(Value::Null, |reason| json!({"reason": reason}));
        response["model"] = json!(output.model);
        response["output"] = json!(self.items);
        response["usage"] = Value::Null;
        if let Some(ended) = ended {
            response["completed_at"] = json!(crate::reply::now());
            response["usage"] = json!({
                "input_tokens": output.prompt_tokens,
                // Written tokens are not counted apart.
                "input_tokens_details": {"cached_tokens": output.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": output.tokens.len(),
                "output_tokens_details": {"reasoning_tokens": output.reasoning_tokens()},
                "total_tokens": output.prompt_tokens + output.tokens.len(),
            });
            response["timings"] = timings(&ended.statistics);
        }
        response
    }
}

fn status(ended: Option<&Ended>) -> (&'static str, Option<&'static str>) {
    match ended.map(|ended| ended.finish) {
        None => ("in_progress", None),
        Some(FinishReason::MaxTokens | FinishReason::Context) => ("incomplete", Some("max_output_tokens")),
        Some(_) => ("completed", None),
    }
}

/// The code of a failed response. OpenAI's clients have a list of them; that of a full context is not in it, but Codex
/// knows it. Codex repeats requests after server errors.
fn code_of_response(error: &ApiError) -> &'static str {
    match error.code {
        Some(code @ "context_length_exceeded") => code,
        _ if error.status.is_client_error() => "invalid_prompt",
        _ => "server_error",
    }
}

impl Reply for Answer {
    fn begin(&mut self, output: &ChoiceOutput) -> String {
        let response = self.response(output, None);
        self.event("response.created", json!({"response": response}))
            + &self.event("response.in_progress", json!({"response": response}))
    }

    fn piece(&mut self, _: &Piece, parts: &[ReplyPart], output: &ChoiceOutput) -> String {
        let mut events = String::new();
        for part in parts {
            events += &match part {
                ReplyPart::Text(text) => self.text(Item::Message, text, output),
                ReplyPart::Reasoning(text) => self.text(Item::Reasoning, text, output),
                ReplyPart::ToolCall(call) => self.call(call, output),
                _ => String::new(),
            };
        }
        events
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        let (status, _) = status(Some(ended));
        let last = self.finish_item(output, status);
        let response = self.response(output, Some(ended));
        last + &self.event(&format!("response.{status}"), json!({"response": response}))
    }

    /// An event without a response, then one with what is complete of it: Codex reads errors from the second alone.
    /// `code` of the first is the type of errors that have no code.
    fn failed(&mut self, error: &ApiError, output: &ChoiceOutput) -> String {
        let code = error.code.unwrap_or(error.openai_type());
        self.items.retain(|item| !item.is_null());
        let mut response = self.response(output, None);
        response["status"] = json!("failed");
        response["error"] = json!({"code": code_of_response(error), "message": error.message});
        self.event("error", json!({"code": code, "message": error.message, "param": error.param}))
            + &self.event("response.failed", json!({"response": response}))
    }

    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let (output, ended) = &choices[0];
        self.piece(&Piece::default(), &output.parts, output);
        self.finish_item(output, status(Some(ended)).0);
        self.response(output, Some(ended))
    }
}

#[cfg(test)]
mod tests {
    use hyper::StatusCode;

    use super::*;

    #[test]
    fn failed_responses_have_codes_that_clients_know() {
        let bad = || ApiError::field("input", "is wrong");
        for (error, code) in [
            (bad(), "invalid_prompt"),
            (bad().with_code("unsupported_parameter"), "invalid_prompt"),
            (bad().with_code("context_length_exceeded"), "context_length_exceeded"),
            (ApiError::internal(), "server_error"),
            (ApiError::stopping(), "server_error"),
            (ApiError::engine_stopped(StatusCode::INTERNAL_SERVER_ERROR), "server_error"),
        ] {
            assert_eq!(code_of_response(&error), code, "{error:?}");
        }
    }
}
