//! `general.sampling.*`: the publisher's sampling parameters.

use super::Gguf;
use super::keys::Keys;
use super::metadata::{Value, shown};
use crate::Result;
use crate::checkpoint::generation::{Parameters, without_mirostat};
use crate::sampler::Sampling;

/// The sampling parameters; `None` if the file has none, or has Mirostat.
///
/// # Errors
/// If a key is malformed, or a parameter is out of its range.
pub fn sampling_defaults(gguf: &Gguf) -> Result<Option<Sampling>> {
    let keys = Keys::new(gguf, "");
    let number = |name: &str| keys.optional_number(&key(name));
    if let Some(version) = number("mirostat")?.filter(|version| *version != 0.0) {
        without_mirostat(gguf.path(), &key("mirostat"), version);
        return Ok(None);
    }
    let mut parameters = Parameters {
        temperature: number("temp")?,
        top_k: keys.optional_size(&key("top_k"))?,
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        typical_p: None,
        penalty_repeat: number("penalty_repeat")?,
        penalty_last_n: keys
            .typed(&key("penalty_last_n"), "an integer", |value| match value {
                Value::I32(n) => Some(n.into()),
                value => value.as_u64()?.try_into().ok(),
            })?
            // llama.cpp's default.
            .or(Some(64)),
        xtc_probability: number("xtc_probability")?,
        xtc_threshold: number("xtc_threshold")?,
    };
    if let Some(sequence) = keys.optional_str(&key("sequence"))? {
        only_those_in(sequence, &mut parameters)
            .map_err(|problem| keys.unsupported(&key("sequence"), format!("is {sequence:?}: {problem}")))?;
    }
    keys.refuse_misspelt()?;
    let in_file = |name: &str| match name {
        "temperature" => key("temp"),
        "penalties.repeat" => key("penalty_repeat"),
        "xtc.probability" => key("xtc_probability"),
        "xtc.threshold" => key("xtc_threshold"),
        name => key(name),
    };
    parameters.sampling(|name, problem| keys.error(&in_file(name), problem))
}

/// llama.cpp's names of its samplers, in the order in which they apply here.
const ORDER: [&str; 9] = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// Leaves out the parameters of samplers that the file's own sequence has not.
///
/// # Errors
/// If they are to apply in another order, or one is unknown.
fn only_those_in(sequence: &str, parameters: &mut Parameters) -> Result<(), String> {
    let mut named = Vec::new();
    for name in sequence.split(';').map(str::trim).filter(|name| !name.is_empty()) {
        let at = ORDER.iter().position(|known| *known == name);
        let at = at.ok_or_else(|| format!("{:?} is no sampler that is implemented", shown(name)))?;
        if named.last().is_some_and(|last| *last >= at) {
            return Err(format!("the order {} is the one that is implemented", ORDER.join(";")));
        }
        named.push(at);
    }
    let has = |name: &str| named.iter().any(|at| ORDER[*at] == name);
    let keep = |name: &str, value: &mut Option<f64>| *value = value.filter(|_| has(name));
    keep("temperature", &mut parameters.temperature);
    keep("top_p", &mut parameters.top_p);
    keep("min_p", &mut parameters.min_p);
    keep("penalties", &mut parameters.penalty_repeat);
    keep("xtc", &mut parameters.xtc_probability);
    parameters.top_k = parameters.top_k.filter(|_| has("top_k"));
    Ok(())
}

fn key(name: &str) -> String {
    format!("general.sampling.{name}")
}
