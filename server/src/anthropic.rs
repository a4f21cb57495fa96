//! Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::chat::{ChatOptions, ReplyPart, ToolCall};
use foretoken::{FinishReason, Piece};
use serde_json::{Value, json};

use crate::api_error::{Api, ApiError};
use crate::app::App;
use crate::fields::Fields;
use crate::ignored::take_ignored;
use crate::job::Ended;
use crate::prompt::{self, Chat, Prompt};
use crate::reply::{ChoiceOutput, Generate, Reply, json as json_response, named};
use crate::served::Served;
use crate::structured::{self, Format};
use crate::tools::Tools;
use crate::{generate_options, messages, tools};

/// The number of a chat's tokens, which need not fit the context.
pub(crate) async fn count_tokens(State(app): State<Arc<App>>, fields: Fields) -> Result<Response, ApiError> {
    let chat = counted(&app.served, fields)?;
    let work = move |served: &Served| prompt::chat_tokens(served, &chat);
    let (tokens, _) = app.run_blocking(app.admit(1)?, "messages", work).await?;
    Ok(json_response(&json!({"input_tokens": tokens.len()})))
}

/// Reads the body of `POST /v1/messages/count_tokens`.
pub(crate) fn counted(served: &Served, mut fields: Fields) -> Result<Chat, ApiError> {
    served.check_model(&mut fields)?;
    let (chat, ..) = chat(served, &mut fields)?;
    fields.end()?;
    Ok(chat)
}

/// Reads the body of `POST /v1/messages`.
pub(crate) fn request(served: &Served, mut fields: Fields) -> Result<Generate, ApiError> {
    served.check_model(&mut fields)?;
    let (chat, tools, format) = chat(served, &mut fields)?;
    let calls = tools.calls;
    let structured = tools.constrain(&chat.options, format)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let most = fields.count("max_tokens", 0..=usize::MAX)?;
    let most = most.ok_or_else(|| fields.error("max_tokens", "is required"))?;
    let strings = fields.strings("stop_sequences")?;
    let base = served.defaults.of_chats();
    let mut common = generate_options::common(&mut fields, served, base, Some(most), strings, structured)?;
    calls.limit(&served.engine, &mut common.options.stop);
    take_ignored(&mut fields, &common.options.sampling)?;
    fields.end()?;
    Ok(Generate {
        prompts: vec![Prompt::Chat(chat)],
        prompt_field: "messages",
        common,
        choices: 1,
        streams,
        reply: Box::new(Answer::default()),
    })
}

/// Takes `system`, `messages`, `tools`, `tool_choice`, `thinking` and `output_config`.
fn chat(served: &Served, fields: &mut Fields) -> Result<(Chat, Tools, Option<Format>), ApiError> {
    let (messages, generation_prompt) = messages::anthropic(fields)?;
    let tools = tools::anthropic(fields)?;
    let options = ChatOptions {
        tools: tools.list.clone(),
        thinking: tools::anthropic_thinking(fields)?.unwrap_or(served.defaults.thinking),
        generation_prompt,
        variables: served.defaults.variables.clone(),
        ..ChatOptions::default()
    };
    fields.ignore(&["cache_control", "context_management", "diagnostics", "inference_geo", "speed"]);
    fields.only("mcp_servers", &[json!([])])?;
    let chat = Chat::new(served, messages, options, fields.body_bytes);
    Ok((chat, tools, structured::output_config(fields)?))
}

/// The type of the open content block.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Thinking,
    Text,
}

#[derive(Default)]
struct Answer {
    open: Option<Block>,
    /// Number of blocks so far.
    blocks: usize,
}

/// The tokens so far. Those from the cache may be more after the first token than before.
fn usage(output: &ChoiceOutput) -> Value {
    json!({
        "input_tokens": output.prompt_tokens - output.cached_tokens,
        "cache_creation_input_tokens": 0, // written tokens are not counted apart
        "cache_read_input_tokens": output.cached_tokens,
        "output_tokens": output.tokens.len(),
    })
}

impl Answer {
    fn message(output: &ChoiceOutput) -> Value {
        json!({
            "id": format!("msg_{}", output.request_id),
            "type": "message",
            "role": "assistant",
            "model": output.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": usage(output),
        })
    }

    fn start(&mut self, block: Value) -> String {
        self.blocks += 1;
        named(&json!({"type": "content_block_start", "index": self.blocks - 1, "content_block": block}))
    }

