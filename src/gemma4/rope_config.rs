//! `rope_parameters` of config.json.

use crate::Result;
use crate::checkpoint::Fields;

/// Rotary parameters of one attention type.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Share of the pairs that rotate (`proportional`), 1 for `default` and `linear`.
    pub partial_rotary_factor: f64,
    /// Divides the frequencies.
    pub factor: f64,
}

impl RopeConfig {
    /// `inv_i = theta^(-2i / head_dim) / factor` for the first `partial_rotary_factor` of the pairs; the rest are not
    /// rotated. The denominator is the whole `head_dim`, even if only a quarter of it rotates.
    pub fn inverse_frequencies(&self, head_dim: usize) -> Vec<f32> {
        let pairs = (self.partial_rotary_factor * head_dim as f64 / 2.0).floor() as usize;
        let frequency = |i: usize| {
            // Rounded to f32 where the reference rounds: at position 1e5 the last bit of a
            // frequency is multiplied by 1e5.
            let exponent = (2 * i) as f32 / head_dim as f32;
            1.0 / (self.theta.powf(f64::from(exponent)) as f32) / self.factor as f32
        };
        (0..pairs).map(frequency).collect()
    }
}

/// Parameters of sliding and of full layers, under the names `types` in config.json.
///
/// # Errors
/// If a field is malformed, or needs something that is not implemented.
pub(super) fn rope(fields: &Fields, types: [&str; 2]) -> Result<(RopeConfig, RopeConfig)> {
    let sliding = RopeConfig { theta: 1e4, partial_rotary_factor: 1.0, factor: 1.0 };
    let full = RopeConfig { theta: 1e6, partial_rotary_factor: 0.25, factor: 1.0 };
    let parameters = fields.optional_object("rope_parameters")?;
    if let Some((parameters, name)) =
        parameters.as_ref().and_then(|own| Some((own, own.names().find(|name| !types.contains(name))?)))
    {
        let problem = format!("is not a layer type; expected one of {}, {}", types[0], types[1]);
        return Err(parameters.unsupported(name, problem));
    }
    // As in transformers, what a layer type lacks is that of the whole configuration.
    let whole = fields.optional_number("partial_rotary_factor")?;
    let theta = fields.optional_number("rope_theta")?;
    let read = |name: &str, default: RopeConfig| match &parameters {
        Some(parameters) => match parameters.optional_object(name)? {
            Some(own) => rope_of_type(&own, theta.unwrap_or(default.theta), whole.unwrap_or(1.0)),
            None => Ok(default),
        },
        None => Ok(default),
    };
    let (sliding, full) = (read(types[0], sliding)?, read(types[1], full)?);
    // Fields of older Gemmas must agree with these.
    for (name, of) in [("rope_theta", &full), ("rope_local_base_freq", &sliding)] {
        if let Some(theta) = fields.optional_number(name)?.filter(|theta| *theta != of.theta) {
            let problem = format!("is {theta}, but rope_parameters has {}; keep only rope_parameters", of.theta);
            return Err(fields.unsupported(name, problem));
        }
    }
    if let Some(scaling) = fields.optional_object("rope_scaling")? {
        let kind = scaling.optional_string("rope_type")?.or(scaling.optional_string("type")?);
        if kind.as_deref() != Some("default") {
            let problem = format!("is of type {kind:?}, which is not implemented; use rope_parameters");
            return Err(fields.unsupported("rope_scaling", problem));
        }
    }
    Ok((sliding, full))
}

fn rope_of_type(fields: &Fields, default_theta: f64, default_partial: f64) -> Result<RopeConfig> {
    let theta = fields.optional_number("rope_theta")?.unwrap_or(default_theta);
    if theta <= 0.0 {
        return Err(fields.error("rope_theta", format!("is {theta}, must be positive")));
    }
    let neutral = |name: &str| match fields.optional_number(name)?.filter(|value| *value != 1.0) {
        Some(value) => Err(fields.unsupported(name, format!("is {value}, which is not implemented; it must be 1"))),
        None => Ok(()),
    };
    neutral("attention_factor")?;
    let rope_type = fields.optional_string("rope_type")?.or(fields.optional_string("type")?);
    let config = match rope_type.as_deref().unwrap_or("default") {
        "default" => {
            ["partial_rotary_factor", "factor"].into_iter().try_for_each(neutral)?;
            RopeConfig { theta, partial_rotary_factor: 1.0, factor: 1.0 }
        }
        "linear" => {
            neutral("partial_rotary_factor")?;
            let factor = divisor(fields)?.ok_or_else(|| fields.error("factor", "is missing"))?;
            RopeConfig { theta, partial_rotary_factor: 1.0, factor }
        }
        "proportional" => {
            let partial_rotary_factor = fields.optional_number("partial_rotary_factor")?.unwrap_or(default_partial);
            if !(0.0..=1.0).contains(&partial_rotary_factor) {
                return Err(fields.error("partial_rotary_factor", "must be from 0 to 1"));
            }
            RopeConfig { theta, partial_rotary_factor, factor: divisor(fields)?.unwrap_or(1.0) }
        }
        other => {
            let problem = format!(
                "{other:?} is not implemented, only default, linear and proportional are; use the published config.json"
            );
            return Err(fields.unsupported("rope_type", problem));
        }
    };
    fields.refuse_misspelt()?;
    Ok(config)
}

/// What the frequencies are divided by.
fn divisor(fields: &Fields) -> Result<Option<f64>> {
    match fields.optional_number("factor")? {
        Some(factor) if factor <= 0.0 => Err(fields.error("factor", "must be positive")),
        factor => Ok(factor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_the_published_ones() {
        let sliding = RopeConfig { theta: 1e4, partial_rotary_factor: 1.0, factor: 1.0 };
        let full = RopeConfig { theta: 1e6, partial_rotary_factor: 0.25, factor: 1.0 };
        let eighths = RopeConfig { factor: 8.0, ..full }.inverse_frequencies(512);
        let (sliding, full) = (sliding.inverse_frequencies(256), full.inverse_frequencies(512));
        assert_eq!(eighths, full.iter().map(|x| x / 8.0).collect::<Vec<_>>());
        assert_eq!((sliding.len(), full.len()), (128, 64));
        for (got, want) in [
            (sliding[1], 0.930_572),
            (sliding[64], 0.01),
            (sliding[127], 1.074_61e-4),
            (full[1], 0.947_464),
            (full[32], 0.177_828),
            (full[63], 0.033_376_2),
        ] {
            assert!((got / want - 1.0f32).abs() < 1e-5, "{got} is not {want}");
        }
    }
}
