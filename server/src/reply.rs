//! One way from a request to its answer, whole or as events: admit, tokenize, submit, write.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use foretoken::{Engine, Finish, GenerateOptions, Piece, TokenLogprobs};
use hyper::body::{Bytes, Frame};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde_json::Value;
use tokio::time::{Instant as TokioInstant, Sleep, sleep};

use crate::api_error::{Api, ApiError};
use crate::app::{App, RequestId};
use crate::convert::{self, Prompt};
use crate::job::{Ended, Job, Running, Ticket, Update};

/// What a route makes of a request.
pub(crate) struct Generate {
    pub prompt: Prompt,
    /// Of the prompt, in errors.
    pub prompt_field: &'static str,
    pub options: GenerateOptions,
    pub streams: bool,
    /// Whether the answer has log-probabilities.
    pub reply: Box<dyn Reply>,
}

/// What was written so far.
pub(crate) struct Written {
    pub engine: Engine,
    /// The name of the model, as clients know it.
    pub model: String,
    /// Of the request: 32 hexadecimal digits, or what the client gave.
    pub request_id: String,
    /// Seconds since 1970.
    pub created: u64,
    pub prompt_tokens: usize,
    /// The request's.
    pub stop_strings: Vec<String>,
    pub tokens: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<TokenLogprobs>,
}

/// The shape of an answer. Events are whole lines of a `text/event-stream`.
pub(crate) trait Reply: Send {
    /// Events in front of the first token.
    fn begin(&mut self, _: &Written) -> String {
        String::new()
    }

    /// Events of a piece, which `written` has already.
    fn piece(&mut self, piece: &Piece, written: &Written) -> String;

    /// Events behind the last token.
    fn end(&mut self, written: &Written, ended: &Ended) -> String;

    /// The answer as one object.
    fn whole(&mut self, written: &Written, ended: &Ended) -> Value;

    /// Whose errors it has.
    fn api(&self) -> Api {
        Api::OpenAi
    }
}

impl Written {
    fn add(&mut self, piece: &Piece) {
        self.tokens.extend(&piece.tokens);
        self.text += &piece.text;
        self.logprobs.extend(piece.logprobs.iter().cloned());
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

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Answers a request.
///
/// # Errors
/// Everything that is known before the first token.
pub(crate) async fn answer(
    app: &Arc<App>,
    RequestId(request_id): RequestId,
    generate: Generate,
) -> Result<Response, ApiError> {
    let Generate { prompt, prompt_field, options, streams, reply } = generate;
    let ticket = app.admit()?;
    let admitted = Instant::now();
    let (prompt, ticket) =
        encode(app, ticket, prompt_field, move |app| convert::tokens(&app.engine, app.chat_template.as_ref(), prompt))
            .await?;
    let (updates, mut running) = Running::channel(&options);
    let mut written = Written {
        engine: app.engine.clone(),
        model: app.model.clone(),
        request_id: request_id.clone(),
        created: now(),
        prompt_tokens: prompt.len(),
        stop_strings: options.stop.strings.clone(),
        tokens: Vec::new(),
        text: String::new(),
        logprobs: Vec::new(),
    };
    let job = Job { prompt, options, request_id, admitted, updates, ticket };
    app.worker.submit(job).map_err(|failure| ApiError::of_failure(&failure, prompt_field))?;
    // Headers follow when the sequence is there, so that what fails until then has a status of its own.
    if let Update::Failed(failure) = running.next().await {
        return Err(ApiError::of_failure(&failure, prompt_field));
    }
    if streams {
        return Ok(events(EventBody::new(running, written, reply)));
    }
    let mut reply = reply;
    loop {
        match running.next().await {
            Update::Started => {}
            Update::Piece(piece) => written.add(&piece),
            Update::Ended(ended) => return Ok(json(&reply.whole(&written, &ended))),
            Update::Failed(failure) => return Err(ApiError::of_failure(&failure, prompt_field)),
        }
    }
}

/// Does work that takes as long as the text of the field `field` is long, not on the threads of connections. It goes on if the
/// client leaves, and keeps the request's place until it is done: so it is as bounded as requests are.
///
/// # Errors
/// Those of the work.
pub(crate) async fn encode<T: Send + 'static>(
    app: &Arc<App>,
    ticket: Ticket,
    field: &str,
    work: impl FnOnce(&App) -> foretoken::Result<T> + Send + 'static,
) -> Result<(T, Ticket), ApiError> {
    let app = app.clone();
    let done = tokio::task::spawn_blocking(move || (work(&app), ticket)).await;
    let (result, ticket) = done.map_err(|_| ApiError::internal())?;
    Ok((result.map_err(|error| ApiError::of(&error, field))?, ticket))
}

/// A JSON response.
pub(crate) fn json(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn events(body: EventBody) -> Response {
    // nginx and its kind collect what they pass on unless they are told not to.
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    (headers, [("x-accel-buffering", "no")], Body::new(body)).into_response()
}

/// A comment is sent when nothing else was for so long: a connection whose peer is gone is found by writing.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Bytes from which on what is there goes out as one frame.
const FRAME: usize = 16 << 10;

/// The events of a generation. It is polled when the connection has room; what the engine writes meanwhile waits in the
/// channel.
struct EventBody {
    running: Running,
    written: Written,
    reply: Box<dyn Reply>,
    begun: bool,
    done: bool,
    keep_alive: Pin<Box<Sleep>>,
}

impl EventBody {
    fn new(running: Running, written: Written, reply: Box<dyn Reply>) -> Self {
        let keep_alive = Box::pin(sleep(KEEP_ALIVE));
        Self { running, written, reply, begun: false, done: false, keep_alive }
    }

    fn take(&mut self, update: Update) -> String {
        match update {
            Update::Started => String::new(),
            Update::Piece(piece) => {
                self.written.add(&piece);
                self.reply.piece(&piece, &self.written)
            }
            Update::Ended(ended) => {
                self.done = true;
                self.reply.end(&self.written, &ended)
            }
            Update::Failed(failure) => {
                self.done = true;
                let api = self.reply.api();
                let body = ApiError::of_failure(&failure, "prompt").body(api, &self.written.request_id);
                match api {
                    Api::OpenAi => event(&body),
                    Api::Anthropic => format!("event: error\n{}", event(&body)),
                }
            }
        }
    }
}

impl hyper::body::Body for EventBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if this.done {
            return Poll::Ready(None);
        }
        let mut text = String::new();
        if !std::mem::replace(&mut this.begun, true) {
            text += &this.reply.begin(&this.written);
        }
        while !this.done && text.len() < FRAME {
            match this.running.poll_next(context) {
                Poll::Ready(update) => text += &this.take(update),
                Poll::Pending => break,
            }
        }
        if text.is_empty() && !this.done {
            ready!(this.keep_alive.as_mut().poll(context));
            text += ": keep-alive\n\n";
        }
        this.keep_alive.as_mut().reset(TokioInstant::now() + KEEP_ALIVE);
        match text.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Ready(Some(Ok(Frame::data(text.into())))),
        }
    }
}
