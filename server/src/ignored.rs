//! Fields of OpenAI's, vLLM's and llama.cpp's requests that have no effect, or that are supported
//! with some values only.

use foretoken::Sampling;
use foretoken::sampler::Penalties;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::fields::Fields;

/// Accepted with any value: they do not change the text, or are parameters of samplers that are off.
const NO_EFFECT: [&str; 24] = [
    "adaptive_decay",
    "backend_sampling",
    "cache_prompt",
    "dynatemp_exponent",
    "id_slot",
    "metadata",
    "mirostat_eta",
    "mirostat_tau",
    "n_cache_reuse",
    "n_discard",
    "n_keep",
    "prediction",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "reasoning_format",
    "return_progress",
    "safety_identifier",
    "service_tier",
    "store",
    "timings_per_token",
    "user",
    "verbosity",
];

/// Takes the fields that every generating route ignores, and those that it supports with their neutral values only.
///
/// # Errors
/// If one of the latter has another value.
pub(crate) fn take_ignored(fields: &mut Fields, sampling: &Sampling) -> Result<(), ApiError> {
    fields.ignore(&NO_EFFECT);
    let neutral = [
        ("adaptive_target", json!([-1])),
        ("add_generation_prompt", json!([true])),
        ("bad_words", json!([[]])),
        ("best_of", json!([1])),
        ("continue_final_message", json!([false])),
        ("dynatemp_range", json!([0])),
        ("echo", json!([false])),
        ("function_call", json!(["none", "auto"])), // `functions` has none
        ("functions", json!([[]])),
        ("image_data", json!([[]])),
        ("include_stop_str_in_output", json!([false])),
        ("length_penalty", json!([1])),
        ("lora", json!([[]])),
        ("min_keep", json!([0, 1])), // one token is always kept
        ("mirostat", json!([0])),
        ("n_indent", json!([0])),
        ("post_sampling_probs", json!([false])),
        ("return_token_ids", json!([false])),
        ("return_tokens_as_token_ids", json!([false])),
        ("skip_special_tokens", json!([true])),
        ("spaces_between_special_tokens", json!([true])),
        ("suffix", json!([""])),
        ("t_max_predict_ms", json!([0, -1])),
        ("tfs_z", json!([1])),
        ("use_beam_search", json!([false])),
    ];
    for (field, allowed) in neutral {
        fields.only(field, allowed.as_array().map_or(&[], Vec::as_slice))?;
    }
    samplers(fields, sampling)
}

/// llama.cpp's samplers in the order in which they are applied, with their letters.
const SAMPLERS: [(&str, char); 9] = [
    ("penalties", 'e'),
    ("dry", 'd'),
    ("top_n_sigma", 's'),
    ("top_k", 'k'),
    ("typ_p", 'y'),
    ("top_p", 'p'),
    ("min_p", 'm'),
    ("xtc", 'x'),
    ("temperature", 't'),
];

/// The index in [`SAMPLERS`] of a sampler.
fn position(name: &str) -> Option<usize> {
    SAMPLERS.iter().position(|(known, _)| *known == name || name == "typical_p" && *known == "typ_p")
}

/// Those of `samplers`, names in an array or letters in a string; `None` if one is unknown.
fn positions(samplers: &Value) -> Option<Vec<usize>> {
    match samplers {
        Value::String(letters) => {
            letters.chars().map(|letter| SAMPLERS.iter().position(|(_, known)| *known == letter)).collect()
        }
        Value::Array(names) => names.iter().map(|name| position(name.as_str()?)).collect(),
        _ => None,
    }
}

/// `sampling` with the samplers at `places` only: in llama.cpp others are off. The temperature is always in use.
fn only(places: &[usize], sampling: &Sampling) -> Sampling {
    let (mut own, off) = (sampling.clone(), Sampling::default());
    for (_, (name, _)) in SAMPLERS.iter().enumerate().filter(|(i, _)| !places.contains(i)) {
        match *name {
            "penalties" => own.penalties = Penalties { last_n: own.penalties.last_n, ..off.penalties },
            "dry" => own.dry = None,
            "top_n_sigma" => own.top_n_sigma = None,
            "top_k" => own.top_k = None,
            "typ_p" => own.typical_p = off.typical_p,
            "top_p" => own.top_p = off.top_p,
            "min_p" => own.min_p = off.min_p,
            "xtc" => own.xtc = None,
            _ => {}
        }
    }
    own
}

/// The server's `defaults`, without the samplers that the request's `samplers` leave out.
pub(crate) fn defaults_in_use(fields: &Fields, defaults: &Sampling) -> Sampling {
    let places = fields.peek("samplers").and_then(positions);
    places.map_or_else(|| defaults.clone(), |places| only(&places, defaults))
}

/// Takes llama.cpp's `samplers`: their order is fixed, and one that is left out must be off.
fn samplers(fields: &mut Fields, sampling: &Sampling) -> Result<(), ApiError> {
    let places = match fields.value("samplers") {
        None => return Ok(()),
        Some(given @ (Value::String(_) | Value::Array(_))) => positions(&given),
        Some(other) => return Err(fields.mismatch("samplers", &other, "an array of names")),
    };
    let in_use = |places: &Vec<usize>| {
        let is_in_order = places.is_sorted_by(|a, b| a < b) && places.last() == position("temperature").as_ref();
        is_in_order && only(places, sampling) == *sampling
    };
    match places.filter(in_use) {
        Some(_) => Ok(()),
        None => {
            let order = SAMPLERS.map(|(name, _)| name).join(", ");
            let problem = format!("must have the samplers in use, in the order {order}; omit it");
            Err(fields.error("samplers", problem).with_code("unsupported_parameter"))
        }
    }
}
