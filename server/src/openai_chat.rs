//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::{GenerateOptions, Piece};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::{App, RequestId};
use crate::convert::{self, MAX_TOP_LOGPROBS, Prompt};
use crate::fields::Fields;
use crate::job::Ended;
use crate::openai::{self, Streaming};
use crate::reply::{Generate, Reply, Written, answer, event};
use crate::structured::Structured;

pub(crate) async fn chat_completions(
    State(app): State<Arc<App>>,
    id: RequestId,
    fields: Fields,
) -> Result<Response, ApiError> {
    let (generate, structured) = request(&app, fields)?;
    structured.compile(&app).await?;
    answer(&app, id, generate).await
}

fn request(app: &App, mut fields: Fields) -> Result<(Generate, Structured), ApiError> {
    app.check_model(&mut fields)?;
    let messages = convert::messages(&mut fields)?;
    let streaming = openai::streaming(&mut fields)?;
    let most = match fields.count("max_completion_tokens", 1..=usize::MAX)? {
        Some(most) => {
            fields.ignore(&["max_tokens"]); // the older name
            Some(most)
        }
        None => fields.count("max_tokens", 1..=usize::MAX)?,
    };
    let strings = convert::stop_strings(&mut fields, "stop")?;
    let structured = Structured::response_format(&mut fields)?;
    let options = GenerateOptions {
        constraint: structured.constraint.clone(),
        stop: convert::stop(&mut fields, strings)?,
        logprobs: logprobs(&mut fields)?,
        ..convert::options(&mut fields, &app.defaults, &convert::chat_sampling(&app.engine), most)?
    };
    take_inert(&mut fields)?;
    fields.end()?;
    let generate = Generate {
        prompt: Prompt::Chat(messages),
        prompt_field: "messages",
        reply: Box::new(Chat { streaming, logprobs: options.logprobs.is_some() }),
        options,
        streams: streaming.streams,
    };
    Ok((generate, structured))
}

/// Takes `logprobs` and `top_logprobs`.
fn logprobs(fields: &mut Fields) -> Result<Option<usize>, ApiError> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    match fields.count("top_logprobs", 0..=MAX_TOP_LOGPROBS)? {
        Some(_) if !wanted => {
            Err(fields.error("top_logprobs", "is for logprobs; set logprobs to true, or leave it out"))
        }
        top => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

fn take_inert(fields: &mut Fields) -> Result<(), ApiError> {
    openai::take_inert(fields)?;
    fields.only("tools", &[json!([])])?;
    fields.only("tool_choice", &[json!("none"), json!("auto")])?;
    fields.only("modalities", &[json!(["text"])])?;
    fields.only("reasoning_effort", &[json!("none")])?;
    fields.only("chat_template_kwargs", &[json!({}), json!({"enable_thinking": false})])?;
    // Without tools it has no effect.
    fields.ignore(&["parallel_tool_calls"]);
    Ok(())
}

struct Chat {
    streaming: Streaming,
    logprobs: bool,
}

impl Chat {
    fn chunk(&self, written: &Written, choices: Value) -> Value {
        let mut chunk = json!({
            "id": format!("chatcmpl-{}", written.request_id),
            "object": "chat.completion.chunk",
            "created": written.created,
            "model": written.model,
            "choices": choices,
        });
        if self.streaming.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Reply for Chat {
    fn begin(&mut self, written: &Written) -> String {
        let delta = json!({"role": "assistant", "content": ""});
        event(&self.chunk(written, json!([{"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}])))
    }

    fn piece(&mut self, piece: &Piece, written: &Written) -> String {
        if piece.text.is_empty() && piece.logprobs.is_empty() {
            return String::new();
        }
        let logprobs = self.logprobs.then(|| content(written, &piece.logprobs));
        let delta = json!({"content": piece.text});
        event(&self.chunk(written, json!([{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": null}])))
    }

    fn end(&mut self, written: &Written, ended: &Ended) -> String {
        let reason = openai::finish_reason(ended);
        let choice = json!([{"index": 0, "delta": {}, "logprobs": null, "finish_reason": reason}]);
        let (last, empty) = (self.chunk(written, choice), self.chunk(written, json!([])));
        openai::last_events(self.streaming, [last, empty], written, ended)
    }

    fn whole(&mut self, written: &Written, ended: &Ended) -> Value {
        json!({
            "id": format!("chatcmpl-{}", written.request_id),
            "object": "chat.completion",
            "created": written.created,
            "model": written.model,
            "choices": [{
                "index": 0,
                "message": {"role": "assistant", "content": written.text, "refusal": null},
                "logprobs": self.logprobs.then(|| content(written, &written.logprobs)),
                "finish_reason": openai::finish_reason(ended),
            }],
            "usage": openai::usage(written),
            "timings": convert::timings(&ended.statistics),
        })
    }
}

fn content(written: &Written, logprobs: &[foretoken::TokenLogprobs]) -> Value {
    let content: Vec<_> = logprobs.iter().map(|of| convert::logprobs(&written.engine, of)).collect();
    json!({"content": content, "refusal": null})
}
