//! Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::chat::{ChatOptions, ReplyPart};
use foretoken::{Finish, GenerateOptions, Piece};
use serde_json::{Value, json};

use crate::answer::answer;
use crate::api_error::{Api, ApiError};
use crate::app::{App, RequestId};
use crate::convert::{self, Chat, Prompt};
use crate::fields::Fields;
use crate::job::Ended;
use crate::reply::{Generate, Reply, Written, encode, json as json_response, named};
use crate::structured::Structured;
use crate::tools::Tools;
use crate::{messages, tools};

pub(crate) async fn messages(State(app): State<Arc<App>>, id: RequestId, fields: Fields) -> Result<Response, ApiError> {
    let (generate, structured) = request(&app, fields)?;
    structured.compile(&app).await?;
    answer(&app, id, generate).await
}

/// The number of a chat's tokens.
pub(crate) async fn count_tokens(State(app): State<Arc<App>>, mut fields: Fields) -> Result<Response, ApiError> {
    app.check_model(&mut fields)?;
    let (chat, _) = chat(&mut fields)?;
    fields.end()?;
    let (tokens, _) = encode(&app, app.admit(1)?, "messages", move |app| {
        convert::tokens(&app.engine, app.chat_template.as_ref(), Prompt::Chat(chat))
    })
    .await?;
    Ok(json_response(&json!({"input_tokens": tokens.len()})))
}

fn request(app: &App, mut fields: Fields) -> Result<(Generate, Structured), ApiError> {
    app.check_model(&mut fields)?;
    let (chat, tools) = chat(&mut fields)?;
    let calls = tools.calls;
    let structured = tools.constrain(&app.engine, &chat.options, Structured::default())?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let most = fields.count("max_tokens", 1..=usize::MAX)?;
    let most = most.ok_or_else(|| fields.error("max_tokens", "is missing; give the most tokens to write"))?;
    let strings = convert::stop_strings(&mut fields, "stop_sequences")?;
    let base = convert::chat_sampling(&app.engine);
    let mut options = GenerateOptions {
        constraint: structured.constraint.clone(),
        stop: convert::stop(&mut fields, strings)?,
        ..convert::options(&mut fields, (&app.engine, &app.defaults), &base, Some(most))?
    };
    calls.limit(&app.engine, &mut options.stop);
    fields.ignore(&["metadata", "service_tier"]);
    fields.end()?;
    let generate = Generate {
        prompt: Prompt::Chat(chat),
        prompt_field: "messages",
        options,
        choices: 1,
        streams,
        reply: Box::new(Answer::default()),
    };
    Ok((generate, structured))
}

/// Takes `system`, `messages`, `tools`, `tool_choice` and `thinking`.
fn chat(fields: &mut Fields) -> Result<(Chat, Tools), ApiError> {
    let messages = messages::anthropic(fields)?;
    let tools = tools::anthropic(fields)?;
    let options = ChatOptions {
        tools: tools.list.clone(),
        thinking: tools::anthropic_thinking(fields)?,
        ..ChatOptions::default()
    };
    fields.ignore(&["cache_control"]);
    Ok((Chat { messages, options }, tools))
}

/// The content block that is being written.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Thinking,
    Text,
}

#[derive(Default)]
struct Answer {
    open: Option<Block>,
    /// Blocks that were begun.
    blocks: usize,
}

impl Answer {
    fn message(written: &Written) -> Value {
        json!({
            "id": format!("msg_{}", written.request_id),
            "type": "message",
            "role": "assistant",
            "model": written.model,
            "content": [],
            "stop_reason": null,
            "stop_sequence": null,
            "usage": {
                "input_tokens": written.prompt_tokens - written.cached_tokens,
                "cache_read_input_tokens": written.cached_tokens,
                "output_tokens": 0,
            },
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

    /// Ends the block that is open, if it is another.
    fn change(&mut self, to: Option<Block>) -> String {
        let mut events = String::new();
        if self.open != to {
            if self.open.is_some() {
                events += &self.stop();
            }
            events += &match to {
                Some(Block::Text) => self.start(json!({"type": "text", "text": ""})),
                Some(Block::Thinking) => self.start(json!({"type": "thinking", "thinking": "", "signature": ""})),
                None => String::new(),
            };
            self.open = to;
        }
        events
    }
}

/// Why it stopped, and behind which string.
fn stop_of(written: &Written, ended: &Ended) -> (&'static str, Option<String>) {
    match ended.finish {
        Finish::StopString => ("stop_sequence", written.stop_string(ended)),
        Finish::MaxTokens => ("max_tokens", None),
        Finish::Context => ("model_context_window_exceeded", None),
        _ if !written.calls.is_empty() => ("tool_use", None),
        _ => ("end_turn", None),
    }
}

/// A call's block, with its arguments or, in front of their events, without.
fn tool_use(call: &foretoken::chat::ToolCall, input: Value) -> Value {
    json!({"type": "tool_use", "id": call.id, "name": call.name, "input": input})
}

impl Reply for Answer {
    fn begin(&mut self, written: &Written) -> String {
        named(&json!({"type": "message_start", "message": Self::message(written)})) + &named(&json!({"type": "ping"}))
    }

    fn piece(&mut self, _: &Piece, parts: &[ReplyPart], _: &Written) -> String {
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

    fn end(&mut self, written: &Written, ended: &Ended) -> String {
        let mut events = String::new();
        if self.blocks == 0 {
            events += &self.change(Some(Block::Text));
        }
        events += &self.change(None);
        let (reason, sequence) = stop_of(written, ended);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let usage = json!({"output_tokens": written.tokens.len()});
        events
            + &named(&json!({"type": "message_delta", "delta": delta, "usage": usage}))
            + &named(&json!({"type": "message_stop"}))
    }

    fn whole(&mut self, choices: &[(Written, Ended)]) -> Value {
        let (written, ended) = &choices[0];
        let (reason, sequence) = stop_of(written, ended);
        let mut content = Vec::new();
        if !written.reasoning.is_empty() {
            content.push(json!({"type": "thinking", "thinking": written.reasoning, "signature": ""}));
        }
        if !written.content.is_empty() || (written.calls.is_empty() && content.is_empty()) {
            content.push(json!({"type": "text", "text": written.content}));
        }
        for call in &written.calls {
            let input = serde_json::from_str(&call.arguments.to_string()).unwrap_or_default();
            content.push(tool_use(call, input));
        }
        let mut message = Self::message(written);
        message["content"] = json!(content);
        message["stop_reason"] = json!(reason);
        message["stop_sequence"] = json!(sequence);
        message["usage"]["output_tokens"] = json!(written.tokens.len());
        message
    }

    fn api(&self) -> Api {
        Api::Anthropic
    }
}
