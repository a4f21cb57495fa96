//! The types between a route and [`answer`](crate::answer::answer): a parsed request, and the output of its choices.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::response::{IntoResponse, Response};
use foretoken::chat::{ReplyParser, ReplyPart, ToolCall};
use foretoken::{Engine, FinishReason, Piece, TokenLogprobs};
use hyper::header::CONTENT_TYPE;
use serde_json::Value;

use crate::api_error::{Api, ApiError};
use crate::generate_options::Common;
use crate::job::{Ended, Failure};
use crate::prompt::Prompt;
use crate::stop::stop_string;

/// A parsed generation request.
pub(crate) struct Generate {
    /// One or more; only completions have several.
    pub prompts: Vec<Prompt>,
    /// The name of the prompts' field, for errors.
    pub prompt_field: &'static str,
    pub common: Common,
    /// Number of choices of every prompt, each with a seed of its own.
    pub choices: usize,
    pub streams: bool,
    pub reply: Box<dyn Reply>,
}

/// The output of one choice so far.
pub(crate) struct ChoiceOutput {
    pub engine: Engine,
    /// The model's name in requests and responses.
    pub model: String,
    /// 32 hexadecimal digits, or the client's `x-request-id`.
    pub request_id: String,
    /// Unix time.
    pub created: u64,
    /// The index of its prompt.
    pub prompt: usize,
    /// The seed of the prompt's first choice.
    pub seed: u64,
    /// The name of its prompt, for errors (`prompt[1]`).
    pub prompt_name: String,
    /// The name of its constraint, for errors (`response_format.json_schema.schema`).
    pub constraint_name: String,
    pub prompt_tokens: usize,
    /// The prompt's first token.
    pub first_token: u32,
    /// Of the prompt's other tokens, if they are requested, from the first piece on.
    pub prompt_logprobs: Vec<TokenLogprobs>,
    /// Prompt tokens that the prefix cache had.
    pub cached_tokens: usize,
    /// The request's stop strings.
    pub stop_strings: Vec<String>,
    /// The choice's index, among those of all prompts.
    pub index: usize,
    pub tokens: Vec<u32>,
    /// The parts of the text in the order of generation, adjacent ones of a kind as one. Calls have ids.
    pub parts: Vec<ReplyPart>,
    /// Of all tokens; `None` of a stream, whose events have them.
    pub logprobs: Option<Vec<TokenLogprobs>>,
    pub parser: Option<ReplyParser>,
}

/// The format of a response. Events are whole lines of a `text/event-stream`.
pub(crate) trait Reply: Send {
    /// Events before a choice's first token.
    fn begin(&mut self, _: &ChoiceOutput) -> String {
        String::new()
    }

    /// Events of a piece and the parts that it completes; `output` includes them already. At the
    /// end of the text, the piece is empty.
    fn piece(&mut self, piece: &Piece, parts: &[ReplyPart], output: &ChoiceOutput) -> String;

    /// Events after a choice's last token.
    fn end(&mut self, output: &ChoiceOutput, ended: &Ended) -> String;

    /// Events after all choices.
    fn close(&mut self, _: &[ChoiceOutput]) -> String {
        String::new()
    }

    /// The response as one object.
    fn whole(&mut self, choices: &[(ChoiceOutput, Ended)]) -> Value;

    /// The event of an error, after which there are none.
    fn failed(&mut self, error: &ApiError, output: &ChoiceOutput) -> String {
        event(&error.body(Api::OpenAi, &output.request_id))
    }
}

impl ChoiceOutput {
    /// Adds a piece, and returns the parts that it completes.
    pub fn add(&mut self, piece: &Piece) -> Vec<ReplyPart> {
        self.tokens.extend(&piece.tokens);
        if !piece.prompt_logprobs.is_empty() {
            self.prompt_logprobs = piece.prompt_logprobs.clone();
        }
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend(piece.logprobs.iter().cloned());
        }
        let parts = match &mut self.parser {
            Some(parser) => parser.push(piece),
            None if piece.text.is_empty() => Vec::new(),
            None => vec![ReplyPart::Text(piece.text.clone())],
        };
        self.take(parts)
    }

    /// The parts that the end of the text completes.
    pub fn finish(&mut self) -> Vec<ReplyPart> {
        let parts = self.parser.as_mut().map(ReplyParser::finish).unwrap_or_default();
        self.take(parts)
    }

    /// Tokens of the reasoning.
    pub fn reasoning_tokens(&self) -> usize {
        self.parser.as_ref().map_or(0, ReplyParser::reasoning_tokens)
    }

    /// All texts, without control tokens; of a chat's reply without reasoning and calls.
    pub fn content(&self) -> String {
        let text = |part: &ReplyPart| if let ReplyPart::Text(text) = part { Some(text.clone()) } else { None };
        self.parts.iter().filter_map(text).collect()
    }

    /// All reasoning of a chat's reply.
    pub fn reasoning(&self) -> String {
        let text = |part: &ReplyPart| if let ReplyPart::Reasoning(text) = part { Some(text.clone()) } else { None };
        self.parts.iter().filter_map(text).collect()
    }

    pub fn calls(&self) -> impl Iterator<Item = &ToolCall> {
        self.parts.iter().filter_map(|part| if let ReplyPart::ToolCall(call) = part { Some(call) } else { None })
    }

    /// Adds the parts, and gives calls their ids.
    fn take(&mut self, mut parts: Vec<ReplyPart>) -> Vec<ReplyPart> {
        for part in &mut parts {
            if let ReplyPart::ToolCall(call) = part {
                call.id = Some(format!("call_{:024x}", rand::random::<u128>() >> 32));
            }
            match (self.parts.last_mut(), &*part) {
                (Some(ReplyPart::Text(to)), ReplyPart::Text(text))
                | (Some(ReplyPart::Reasoning(to)), ReplyPart::Reasoning(text)) => to.push_str(text),
                (_, part) => self.parts.push(part.clone()),
            }
        }
        parts
    }

    /// The log-probabilities of all tokens, of an answer that is not streamed.
    pub fn logprobs(&self) -> &[TokenLogprobs] {
        self.logprobs.as_deref().unwrap_or_default()
    }

    /// The response to a failure of its generation.
    pub fn error(&self, failure: &Failure) -> ApiError {
        ApiError::of_failure(failure, &self.prompt_name, &self.constraint_name)
    }

    /// The stop string that ended the text, if one did.
    pub fn stop_string(&self, ended: &Ended) -> Option<String> {
        let stopped = ended.finish == FinishReason::StopString;
        stopped.then(|| stop_string(&self.engine, &self.tokens, &self.stop_strings))?
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

/// A number with the digits of the 32-bit one, not those of its 64-bit neighbor.
pub(crate) fn decimal(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

/// The Unix time.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A JSON response.
pub(crate) fn json(value: &Value) -> Response {
    json_text(value.to_string())
}

/// A JSON response of a text that is JSON.
pub(crate) fn json_text(text: String) -> Response {
    ([(CONTENT_TYPE, "application/json")], text).into_response()
}
