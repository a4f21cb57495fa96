//! Fields of OpenAI's, vLLM's and llama.cpp's requests that have no effect, or that are supported with one value only.

use serde_json::json;

use crate::api_error::ApiError;
use crate::fields::Fields;

/// Accepted with any value: they do not change the text, or are parameters of samplers that are off.
const NO_EFFECT: [&str; 23] = [
    "cache_prompt",
    "dry_allowed_length",
    "dry_base",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dynatemp_exponent",
    "id_slot",
    "metadata",
    "mirostat_eta",
    "mirostat_tau",
    "n_keep",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_format",
    "return_progress",
    "safety_identifier",
    "service_tier",
    "store",
    "timings_per_token",
    "user",
    "verbosity",
    "xtc_threshold",
];

/// Takes the fields that every generating route ignores, and those that it supports with their neutral value only.
///
/// # Errors
/// If one of the latter has another value.
pub(crate) fn take_ignored(fields: &mut Fields) -> Result<(), ApiError> {
    fields.ignore(&NO_EFFECT);
    let neutral = [
        ("add_generation_prompt", json!(true)),
        ("best_of", json!(1)),
        ("continue_final_message", json!(false)),
        ("dry_multiplier", json!(0)),
        ("dynatemp_range", json!(0)),
        ("echo", json!(false)),
        ("functions", json!([])),
        ("image_data", json!([])),
        ("include_stop_str_in_output", json!(false)),
        ("length_penalty", json!(1)),
        ("min_keep", json!(0)),
        ("min_tokens", json!(0)),
        ("mirostat", json!(0)),
        ("post_sampling_probs", json!(false)),
        ("skip_special_tokens", json!(true)),
        ("spaces_between_special_tokens", json!(true)),
        ("suffix", json!("")),
        ("top_n_sigma", json!(-1)),
        ("typical_p", json!(1)),
        ("use_beam_search", json!(false)),
        ("xtc_probability", json!(0)),
    ];
    neutral.into_iter().try_for_each(|(field, value)| fields.only(field, &[value]))
}
