//! What a route makes of a request, and what is written of its answer.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::response::{IntoResponse, Response};
use foretoken::chat::{ReplyParser, ReplyPart, ToolCall};
use foretoken::{Engine, Finish, GenerateOptions, Piece, TokenLogprobs};
use hyper::header::CONTENT_TYPE;
use serde_json::Value;

use crate::api_error::{Api, ApiError};
use crate::app::App;
use crate::convert::{self, Prompt};
use crate::job::{Ended, Ticket};

/// What a route makes of a request.
pub(crate) struct Generate {
    pub prompt: Prompt,
    /// Of the prompt, in errors.
    pub prompt_field: &'static str,
    pub options: GenerateOptions,
    /// Texts of the prompt, each from a seed of its own.
    pub choices: usize,
    pub streams: bool,
    pub reply: Box<dyn Reply>,
}

/// What was written so far, of one choice.
pub(crate) struct Written {
    pub engine: Engine,
    /// The name of the model, as clients know it.
    pub model: String,
    /// Of the request: 32 hexadecimal digits, or what the client gave.
    pub request_id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub prompt_tokens: usize,
    /// Those that a kept prefix had.
    pub cached_tokens: usize,
    /// The request's.
    pub stop_strings: Vec<String>,
    /// Among the choices.
    pub index: usize,
    pub tokens: Vec<u32>,
    /// All of it, without control tokens.
    pub text: String,
    /// Of a chat, taken apart.
    pub content: String,
    pub reasoning: String,
    /// With ids.
    pub calls: Vec<ToolCall>,
    pub logprobs: Vec<TokenLogprobs>,
    pub parser: Option<ReplyParser>,
}

/// The shape of an answer. Events are whole lines of a `text/event-stream`.
pub(crate) trait Reply: Send {
    /// Events in front of a choice's first token.
    fn begin(&mut self, _: &Written) -> String {
        String::new()
    }

    /// Events of a piece, which `written` has already, and its parts. Of the parts that the end completes, the piece is empty.
    fn piece(&mut self, piece: &Piece, parts: &[ReplyPart], written: &Written) -> String;

    /// Events behind a choice's last token.
    fn end(&mut self, written: &Written, ended: &Ended) -> String;

    /// Events behind all choices.
    fn close(&mut self, _: &[Written]) -> String {
        String::new()
    }

    /// The answer as one object.
    fn whole(&mut self, choices: &[(Written, Ended)]) -> Value;

    /// Whose errors it has.
    fn api(&self) -> Api {
        Api::OpenAi
    }
}

impl Written {
    /// Takes a piece, and says what it completes.
    pub fn add(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        self.tokens.extend(&piece.tokens);
        self.text += &piece.text;
        self.logprobs.extend(piece.logprobs.iter().cloned());
        let parts = match &mut self.parser {
            Some(parser) => parser.push(piece),
            None if piece.text.is_empty() => Vec::new(),
            None => vec![ReplyPart::Text(piece.text.clone())],
        };
        self.take(parts)
    }

    /// What the end completes.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        let parts = self.parser.as_mut().map(ReplyParser::finish).unwrap_or_default();
        self.take(parts)
    }

    /// Keeps the parts, and gives calls their ids.
    fn take(&mut self, mut parts: Vec<ReplyPart>) -> Vec<ReplyPart> {
        for part in &mut parts {
            match part {
                ReplyPart::Reasoning(text) => self.reasoning += text,
                ReplyPart::ToolCall(call) => {
                    call.id = Some(format!("call_{:024x}", rand::random::<u128>() >> 32));
                    self.calls.push(call.clone());
                }
                ReplyPart::Text(text) => self.content += text,
                _ => {}
            }
        }
        parts
    }

    /// The stop string that ended the text, if one did.
    pub fn stop_string(&self, ended: &Ended) -> Option<String> {
        let stopped = ended.finish == Finish::StopString;
        stopped.then(|| convert::stop_string(&self.engine, &self.tokens, &self.text, &self.stop_strings))?
    }
}

/// An event without a name.
pub(crate) fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

/// An event with its name, which is its type.
pub(crate) fn named(data: &Value) -> String {
    format!("event: {}\ndata: {data}\n\n", data["type"].as_str().unwrap_or_default())
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Does work that takes as long as the text of the field `field` is long, not on the threads of connections. It goes on if the
/// client leaves, and keeps the request's places until it is done: so it is as bounded as requests are.
///
/// # Errors
/// Those of the work.
pub(crate) async fn encode<T: Send + 'static>(
    app: &Arc<App>,
    tickets: Vec<Ticket>,
    field: &str,
    work: impl FnOnce(&App) -> foretoken::Result<T> + Send + 'static,
) -> Result<(T, Vec<Ticket>), ApiError> {
    let app = app.clone();
    let done = tokio::task::spawn_blocking(move || (work(&app), tickets)).await;
    let (result, tickets) = done.map_err(|_| ApiError::internal())?;
    Ok((result.map_err(|error| ApiError::of(&error, field))?, tickets))
}

/// A JSON response.
pub(crate) fn json(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}
