//! `general.sampling.*`: the publisher's sampling parameters.

use std::path::Path;

use super::file::Gguf;
use super::keys::Keys;
use super::metadata::{Value, shown};
use super::writer::GgufWriter;
use crate::Result;
use crate::checkpoint::generation::{Parameters, without_mirostat, without_parameters};
use crate::sampler::Sampling;

/// Maximum length of `general.sampling.sequence`: its names are collected.
const MAX_SEQUENCE_BYTES: usize = 4096;

/// The sampling parameters; `None` if the file has none, or they are not implemented (with a warning).
///
/// # Errors
/// If a key is malformed, or a parameter is out of its range.
pub fn sampling_defaults(gguf: &Gguf) -> Result<Option<Sampling>> {
    let keys = Keys::new(gguf, "");
    let number = |name: &str| keys.optional_number(&key(name));
    let integer = |name: &str| keys.typed(&key(name), "an integer", Value::as_i64);
    if let Some(version) = number("mirostat")?.filter(|version| *version != 0.0) {
        without_mirostat(gguf.path(), &key("mirostat"), version);
        return Ok(None);
    }
    let mut parameters = Parameters {
        temperature: number("temp")?,
        // Some files use -1 for all.
        top_k: integer("top_k")?.map(|k| usize::try_from(k).unwrap_or(0)),
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        typical_p: None,
        penalty_repeat: number("penalty_repeat")?,
        // llama.cpp's default.
        penalty_last_n: integer("penalty_last_n")?.or(Some(64)),
        xtc_probability: number("xtc_probability")?,
        xtc_threshold: number("xtc_threshold")?,
    };
    let sequence = keys.typed(&key("sequence"), "a string of at most 4096 bytes", |value| {
        value.as_str().filter(|text| text.len() <= MAX_SEQUENCE_BYTES)
    });
    if let Some(sequence) = sequence? {
        let problem = |problem| format!("{} is \"{}\": {problem}", key("sequence"), shown(sequence));
        match only_those_in(sequence, &mut parameters) {
            Ok(None) => {}
            Ok(Some(unknown)) => tracing::warn!(path = %gguf.path().display(), "{}", problem(unknown)),
            Err(other) => {
                without_parameters(gguf.path(), &problem(other));
                return Ok(None);
            }
        }
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

/// Declares the parameters of the directory `source`, so that [`sampling_defaults`] reads them; those that are the
/// defaults are omitted. If a GGUF file cannot represent them, none are declared, with a warning.
///
/// # Errors
/// If the file cannot be written.
pub(crate) fn declare_sampling(file: &mut GgufWriter, source: &Path, sampling: &Sampling) -> Result<()> {
    let Sampling { temperature, top_k, top_p, min_p, typical_p, penalties, .. } = sampling;
    if *typical_p < 1.0 {
        tracing::warn!(
            path = %source.display(),
            "typical_p is {typical_p}, which a GGUF file cannot represent: no sampling parameters are written"
        );
        return Ok(());
    }
    let defaults = Sampling::default();
    file.value(&key("temp"), *temperature)?;
    if let Some(k) = top_k {
        file.value(&key("top_k"), i32::try_from(*k).unwrap_or(i32::MAX))?;
    }
    for (name, value, default) in [("top_p", *top_p, defaults.top_p), ("min_p", *min_p, defaults.min_p)] {
        if value != default {
            file.value(&key(name), value)?;
        }
    }
    if *penalties != defaults.penalties {
        file.value(&key("penalty_repeat"), penalties.repeat)?;
        file.value(&key("penalty_last_n"), penalties.last_n.map_or(-1, |n| i32::try_from(n).unwrap_or(-1)))?;
    }
    Ok(())
}

/// llama.cpp's names of its samplers, in the order in which they are applied here.
const ORDER: [&str; 9] = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"];

/// Drops the parameters of samplers that are not in the file's sequence. Names unknown to llama.cpp are
/// ignored, as there; returns a warning that lists them.
///
/// # Errors
/// If the order differs, or a sampler is not implemented.
fn only_those_in(sequence: &str, parameters: &mut Parameters) -> Result<Option<String>, String> {
    let (mut named, mut unknown) = (Vec::new(), Vec::new());
    for name in sequence.split(';').map(str::trim).filter(|name| !name.is_empty()) {
        // Alternative spellings of llama.cpp: Top-K, topk, nucleus.
        let plain = name.to_lowercase().replace(['-', '_'], "");
        let plain = match plain.as_str() {
            "nucleus" => "topp",
            "temp" => "temperature",
            "typ" => "typp",
            plain => plain,
        };
        match ORDER.iter().position(|known| known.replace('_', "") == plain) {
            Some(at) if named.last().is_some_and(|last| *last >= at) => {
                return Err(format!("only the order {} is implemented", ORDER.join(";")));
            }
            Some(at) => named.push(at),
            None if plain == "infill" => return Err("infill is not implemented".into()),
            // Inactive, because no key sets its target.
            None if plain == "adaptivep" => {}
            None => unknown.push(name),
        }
    }
    let has = |name: &str| named.iter().any(|at| ORDER[*at] == name);
    let keep = |name: &str, value: &mut Option<f64>| *value = value.filter(|_| has(name));
    keep("temperature", &mut parameters.temperature);
    keep("top_p", &mut parameters.top_p);
    keep("min_p", &mut parameters.min_p);
    keep("penalties", &mut parameters.penalty_repeat);
    keep("xtc", &mut parameters.xtc_probability);
    parameters.top_k = parameters.top_k.filter(|_| has("top_k"));
    let unknown = (!unknown.is_empty()).then(|| shown(&unknown.join(";")));
    Ok(unknown.map(|names| format!("\"{names}\" is not a llama.cpp sampler and is ignored")))
}

fn key(name: &str) -> String {
    format!("general.sampling.{name}")
}
