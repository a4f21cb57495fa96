//! Rotary frequencies of sliding and full attention.

use foretoken_kernels::Isa;

use super::config::{AttentionType, TextConfig};
use crate::nn::{Angles, Rotary};
use crate::{Error, Result};

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
                let what = format!("head_dim of {}", attention.name());
                let problem = "differs between layers, which is not implemented".into();
                return Err(Error::Unsupported { path: None, what, problem });
            }
            Ok(Some(Rotary::new(config.rope(attention).inverse_frequencies(head_dim), isa)))
        };
        Ok(Self { sliding: of(AttentionType::Sliding)?, full: of(AttentionType::Full)? })
    }

    /// The angles of `positions`, one row each.
    pub(super) fn angles(&self, positions: impl Iterator<Item = usize> + Clone) -> PassAngles {
        let of = |rotary: &Option<Rotary>| rotary.as_ref().map(|rotary| rotary.angles(positions.clone()));
        PassAngles { sliding: of(&self.sliding), full: of(&self.full) }
    }
}

impl PassAngles {
    /// The angles of some `rows`.
    pub(super) fn select(&self, rows: &[usize]) -> Self {
        let of = |angles: &Option<Angles>| angles.as_ref().map(|angles| angles.select(rows));
        Self { sliding: of(&self.sliding), full: of(&self.full) }
    }

    pub(super) fn of(&self, attention: AttentionType) -> Result<&Angles> {
        let angles = match attention {
            AttentionType::Sliding => &self.sliding,
            AttentionType::Full => &self.full,
        };
        angles
            .as_ref()
            .ok_or_else(|| Error::argument("attention", format!("the model has no layer of {}", attention.name())))
    }
}
