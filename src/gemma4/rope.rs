//! Rotary frequencies of sliding and full attention.

use foretoken_kernels::Isa;

use super::config::{AttentionType, TextConfig};
use crate::nn::Rotary;
use crate::ops::{Destination, Ops};
use crate::{Error, Result};

/// The rotations of a model's two attention types.
pub(super) struct Rotations<O: Ops> {
    sliding: Option<O::Rotary>,
    full: Option<O::Rotary>,
}

/// Their angles for one pass.
pub(super) struct PassAngles<O: Ops> {
    sliding: Option<O::Angles>,
    full: Option<O::Angles>,
}

impl<O: Ops> Rotations<O> {
    /// Layers of one type have one head width: the configuration is refused otherwise.
    ///
    /// # Errors
    /// Those of `to`.
    pub(super) fn new(config: &TextConfig, isa: Isa, to: &impl Destination<Ops = O>) -> Result<Self> {
        let of = |attention: AttentionType| {
            let layer = config.layers.iter().find(|layer| layer.attention == attention);
            let frequencies = layer.map(|layer| config.rope(attention).inverse_frequencies(layer.head_dim));
            frequencies.map(|frequencies| to.rotary(Rotary::new(frequencies, isa))).transpose()
        };
        Ok(Self { sliding: of(AttentionType::Sliding)?, full: of(AttentionType::Full)? })
    }

    /// The angles of the rows that have queries.
    pub(super) fn angles(&self, ops: &O, kv: &O::Kv<'_>) -> Result<PassAngles<O>> {
        let of = |rotary: &Option<O::Rotary>| rotary.as_ref().map(|rotary| ops.angles(rotary, kv)).transpose();
        Ok(PassAngles { sliding: of(&self.sliding)?, full: of(&self.full)? })
    }
}

impl<O: Ops> PassAngles<O> {
    pub(super) fn of(&self, attention: AttentionType) -> Result<&O::Angles> {
        let angles = match attention {
            AttentionType::Sliding => &self.sliding,
            AttentionType::Full => &self.full,
        };
        angles
            .as_ref()
            .ok_or_else(|| Error::argument("attention", format!("the model has no layer of {}", attention.name())))
    }
}
