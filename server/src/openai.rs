//! What OpenAI's generating routes have in common: fields, usage, ends.

use foretoken::Finish;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::convert;
use crate::fields::Fields;
use crate::job::Ended;
use crate::reply::{Written, event};

/// Fields that change nothing in the answer, or only how a service would account for it.
const NO_EFFECT: [&str; 9] = [
    "metadata",
    "prediction", // changes speed alone, which drafters see to here
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "cache_prompt",
];

/// How the answer is written.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    pub streams: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// Chunks have their tokens, and who wrote them.
    pub token_origins: bool,
    pub logprobs: bool,
}

/// Takes the fields that have no effect, or are implemented for one value alone.
///
/// # Errors
/// If one of them has another value.
pub(crate) fn take_inert(fields: &mut Fields) -> Result<(), ApiError> {
    fields.ignore(&NO_EFFECT);
    fields.only("min_tokens", &[json!(0)])?;
    without_mirostat(fields)?;
    fields.only("timings_per_token", &[json!(false)])?;
    fields.only("skip_special_tokens", &[json!(true)])?;
    fields.only("include_stop_str_in_output", &[json!(false)])
}

/// Takes Mirostat's fields.
///
/// # Errors
/// If it is on.
pub(crate) fn without_mirostat(fields: &mut Fields) -> Result<(), ApiError> {
    fields.only("mirostat", &[json!(0)])?;
    fields.ignore(&["mirostat_tau", "mirostat_eta"]);
    Ok(())
}

/// Takes `n`. All choices are decoded together.
///
/// # Errors
/// If it is more than that, or no number.
pub(crate) fn choices(fields: &mut Fields, parallel: usize) -> Result<usize, ApiError> {
    Ok(fields.count("n", 1..=parallel)?.unwrap_or(1))
}

/// Takes `stream`, `stream_options` and `token_origins`.
///
/// # Errors
/// If their types are wrong, or the second is given without the first.
pub(crate) fn form(fields: &mut Fields) -> Result<Form, ApiError> {
    let streams = fields.flag("stream")?.unwrap_or(false);
    let token_origins = fields.flag("token_origins")?.unwrap_or(false);
    let mut form = Form { streams, include_usage: false, token_origins, logprobs: false };
    let Some(mut options) = fields.object("stream_options")? else { return Ok(form) };
    if !streams {
        return Err(fields.error("stream_options", "is for streams; set stream to true, or leave it out"));
    }
    form.include_usage = options.flag("include_usage")?.unwrap_or(false);
    options.ignore(&["include_obfuscation"]);
    options.end()?;
    Ok(form)
}

/// Tokens of the prompt, which is read once, and of all choices.
pub(crate) fn usage<'w>(choices: impl IntoIterator<Item = &'w Written>) -> Value {
    let (mut prompt, mut cached, mut written) = (0, 0, 0);
    for choice in choices {
        prompt = choice.prompt_tokens;
        cached = cached.max(choice.cached_tokens);
        written += choice.tokens.len();
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    })
}

pub(crate) fn finish_reason(written: &Written, ended: &Ended) -> &'static str {
    match ended.finish {
        Finish::MaxTokens | Finish::Context => "length",
        _ if !written.calls.is_empty() => "tool_calls",
        _ => "stop",
    }
}

/// The last chunk of a choice: with its timings.
pub(crate) fn last_chunk(mut chunk: Value, ended: &Ended) -> String {
    chunk["timings"] = convert::timings(&ended.statistics);
    event(&chunk)
}

/// The end of a stream: a chunk without choices but with the usage if it is asked for, and `[DONE]`.
pub(crate) fn last_events(form: Form, mut empty: Value, choices: &[Written]) -> String {
    if !form.include_usage {
        return "data: [DONE]\n\n".into();
    }
    empty["usage"] = usage(choices);
    event(&empty) + "data: [DONE]\n\n"
}
