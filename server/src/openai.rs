//! What OpenAI's two generating routes have in common: fields, usage, ends.

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

/// Whether the answer is streamed, and with what.
#[derive(Clone, Copy)]
pub(crate) struct Streaming {
    pub streams: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
}

/// Takes the fields that have no effect, or are implemented for one value alone.
///
/// # Errors
/// If one of them has another value.
pub(crate) fn take_inert(fields: &mut Fields) -> Result<(), ApiError> {
    fields.ignore(&NO_EFFECT);
    fields.only("logit_bias", &[json!({}), json!([])])?;
    fields.only("n", &[json!(1)])?;
    fields.only("min_tokens", &[json!(0)])?;
    fields.only("timings_per_token", &[json!(false)])?;
    fields.only("skip_special_tokens", &[json!(true)])?;
    fields.only("include_stop_str_in_output", &[json!(false)])
}

/// Takes `stream` and `stream_options`.
///
/// # Errors
/// If their types are wrong, or the second is given without the first.
pub(crate) fn streaming(fields: &mut Fields) -> Result<Streaming, ApiError> {
    let streams = fields.flag("stream")?.unwrap_or(false);
    let Some(mut options) = fields.object("stream_options")? else {
        return Ok(Streaming { streams, include_usage: false });
    };
    if !streams {
        return Err(fields.error("stream_options", "is for streams; set stream to true, or leave it out"));
    }
    let include_usage = options.flag("include_usage")?.unwrap_or(false);
    options.ignore(&["include_obfuscation"]);
    options.end()?;
    Ok(Streaming { streams, include_usage })
}

pub(crate) fn usage(written: &Written) -> Value {
    json!({
        "prompt_tokens": written.prompt_tokens,
        "completion_tokens": written.tokens.len(),
        "total_tokens": written.prompt_tokens + written.tokens.len(),
    })
}

pub(crate) fn finish_reason(ended: &Ended) -> &'static str {
    match ended.finish {
        Finish::MaxTokens | Finish::Context => "length",
        _ => "stop",
    }
}

/// The end of a stream: the last chunk with its timings, one without choices but with the usage if it is asked for, and `[DONE]`.
pub(crate) fn last_events(
    streaming: Streaming,
    [mut last, mut empty]: [Value; 2],
    written: &Written,
    ended: &Ended,
) -> String {
    last["timings"] = convert::timings(&ended.statistics);
    let mut events = event(&last);
    if streaming.include_usage {
        empty["usage"] = usage(written);
        events += &event(&empty);
    }
    events + "data: [DONE]\n\n"
}
