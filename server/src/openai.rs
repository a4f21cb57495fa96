//! What OpenAI's generating routes share: fields, usage, finish reasons.

use foretoken::FinishReason;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;
use crate::job::Ended;
use crate::reply::{ChoiceOutput, event};
use crate::timings::timings;

/// Options of the response's format.
#[derive(Clone, Copy)]
pub(crate) struct Form {
    pub streams: bool,
    /// Whether a last chunk has the usage.
    pub include_usage: bool,
    /// Whether every chunk has the usage so far.
    pub continuous_usage: bool,
    /// Whether chunks have their tokens, and which were drafted.
    pub token_origins: bool,
    pub logprobs: bool,
}

/// Takes `n`, and a `best_of` that selects none of them. All choices are decoded in one batch.
///
/// # Errors
/// If it is more than `parallel`, or not a number; or if `best_of` is another one.
pub(crate) fn choices(fields: &mut Fields, parallel: usize) -> Result<usize, ApiError> {
    let choices = fields.count("n", 1..=parallel)?.unwrap_or(1);
    fields.only("best_of", &[json!(choices)])?;
    Ok(choices)
}

/// Takes `stream`, `stream_options` and `token_origins`.
///
/// # Errors
/// If their types are wrong, or the second is given without the first.
pub(crate) fn form(fields: &mut Fields) -> Result<Form, ApiError> {
    let streams = fields.flag("stream")?.unwrap_or(false);
    let token_origins = fields.flag("token_origins")?.unwrap_or(false);
    let mut form = Form { streams, include_usage: false, continuous_usage: false, token_origins, logprobs: false };
    let Some(mut options) = fields.object("stream_options")? else { return Ok(form) };
    if !streams {
        return Err(fields.error("stream_options", "is allowed only with stream: true"));
    }
    form.include_usage = options.flag("include_usage")?.unwrap_or(false);
    form.continuous_usage = options.flag("continuous_usage_stats")?.unwrap_or(false) && form.include_usage;
    options.ignore(&["include_obfuscation"]);
    options.end()?;
    Ok(form)
}

/// Tokens of the prompts, each of which is prefilled once, and of all choices, which are sorted by prompts.
pub(crate) fn usage<'w>(choices: impl IntoIterator<Item = &'w ChoiceOutput>) -> Value {
    let (mut prompt, mut cached, mut output, mut reasoning, mut last) = (0, 0, 0, 0, None);
    for choice in choices {
        if last.replace(choice.prompt) != Some(choice.prompt) {
            prompt += choice.prompt_tokens;
            cached += choice.cached_tokens; // of the first choice: it reads the prompt
        }
        output += choice.tokens.len();
        reasoning += choice.reasoning_tokens();
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

pub(crate) fn finish_reason(output: &ChoiceOutput, ended: &Ended) -> &'static str {
    match ended.finish {
        FinishReason::MaxTokens | FinishReason::Context => "length",
        _ if output.calls().next().is_some() => "tool_calls",
        _ => "stop",
    }
}

/// What responses and chunks have in common: an id that begins with `prefix`, and their type `kind`.
pub(crate) fn object(output: &ChoiceOutput, (prefix, kind): (&str, &str), choices: Value) -> Value {
    json!({
        "id": format!("{prefix}-{}", output.request_id),
        "object": kind,
        "created": output.created,
        "model": output.model,
        "choices": choices,
    })
}

/// An object of a stream: with the usage so far, or none yet, if it is requested.
pub(crate) fn chunk(form: Form, output: &ChoiceOutput, mut object: Value) -> Value {
    if form.include_usage {
        object["usage"] = if form.continuous_usage { usage([output]) } else { Value::Null };
    }
    object
}

/// The response that is not streamed: with the usage, and the first choice's timings.
pub(crate) fn whole(choices: &[(ChoiceOutput, Ended)], mut object: Value) -> Value {
    object["usage"] = usage(choices.iter().map(|(output, _)| output));
    object["timings"] = timings(&choices[0].1.statistics);
    object
}

/// The last chunk of a choice, with its timings.
pub(crate) fn last_chunk(mut chunk: Value, ended: &Ended) -> String {
    chunk["timings"] = timings(&ended.statistics);
    event(&chunk)
}

/// The end of a stream: a chunk with the usage and without choices if it is requested, and `[DONE]`.
pub(crate) fn last_events(form: Form, mut empty: Value, choices: &[ChoiceOutput]) -> String {
    if !form.include_usage {
        return "data: [DONE]\n\n".into();
    }
    empty["usage"] = usage(choices);
    event(&empty) + "data: [DONE]\n\n"
}
