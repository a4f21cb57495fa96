//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use foretoken::chat::{ChatOptions, ReplyPart, ToolCall};
use foretoken::{GenerateOptions, Piece};
use serde_json::{Value, json};

use crate::answer::answer;
use crate::api_error::ApiError;
use crate::app::{App, RequestId};
use crate::convert::{self, Chat, MAX_TOP_LOGPROBS, Prompt};
use crate::fields::Fields;
use crate::job::Ended;
use crate::openai::{self, Form};
use crate::reply::{Generate, Reply, Written, event};
use crate::structured::Structured;
use crate::{messages, tools};

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
    let messages = messages::openai(&mut fields)?;
    let tools = tools::openai(&mut fields)?;
    let form = openai::form(&mut fields)?;
    let most = match fields.count("max_completion_tokens", 1..=usize::MAX)? {
        Some(most) => {
            fields.ignore(&["max_tokens"]); // the older name
            Some(most)
        }
        None => fields.count("max_tokens", 1..=usize::MAX)?,
    };
    let strings = convert::stop_strings(&mut fields, "stop")?;
    let base = convert::chat_sampling(&app.engine);
    let structured = Structured::response_format(&mut fields)?;
    let chat_options = ChatOptions { tools: tools.list.clone(), ..tools::thinking(&mut fields)? };
    let calls = tools.calls;
    let structured = tools.constrain(&app.engine, &chat_options, structured)?;
    let mut options = GenerateOptions {
        constraint: structured.constraint.clone(),
        stop: convert::stop(&mut fields, strings)?,
        logprobs: logprobs(&mut fields)?,
        ..convert::options(&mut fields, (&app.engine, &app.defaults), &base, most)?
    };
    calls.limit(&app.engine, &mut options.stop);
    let chat = Chat { messages, options: chat_options };
    let choices = openai::choices(&mut fields, app.parallel)?;
    openai::take_inert(&mut fields)?;
    fields.only("modalities", &[json!(["text"])])?;
    fields.end()?;
    let generate = Generate {
        prompt: Prompt::Chat(chat),
        prompt_field: "messages",
        reply: Box::new(Completion { form: Form { logprobs: options.logprobs.is_some(), ..form } }),
        options,
        choices,
        streams: form.streams,
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

struct Completion {
    form: Form,
}

impl Completion {
    fn chunk(&self, written: &Written, choices: Value) -> Value {
        let mut chunk = json!({
            "id": format!("chatcmpl-{}", written.request_id),
            "object": "chat.completion.chunk",
            "created": written.created,
            "model": written.model,
            "choices": choices,
        });
        if self.form.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn delta(&self, written: &Written, delta: Value) -> Value {
        let choice = json!({"index": written.index, "delta": delta, "logprobs": null, "finish_reason": null});
        self.chunk(written, json!([choice]))
    }
}

/// A call in OpenAI's form.
fn tool_call(call: &ToolCall) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments.to_string()});
    json!({"id": call.id, "type": "function", "function": function})
}

impl Reply for Completion {
    fn begin(&mut self, written: &Written) -> String {
        event(&self.delta(written, json!({"role": "assistant", "content": ""})))
    }

    fn piece(&mut self, piece: &Piece, parts: &[ReplyPart], written: &Written) -> String {
        let of_calls = parts.iter().filter(|part| matches!(part, ReplyPart::ToolCall(_))).count();
        let mut call_index = written.calls.len() - of_calls;
        let delta = |part: &ReplyPart| match part {
            ReplyPart::Reasoning(text) => json!({"reasoning_content": text}),
            ReplyPart::ToolCall(call) => {
                let mut call = tool_call(call);
                call["index"] = json!(call_index);
                call_index += 1;
                json!({"tool_calls": [call]})
            }
            ReplyPart::Text(text) => json!({"content": text}),
            _ => json!({}),
        };
        let mut deltas: Vec<Value> = parts.iter().map(delta).collect();
        if deltas.is_empty() && (!piece.logprobs.is_empty() || self.form.token_origins) {
            deltas.push(json!({"content": ""}));
        }
        let mut chunks: Vec<Value> = deltas.into_iter().map(|delta| self.delta(written, delta)).collect();
        // Of a piece's tokens, some of which are in no part, the first chunk tells.
        if let Some(choice) = chunks.first_mut().map(|chunk| &mut chunk["choices"][0]) {
            if self.form.logprobs {
                choice["logprobs"] = content(written, &piece.logprobs);
            }
            if self.form.token_origins {
                choice["tokens"] = convert::origins(&written.engine, piece);
            }
        }
        chunks.iter().map(event).collect()
    }

    fn end(&mut self, written: &Written, ended: &Ended) -> String {
        let mut chunk = self.delta(written, json!({}));
        chunk["choices"][0]["finish_reason"] = json!(openai::finish_reason(written, ended));
        openai::last_chunk(chunk, ended)
    }

    fn close(&mut self, choices: &[Written]) -> String {
        openai::last_events(self.form, self.chunk(&choices[0], json!([])), choices)
    }

    fn whole(&mut self, choices: &[(Written, Ended)]) -> Value {
        let choice = |(written, ended): &(Written, Ended)| {
            let mut message = json!({"role": "assistant", "content": written.content, "refusal": null});
            if !written.reasoning.is_empty() {
                message["reasoning_content"] = json!(written.reasoning);
            }
            if !written.calls.is_empty() {
                message["tool_calls"] = written.calls.iter().map(tool_call).collect();
                if written.content.is_empty() {
                    message["content"] = Value::Null;
                }
            }
            json!({
                "index": written.index,
                "message": message,
                "logprobs": self.form.logprobs.then(|| content(written, &written.logprobs)),
                "finish_reason": openai::finish_reason(written, ended),
            })
        };
        let (written, ended) = &choices[0];
        json!({
            "id": format!("chatcmpl-{}", written.request_id),
            "object": "chat.completion",
            "created": written.created,
            "model": written.model,
            "choices": choices.iter().map(choice).collect::<Vec<_>>(),
            "usage": openai::usage(choices.iter().map(|(written, _)| written)),
            "timings": convert::timings(&ended.statistics),
        })
    }
}

fn content(written: &Written, logprobs: &[foretoken::TokenLogprobs]) -> Value {
    let content: Vec<_> = logprobs.iter().map(|of| convert::logprobs(&written.engine, of)).collect();
    json!({"content": content, "refusal": null})
}
