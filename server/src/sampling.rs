//! The sampling parameters of requests.

use foretoken::Sampling;
use foretoken::sampler::{Dry, Penalties, Xtc};

use crate::api_error::{ApiError, Result};
use crate::fields::Fields;

/// Takes the sampling parameters, under OpenAI's, vLLM's and llama.cpp's names. `base` has those that the request
/// does not set.
///
/// # Errors
/// If one is not a number, or out of its range.
pub(crate) fn sampling(fields: &mut Fields, base: &Sampling) -> Result<Sampling> {
    let repeat_name = ["repeat_penalty", "repetition_penalty"].into_iter().find(|name| fields.peek(name).is_some());
    let mut number = |field: &str| real(fields, field);
    let temperature = number("temperature")?.unwrap_or(base.temperature);
    // 0 keeps the most probable token, in OpenAI's API.
    let top_p = number("top_p")?.map_or(base.top_p, |p| if p == 0.0 { f32::MIN_POSITIVE } else { p });
    let min_p = number("min_p")?.unwrap_or(base.min_p);
    let top_k = match fields.integer("top_k")? {
        None => base.top_k,
        Some(-1 | 0) => None, // all, as in vLLM and llama.cpp
        Some(k) => match usize::try_from(k) {
            Ok(k) => Some(k),
            Err(_) => {
                return Err(fields.error("top_k", format!("is {k}, must be at least 1, or 0 or -1 for all tokens")));
            }
        },
    };
    let typical_p = real(fields, "typical_p")?.unwrap_or(base.typical_p);
    // Off at 0 and below, as in llama.cpp.
    let top_n_sigma = real(fields, "top_n_sigma")?.map_or(base.top_n_sigma, |n| (n > 0.0).then_some(n));
    let (penalties, xtc) = (penalties(fields, base.penalties)?, xtc(fields, base.xtc)?);
    let dry = dry(fields, base.dry.as_ref())?;
    let sampling = Sampling { penalties, dry, top_n_sigma, top_k, typical_p, top_p, min_p, xtc, temperature };
    sampling.check().map_err(|error| match (&error, repeat_name) {
        (foretoken::Error::Argument { name: "penalties.repeat", problem }, Some(name)) => fields.error(name, problem),
        _ => ApiError::of(&error, "prompt"),
    })?;
    Ok(sampling)
}

/// OpenAI's penalties, vLLM's `repetition_penalty` and llama.cpp's names.
fn penalties(fields: &mut Fields, base: Penalties) -> Result<Penalties> {
    let mut number = |field: &str| real(fields, field);
    let frequency = number("frequency_penalty")?.unwrap_or(base.frequency);
    let presence = number("presence_penalty")?.unwrap_or(base.presence);
    let (own, of_vllm) = (number("repeat_penalty")?, number("repetition_penalty")?);
    let repeat = own.or(of_vllm).unwrap_or(base.repeat);
    // vLLM's counts the whole context.
    let last = if own.is_none() && of_vllm.is_some_and(|by| by != 1.0) { None } else { base.last_n };
    Ok(Penalties { repeat, frequency, presence, last_n: last_n(fields, "repeat_last_n", last)? })
}

/// A number of last tokens; -1 is all.
fn last_n(fields: &mut Fields, field: &str, base: Option<usize>) -> Result<Option<usize>> {
    match fields.integer(field)? {
        None => Ok(base),
        Some(-1) => Ok(None),
        Some(n) => match usize::try_from(n) {
            Ok(n) => Ok(Some(n)),
            Err(_) => Err(fields.error(field, format!("is {n}, must be at least 0, or -1 for all tokens"))),
        },
    }
}

/// llama.cpp's parameters of DRY, without its sequence breakers. A multiplier of 0 turns it off.
fn dry(fields: &mut Fields, base: Option<&Dry>) -> Result<Option<Dry>> {
    let off = Dry { multiplier: 0.0, ..Dry::default() };
    let given = base.unwrap_or(&off);
    let multiplier = real(fields, "dry_multiplier")?.unwrap_or(given.multiplier);
    if multiplier == 0.0 {
        // Clients send the parameters of samplers that are off, whatever they are.
        for name in ["dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"] {
            fields.value(name);
        }
        return Ok(None);
    }
    // Below 1, llama.cpp takes its default.
    let growth = real(fields, "dry_base")?.filter(|base| *base >= 1.0).unwrap_or(given.base);
    let allowed_length = fields.count("dry_allowed_length", 0..=usize::MAX)?.unwrap_or(given.allowed_length);
    let last_n = last_n(fields, "dry_penalty_last_n", given.last_n)?;
    Ok(Some(Dry { multiplier, base: growth, allowed_length, last_n, breakers: given.breakers.clone() }))
}

/// llama.cpp's `xtc_probability` and `xtc_threshold`. A threshold above 0.5 turns it off there, too.
fn xtc(fields: &mut Fields, base: Option<Xtc>) -> Result<Option<Xtc>> {
    let (probability, threshold) = (real(fields, "xtc_probability")?, real(fields, "xtc_threshold")?);
    let given = base.unwrap_or(Xtc { probability: 0.0, ..Xtc::default() });
    let xtc =
        Xtc { probability: probability.unwrap_or(given.probability), threshold: threshold.unwrap_or(given.threshold) };
    Ok(Some(xtc).filter(|xtc| xtc.probability != 0.0 && xtc.threshold <= 0.5))
}

/// A number as the library's 32-bit one.
fn real(fields: &mut Fields, field: &str) -> Result<Option<f32>> {
    match fields.number(field)? {
        Some(number) if !(number as f32).is_finite() => {
            Err(fields.error(field, format!("is {number:e}, outside the range of 32-bit numbers, \u{b1}3.4e38")))
        }
        number => Ok(number.map(|number| number as f32)),
    }
}
