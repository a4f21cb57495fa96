//! `general.sampling.*`: the publisher's sampling parameters.

use super::Gguf;
use super::keys::Keys;
use super::metadata::Value;
use crate::Result;
use crate::checkpoint::generation::Parameters;
use crate::sampler::Sampling;

/// The sampling parameters; `None` if the file has none.
///
/// # Errors
/// If a key is malformed, or a parameter is out of its range.
pub fn sampling_defaults(gguf: &Gguf) -> Result<Option<Sampling>> {
    let keys = Keys::new(gguf, "");
    let number = |name: &str| keys.optional_number(&key(name));
    let parameters = Parameters {
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
    };
    keys.refuse_misspelt()?;
    let in_file = |name: &str| match name {
        "temperature" => key("temp"),
        "penalties.repeat" => key("penalty_repeat"),
        name => key(name),
    };
    parameters.sampling(|name, problem| keys.error(&in_file(name), problem))
}

fn key(name: &str) -> String {
    format!("general.sampling.{name}")
}
