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
    /// # Errors
    /// If layers of one type have different head widths, which need different angles.
    pub(super) fn new(config: &TextConfig, isa: Isa, to: &impl Destination<Ops = O>) -> Result<Self> {
        let of = |attention: AttentionType| {
            let mut dims = config.layers.iter().filter(|l| l.attention == attention).map(|l| l.head_dim);
            let Some(head_dim) = dims.next() else { return Ok(None) };
            if dims.any(|other| other != head_dim) {
                let what = format!("head_dim of {}", attention.name());
                let problem = "differs between layers, which is not implemented".into();
                return Err(Error::Unsupported { path: None, what, problem });
            }
            to.rotary(Rotary::new(config.rope(attention).inverse_frequencies(head_dim), isa)).map(Some)
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
