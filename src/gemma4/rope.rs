//! Frequencies of the two kinds of rotation.

use foretoken_kernels::Isa;

use super::config::{AttentionType, RopeConfig, TextConfig};
use crate::nn::{Angles, Rotary};
use crate::{Error, Result};

/// `inv_i = theta^(-2i / head_dim) / factor` for the first `partial_rotary_factor` of the pairs; the rest do not turn.
/// The denominator is the whole head's width, also where only a quarter of it rotates.
pub(super) fn inverse_frequencies(config: &RopeConfig, head_dim: usize) -> Vec<f32> {
    let pairs = (config.partial_rotary_factor * head_dim as f64 / 2.0).floor() as usize;
    let frequency = |i: usize| {
        // Rounded to f32 where the reference rounds: far positions multiply a frequency's last bit by a hundred thousand.
        let exponent = (2 * i) as f32 / head_dim as f32;
        1.0 / (config.theta.powf(f64::from(exponent)) as f32) / config.factor as f32
    };
    (0..pairs).map(frequency).collect()
}

/// The rotations of a model's two attention types.
pub(super) struct Rotations {
    pub(super) sliding: Option<Rotary>,
    pub(super) full: Option<Rotary>,
}

/// Their angles for one pass.
pub(super) struct PassAngles {
    sliding: Option<Angles>,
    full: Option<Angles>,
}

impl Rotations {
    /// # Errors
    /// If layers of one type have different head widths, whose angles would differ.
    pub(super) fn new(config: &TextConfig, isa: Isa) -> Result<Self> {
        let of = |attention: AttentionType| {
            let mut dims = config.layers.iter().filter(|l| l.attention == attention).map(|l| l.head_dim);
            let Some(head_dim) = dims.next() else { return Ok(None) };
            if dims.any(|other| other != head_dim) {
                let problem = format!("layers of {} have different head_dim", attention.name());
                return Err(Error::Input(problem));
            }
            Ok(Some(Rotary::new(inverse_frequencies(config.rope(attention), head_dim), isa)))
        };
        Ok(Self { sliding: of(AttentionType::Sliding)?, full: of(AttentionType::Full)? })
    }

    pub(super) fn angles(&self, first: usize, rows: usize) -> PassAngles {
        let of = |rotary: &Option<Rotary>| rotary.as_ref().map(|rotary| rotary.angles(first, rows));
        PassAngles { sliding: of(&self.sliding), full: of(&self.full) }
    }
}

impl PassAngles {
    /// The angles of the newest `rows` positions.
    pub(super) fn newest(&self, rows: usize) -> Self {
        let of = |angles: &Option<Angles>| angles.as_ref().map(|angles| angles.newest(rows));
        Self { sliding: of(&self.sliding), full: of(&self.full) }
    }

    pub(super) fn of(&self, attention: AttentionType) -> Result<&Angles> {
        let angles = match attention {
            AttentionType::Sliding => &self.sliding,
            AttentionType::Full => &self.full,
        };
        angles.as_ref().ok_or_else(|| Error::Input(format!("the model has no layer of {}", attention.name())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_are_the_published_ones() {
        let sliding = RopeConfig { theta: 1e4, partial_rotary_factor: 1.0, factor: 1.0 };
        let full = RopeConfig { theta: 1e6, partial_rotary_factor: 0.25, factor: 1.0 };
        let (sliding, full) = (inverse_frequencies(&sliding, 256), inverse_frequencies(&full, 512));
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
