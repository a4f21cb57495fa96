//! Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::chat::Message;
use foretoken::{Finish, GenerateOptions, Piece};
use serde_json::{Value, json};

use crate::api_error::{Api, ApiError};
use crate::app::{App, RequestId};
use crate::convert::{self, Prompt};
use crate::fields::Fields;
use crate::job::Ended;
use crate::reply::{Generate, Reply, Written, answer, encode, json as json_response};

pub(crate) async fn messages(State(app): State<Arc<App>>, id: RequestId, fields: Fields) -> Result<Response, ApiError> {
    let generate = request(&app, fields)?;
    answer(&app, id, generate).await
}

/// The number of a chat's tokens.
pub(crate) async fn count_tokens(State(app): State<Arc<App>>, mut fields: Fields) -> Result<Response, ApiError> {
    app.check_model(&mut fields)?;
    let messages = conversation(&mut fields)?;
    take_inert(&mut fields)?;
    fields.end()?;
    let (tokens, _) = encode(&app, app.admit()?, "messages", move |app| {
        convert::tokens(&app.engine, app.chat_template.as_ref(), Prompt::Chat(messages))
    })
    .await?;
    Ok(json_response(&json!({"input_tokens": tokens.len()})))
}

fn request(app: &App, mut fields: Fields) -> Result<Generate, ApiError> {
    app.check_model(&mut fields)?;
    let messages = conversation(&mut fields)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let most = fields.count("max_tokens", 1..=usize::MAX)?;
    let most = most.ok_or_else(|| fields.error("max_tokens", "is missing; give the most tokens to write"))?;
    let strings = convert::stop_strings(&mut fields, "stop_sequences")?;
    let options = GenerateOptions {
        stop: convert::stop(&mut fields, strings)?,
        ..convert::options(&mut fields, &app.defaults, &convert::chat_sampling(&app.engine), Some(most))?
    };
    take_inert(&mut fields)?;
    fields.end()?;
    Ok(Generate { prompt: Prompt::Chat(messages), prompt_field: "messages", options, streams, reply: Box::new(Answer) })
}

/// Takes `system` and `messages`.
fn conversation(fields: &mut Fields) -> Result<Vec<Message>, ApiError> {
    let system = convert::text_of(fields, "system")?.map(convert::system);
    let messages = convert::messages(fields)?;
    if convert::ends_with_assistant(&messages) {
        let last = format!("messages[{}].role", messages.len() - 1);
        return Err(fields.error(&last, "is the assistant's, whose text would be continued; that is not implemented"));
    }
    Ok(system.into_iter().chain(messages).collect())
}

fn take_inert(fields: &mut Fields) -> Result<(), ApiError> {
    fields.ignore(&["metadata", "service_tier"]);
    fields.only("tools", &[json!([])])?;
    fields.only("tool_choice", &[json!({"type": "none"}), json!({"type": "auto"})])?;
    fields.only("thinking", &[json!({"type": "disabled"})])
}

struct Answer;

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
            "usage": {"input_tokens": written.prompt_tokens, "output_tokens": 0},
        })
    }
}

/// An event with its name, which is its type.
fn named(data: Value) -> String {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap_or_default())
}

/// Why it stopped, and behind which string.
fn stop_of(written: &Written, ended: &Ended) -> (&'static str, Option<String>) {
    match ended.finish {
        Finish::StopString => ("stop_sequence", written.stop_string(ended)),
        Finish::MaxTokens => ("max_tokens", None),
        Finish::Context => ("model_context_window_exceeded", None),
        _ => ("end_turn", None),
    }
}

impl Reply for Answer {
    fn begin(&mut self, written: &Written) -> String {
        named(json!({"type": "message_start", "message": Self::message(written)}))
            + &named(json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}))
            + &named(json!({"type": "ping"}))
    }

    fn piece(&mut self, piece: &Piece, _: &Written) -> String {
        if piece.text.is_empty() {
            return String::new();
        }
        let delta = json!({"type": "text_delta", "text": piece.text});
        named(json!({"type": "content_block_delta", "index": 0, "delta": delta}))
    }

    fn end(&mut self, written: &Written, ended: &Ended) -> String {
        let (reason, sequence) = stop_of(written, ended);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let usage = json!({"output_tokens": written.tokens.len()});
        named(json!({"type": "content_block_stop", "index": 0}))
            + &named(json!({"type": "message_delta", "delta": delta, "usage": usage}))
            + &named(json!({"type": "message_stop"}))
    }

    fn whole(&mut self, written: &Written, ended: &Ended) -> Value {
        let (reason, sequence) = stop_of(written, ended);
        let mut message = Self::message(written);
        message["content"] = json!([{"type": "text", "text": written.text}]);
        message["stop_reason"] = json!(reason);
        message["stop_sequence"] = json!(sequence);
        message["usage"]["output_tokens"] = json!(written.tokens.len());
        message
    }

    fn api(&self) -> Api {
        Api::Anthropic
    }
}
