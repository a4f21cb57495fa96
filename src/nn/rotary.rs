//! Rotary position embedding.

use candle_core::Tensor;
use foretoken_kernels::Isa;
use foretoken_kernels::rope::{Pairing, rotate};

use super::{RmsNorm, row_blocks, tensor};
use crate::Result;

/// The frequencies of one attention type.
#[derive(Clone)]
pub struct Rotary {
    inverse_frequencies: Vec<f32>, // (rotating pairs)
    pairing: Pairing,
    isa: Isa,
}

/// Cosines and sines of the rows' positions, computed once per forward pass and shared by the layers.
pub struct Angles {
    cos: Vec<f32>, // (rows, rotating pairs)
    sin: Vec<f32>,
    pairs: usize,
    pairing: Pairing,
    isa: Isa,
}

impl Rotary {
    /// `inverse_frequencies[i]` rotates the pair `(i, i + head_dim / 2)`; pairs beyond the list are not rotated.
    pub fn new(inverse_frequencies: Vec<f32>, isa: Isa) -> Self {
        Self { inverse_frequencies, pairing: Pairing::Head, isa }
    }

    /// `inverse_frequencies[i]` rotates the pair `(i, i + inverse_frequencies.len())`: the leading
    /// channels rotate like a head of their own.
    pub fn of_leading(inverse_frequencies: Vec<f32>, isa: Isa) -> Self {
        Self { inverse_frequencies, pairing: Pairing::Leading, isa }
    }

    /// The inverse frequency of every rotary pair.
    pub fn inverse_frequencies(&self) -> &[f32] {
        &self.inverse_frequencies
    }

    /// Which channels form a pair.
    pub(crate) fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// The angles of `positions`, one row each.
    pub fn angles(&self, positions: impl IntoIterator<Item = usize>) -> Angles {
        let pairs = self.inverse_frequencies.len();
        let (cos, sin) = positions
            .into_iter()
            .flat_map(|position| self.inverse_frequencies.iter().map(move |f| f * position as f32))
            .map(|angle| (angle.cos(), angle.sin()))
            .unzip();
        Angles { cos, sin, pairs, pairing: self.pairing, isa: self.isa }
    }
}

impl Angles {
    /// The cosines, `(rows, rotating pairs)`.
    pub fn cos(&self) -> &[f32] {
        &self.cos
    }

    /// The sines, shaped as the cosines.
    pub fn sin(&self) -> &[f32] {
        &self.sin
    }

    /// Normalises every head of `x` `(rows, heads * head_dim)` and rotates it: `(rows, heads, head_dim)`.
    ///
    /// # Errors
    /// If the width of `x` is not a multiple of the norm's.
    pub fn norm_and_rotate(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        let view = norm.checked(x)?;
        let y = row_blocks(rows, width, |first, y| {
            norm.write(&view, first * (width / norm.width()), y);
            for (row, y) in y.chunks_exact_mut(width).enumerate() {
                let at = (first + row) * self.pairs..(first + row + 1) * self.pairs;
                let (cos, sin) = (&self.cos[at.clone()], &self.sin[at]);
                match self.pairing {
                    Pairing::Head => rotate(self.isa, y, norm.width(), cos, sin),
                    Pairing::Leading if self.pairs == 0 => {}
                    Pairing::Leading => (y.chunks_exact_mut(norm.width()))
                        .for_each(|head| rotate(self.isa, &mut head[..2 * self.pairs], 2 * self.pairs, cos, sin)),
                }
            }
        });
        tensor(y, (rows, width / norm.width(), norm.width()))
    }
}
