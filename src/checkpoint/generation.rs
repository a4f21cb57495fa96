//! `generation_config.json`: end-of-generation tokens, and the publisher's sampling parameters.

use std::path::Path;

use serde_json::Value;

use super::fields::Fields;
use crate::sampler::{Penalties, Sampling, Xtc};
use crate::{Error, Result};

/// End-of-generation tokens and suppressed tokens of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationTokens {
    /// End-of-generation tokens.
    pub end: Vec<u32>,
    /// Tokens that are never generated.
    pub suppressed: Vec<u32>,
}

const FILE: &str = "generation_config.json";

/// The end-of-generation and suppressed tokens.
///
/// # Errors
/// If the file is malformed.
pub(super) fn tokens(directory: &Path) -> Result<GenerationTokens> {
    let Some(fields) = Fields::read_if_present(directory.join(FILE))? else { return Ok(GenerationTokens::default()) };
    let (end, suppressed) = (fields.token_ids("eos_token_id")?, fields.token_ids("suppress_tokens")?);
    fields.refuse_misspelt()?;
    Ok(GenerationTokens { end, suppressed })
}

/// The sampling parameters; `None` if the file has none, uses Mirostat, or has `do_sample: false`.
///
/// # Errors
/// If the file is malformed, or a parameter is out of its range.
pub(super) fn sampling(directory: &Path) -> Result<Option<Sampling>> {
    let Some(fields) = Fields::read_if_present(directory.join(FILE))? else { return Ok(None) };
    let number = |name: &str| fields.optional_number(name);
    for name in ["mirostat", "mirostat_mode"] {
        if let Some(version) = number(name)?.filter(|version| *version != 0.0) {
            without_mirostat(&directory.join(FILE), name, version);
            return Ok(None);
        }
    }
    let parameters = Parameters {
        temperature: number("temperature")?,
        // Some files use -1 for all.
        top_k: number("top_k")?.map(|k| if k < 0.0 { 0 } else { k as usize }),
        top_p: number("top_p")?,
        min_p: number("min_p")?,
        typical_p: number("typical_p")?,
        // Over the whole context, as in transformers.
        penalty_repeat: number("repetition_penalty")?,
        penalty_last_n: None,
        xtc_probability: None,
        xtc_threshold: None,
    };
    let do_sample = fields.optional_flag("do_sample")?;
    fields.refuse_misspelt()?;
    // Omitted where it is transformers' default.
    let temperature = parameters.temperature.or(do_sample.and_then(|does| does.then_some(1.0)));
    let parameters = Parameters { temperature, ..parameters };
    match do_sample {
        Some(false) => Ok(None),
        _ => parameters.sampling(|name, problem| {
            fields.error(if name == "penalties.repeat" { "repetition_penalty" } else { name }, problem)
        }),
    }
}

/// The fields of the sampling parameters of the file `source`; none, with a warning, if
/// transformers has no such parameters.
pub(super) fn sampling_fields(source: &Path, sampling: &Sampling) -> Vec<(&'static str, Value)> {
    let Sampling { temperature, top_k, top_p, min_p, typical_p, penalties, xtc, .. } = sampling;
    let over_all = penalties.last_n.is_none() || penalties.repeat == 1.0;
    let lacking = [("XTC", xtc.is_some()), ("a penalty of the last tokens", !over_all)];
    if let Some((problem, _)) = lacking.into_iter().find(|(_, is_used)| *is_used) {
        tracing::warn!(
            path = %source.display(),
            "{problem} is not a parameter of generation_config.json: no sampling parameters are written"
        );
        return Vec::new();
    }
    // The shortest decimal that is the number in single precision.
    let number = |x: f32| x.to_string().parse::<f64>().map_or(Value::Null, Value::from);
    let mut fields = vec![
        ("do_sample", true.into()),
        ("temperature", number(*temperature)),
        ("top_k", top_k.unwrap_or(0).into()),
        ("top_p", number(*top_p)),
        ("min_p", number(*min_p)),
        ("typical_p", number(*typical_p)),
    ];
    fields.extend((penalties.repeat != 1.0).then(|| ("repetition_penalty", number(penalties.repeat))));
    fields
}

/// Warns that the parameters of a file with Mirostat are ignored.
pub(super) fn without_mirostat(path: &Path, key: &str, version: f64) {
    without_parameters(path, &format!("{key} is {version}: Mirostat is not implemented"));
}

/// Warns that a file's parameters are ignored because of `problem`. A subset of them would be another sampler than the
/// publisher's, and is no reason to refuse the weights.
pub(super) fn without_parameters(path: &Path, problem: &str) {
    tracing::warn!(
        path = %path.display(),
        "{problem}, and the file's sampling parameters are not used; set temperature, top_p or min_p"
    );
}

/// Sampling parameters as found in files.
pub(super) struct Parameters {
    pub(super) temperature: Option<f64>,
    /// 0 keeps all.
    pub(super) top_k: Option<usize>,
    pub(super) top_p: Option<f64>,
    pub(super) min_p: Option<f64>,
    pub(super) typical_p: Option<f64>,
    pub(super) penalty_repeat: Option<f64>,
    /// Number of tokens; -1 is all, and so is `None`.
    pub(super) penalty_last_n: Option<i64>,
    pub(super) xtc_probability: Option<f64>,
    pub(super) xtc_threshold: Option<f64>,
}

impl Parameters {
    /// The parameters; a temperature of 1 and no filters if absent; `None` if all are absent.
    ///
    /// # Errors
    /// If one is out of its range: `error` of its name and the problem.
    pub(super) fn sampling(self, error: impl FnOnce(&str, String) -> Error) -> Result<Option<Sampling>> {
        let Self { temperature, top_k, top_p, min_p, typical_p, penalty_repeat, penalty_last_n, .. } = self;
        // A penalty alone does not imply sampling.
        let numbers = [temperature, top_p, min_p, typical_p];
        if top_k.is_none() && numbers.iter().all(Option::is_none) {
            return Ok(None);
        }
        let last_n = penalty_last_n.and_then(|n| usize::try_from(n).ok());
        let penalties = Penalties { repeat: penalty_repeat.unwrap_or(1.0) as f32, last_n, ..Penalties::default() };
        let sampling = Sampling {
            // The default without a penalty.
            penalties: if penalty_repeat.is_some() { penalties } else { Penalties::default() },
            temperature: temperature.unwrap_or(1.0) as f32,
            top_k: top_k.filter(|k| *k > 0),
            top_p: top_p.unwrap_or(1.0) as f32,
            min_p: min_p.unwrap_or(0.0) as f32,
            typical_p: typical_p.unwrap_or(1.0) as f32,
            xtc: self.xtc_probability.filter(|probability| *probability != 0.0).map(|probability| Xtc {
                probability: probability as f32,
                threshold: self.xtc_threshold.map_or(Xtc::default().threshold, |threshold| threshold as f32),
            }),
            ..Sampling::default()
        };
        match sampling.check() {
            Ok(()) => Ok(Some(sampling).filter(|sampling| sampling.temperature > 0.0)),
            Err(Error::Argument { name, problem }) => Err(error(name, problem)),
            Err(other) => Err(other),
        }
    }
}