    fn delta(&self, delta: Value) -> String {
        named(&json!({"type": "content_block_delta", "index": self.blocks - 1, "delta": delta}))
    }

    fn stop(&self) -> String {
        named(&json!({"type": "content_block_stop", "index": self.blocks - 1}))
    }

    /// Closes the open block and opens one of this type, unless that is open.
    fn change(&mut self, to: Option<Block>) -> String {
        if self.open == to {
            return String::new();
        }
        let stop = match self.open {
            // Some clients take the signature from this event alone, and send no reasoning back without one.
            Some(Block::Thinking) => self.delta(json!({"type": "signature_delta", "signature": ""})) + &self.stop(),
            Some(Block::Text) => self.stop(),
            None => String::new(),
        };
        self.open = to;
        let start = match to {
            Some(Block::Text) => self.start(json!({"type": "text", "text": ""})),
            Some(Block::Thinking) => self.start(json!({"type": "thinking", "thinking": "", "signature": ""})),
            None => String::new(),
        };
        stop + &start
    }
}

/// The stop reason, and the stop sequence if that is the reason.
fn stop_of(output: &ChoiceOutput, ended: &Ended) -> (&'static str, Option<String>) {
    match ended.finish {
        FinishReason::StopString => ("stop_sequence", output.stop_string(ended)),
        FinishReason::MaxTokens => ("max_tokens", None),
        FinishReason::Context => ("model_context_window_exceeded", None),
        _ if output.calls().next().is_some() => ("tool_use", None),
        _ => ("end_turn", None),
    }
}

/// A call's block. In a stream, `input` is empty and its text follows in events.
fn tool_use(call: &ToolCall, input: Value) -> Value {
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
}

/// A part's block.
fn block(part: &ReplyPart) -> Option<Value> {
    match part {
        ReplyPart::Reasoning(text) => Some(json!({"type": "thinking", "thinking": text, "signature": ""})),
        ReplyPart::ToolCall(call) => {
            Some(tool_use(call, serde_json::from_str(&call.arguments.to_string()).unwrap_or_default()))
        }
        ReplyPart::Text(text) => Some(json!({"type": "text", "text": text})),
        _ => None,
    }
}

impl Reply for Answer {
    fn begin(&mut self, output: &ChoiceOutput) -> String {
        named(&json!({"type": "message_start", "message": Self::message(output)})) + &named(&json!({"type": "ping"}))
    }

    fn piece(&mut self, _: &Piece, parts: &[ReplyPart], _: &ChoiceOutput) -> String {
        let mut events = String::new();
        for part in parts {
            events += &match part {
                ReplyPart::Reasoning(text) => {
                    self.change(Some(Block::Thinking))
                        + &self.delta(json!({"type": "thinking_delta", "thinking": text}))
                }
                ReplyPart::ToolCall(call) => {
                    let arguments = call.arguments.to_string();
                    self.change(None)
                        + &self.start(tool_use(call, json!({})))
                        + &self.delta(json!({"type": "input_json_delta", "partial_json": arguments}))
                        + &self.stop()
                }
                ReplyPart::Text(text) => {
                    self.change(Some(Block::Text)) + &self.delta(json!({"type": "text_delta", "text": text}))
                }
                _ => String::new(),
            };
        }
        events
    }

    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String {
        let mut events = String::new();
        // With max_tokens: 0, which only fills the prefix cache, there is no content.
        if self.blocks == 0 && !output.tokens.is_empty() {
            events += &self.change(Some(Block::Text));
        }
        events += &self.change(None);
        let (reason, sequence) = stop_of(output, ended);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        events
            + &named(&json!({"type": "message_delta", "delta": delta, "usage": usage(output)}))
            + &named(&json!({"type": "message_stop"}))
    }

    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value {
        let (output, ended) = &choices[0];
        let (reason, sequence) = stop_of(output, ended);
        let mut content: Vec<_> = output.parts.iter().filter_map(block).collect();
        if content.is_empty() && !output.tokens.is_empty() {
            content.push(json!({"type": "text", "text": ""}));
        }
        let mut message = Self::message(output);
        message["content"] = json!(content);
        message["stop_reason"] = json!(reason);
        message["stop_sequence"] = json!(sequence);
        message
    }

    fn failed(&mut self, error: &ApiError, output: &ChoiceOutput) -> String {
        named(&error.body(Api::Anthropic, &output.request_id))
    }
}
