//! Error responses, in the format of the API that was called.

use axum::response::{IntoResponse, Response};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use crate::job::Failure;

/// What a route returns, or a part of it.
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// `Retry-After` of 429 and 503.
const RETRY_AFTER_SECONDS: u64 = 1;

/// An error response. The middleware writes its body ([`ApiError::body`]), because formats differ by route.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    /// One line, with the field, the limit and the remedy.
    pub message: String,
    /// The field of the request, with its path (`messages[0].role`).
    pub param: Option<String>,
    /// A machine-readable code (`context_length_exceeded`).
    pub code: Option<&'static str>,
    /// The message of Anthropic's routes, if it differs: their clients recognize a full context by its words, OpenAI's by
    /// `code`.
    pub anthropic_message: Option<String>,
}

impl ApiError {
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, anthropic_message: None }
    }

    /// 400 for the field `param`, whose name begins the message.
    pub fn field(param: impl Into<String>, problem: impl AsRef<str>) -> Self {
        let param = param.into();
        let message = format!("{param}: {}", problem.as_ref());
        Self { param: Some(param), ..Self::new(StatusCode::BAD_REQUEST, message) }
    }

    pub fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// 429: the queue is full.
    pub fn queue_full(limit: usize) -> Self {
        let message =
            format!("the queue is full: {limit} requests are running or waiting; retry later, or raise --max-queue");
        Self::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("queue_full")
    }

    /// 503: the server is shutting down.
    pub fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the server is shutting down").with_code("stopping")
    }

    /// 500, without the cause, which may contain the client's text.
    pub fn internal() -> Self {
        let message = "internal server error; the server's log has more under this response's x-request-id";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The engine thread has ended after a panic.
    pub fn engine_stopped(status: StatusCode) -> Self {
        Self::new(status, "the engine thread has stopped after an internal error; restart the server")
            .with_code("engine_stopped")
    }

    /// 503: the device failed the last requests.
    pub fn device_lost() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "the device failed the last requests; restart the server")
            .with_code("device_lost")
    }

    /// The response to a request that the library failed. `prompt` is the field of the prompt.
    pub fn of(error: &foretoken::Error, prompt: &str) -> Self {
        use foretoken::Error as E;
        match error {
            E::Argument { name, problem } => Self::field(field_of(name, prompt), problem),
            E::Context { needed, limit } => {
                let remedy = "shorten the prompt or raise the server's --context";
                let anthropic_message =
                    Some(format!("prompt is too long: {needed} tokens > {limit} maximum; {remedy}"));
                let problem = format!("{needed} tokens do not fit the context of {limit}; {remedy}");
                Self { anthropic_message, ..Self::field(prompt, problem).with_code("context_length_exceeded") }
            }
            E::Template(_) | E::Tokenizer(_) => Self::field(prompt, error.to_string()),
            E::Memory { .. } => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()).with_code("out_of_memory")
            }
            _ => Self::internal(),
        }
    }

    /// The response to a request whose constraint, the field `field`, cannot be used.
    pub fn of_constraint(error: &foretoken::Error, field: &str) -> Self {
        match error {
            foretoken::Error::Argument { name: "constraint", problem } => Self::field(field, problem),
            // The checkpoint's tokenizer has no known decoder, or no tokens that mark calls.
            foretoken::Error::Unsupported { .. } => {
                Self::field(field, error.to_string()).with_code("unsupported_parameter")
            }
            error => Self::of(error, field),
        }
    }

    /// The response to a request whose generation failed. `prompt` and `constraint` are the fields of both.
    pub fn of_failure(failure: &Failure, prompt: &str, constraint: &str) -> Self {
        match failure {
            Failure::Library(error) => match &**error {
                foretoken::Error::Argument { name: "constraint", .. } => Self::of_constraint(error, constraint),
                error => Self::of(error, prompt),
            },
            Failure::Stopping => Self::stopping(),
            Failure::Panic => Self::internal(),
            Failure::EngineStopped => Self::engine_stopped(StatusCode::INTERNAL_SERVER_ERROR),
        }
    }

    /// OpenAI's type of the error.
    pub fn openai_type(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_IMPLEMENTED => "not_supported_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The body in the format of the API.
    pub fn body(&self, api: Api, request_id: &str) -> Value {
        match api {
            Api::OpenAi => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Api::Anthropic => json!({
                "type": "error",
                "error": {
                    "type": anthropic_type(self.status),
                    "message": self.anthropic_message.as_ref().unwrap_or(&self.message),
                },
                "request_id": request_id,
            }),
        }
    }

    /// Status, headers and body.
    pub fn response(&self, api: Api, request_id: &str) -> Response {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            headers.insert(RETRY_AFTER, HeaderValue::from(RETRY_AFTER_SECONDS));
        }
        (self.status, headers, self.body(api, request_id).to_string()).into_response()
    }
}

/// Stored in an extension of an empty response, from which the middleware writes the body.
impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// The API of a request, whose format its errors have. llama.cpp's routes use OpenAI's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    OpenAi,
    Anthropic,
}

impl Api {
    /// The API of a request to `path`. Both have `/v1/models`, but only Anthropic's clients send a version.
    pub fn of_request(path: &str, headers: &HeaderMap) -> Self {
        let is_shared = path.starts_with("/v1/models");
        let is_anthropic = path.starts_with("/v1/messages") || (is_shared && headers.contains_key("anthropic-version"));
        if is_anthropic { Self::Anthropic } else { Self::OpenAi }
    }
}

/// The request's field for an argument of the library.
fn field_of<'a>(argument: &'a str, prompt: &'a str) -> &'a str {
    match argument {
        "block" => "speculative.draft_block_size",
        "drafters" => "speculative.type",
        "logits_processor" => "logit_bias",
        "prompt" => prompt,
        "stop.strings" => "stop",
        "penalties.repeat" => "repeat_penalty",
        "penalties.frequency" => "frequency_penalty",
        "penalties.presence" => "presence_penalty",
        "dry.multiplier" => "dry_multiplier",
        "dry.base" => "dry_base",
        "dry.allowed_length" => "dry_allowed_length",
        "xtc.probability" => "xtc_probability",
        "xtc.threshold" => "xtc_threshold",
        other => other,
    }
}

fn anthropic_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}
