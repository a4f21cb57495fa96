//! Keys that are made from the values as they are read.
//!
//! Where a layer's K and V come from one projection, both are the same normalized vector: V is it, K is it times the key
//! norm's weight, rotated at its position. So V alone is kept. The angles are kept too, once for all layers and heads: half
//! a KiB per position of a model whose layers and heads together keep tens.

use foretoken_kernels::{Elements, Isa, rope};

use super::PAGE;
use super::rows::out_of_memory;
use crate::Result;
use crate::nn::{Arena, Piece, Rotary, cast, cast_mut};

/// Cosines and sines of every position.
pub(super) struct AngleTable {
    inverse_frequencies: Vec<f32>,
    pages: Vec<Piece>, // (2, PAGE, rotating pairs) of f32
    isa: Isa,
}

impl AngleTable {
    pub(super) fn new(inverse_frequencies: Vec<f32>, isa: Isa) -> Self {
        Self { inverse_frequencies, pages: Vec::new(), isa }
    }

    /// Computes the angles of the positions below `end`.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn reserve(&mut self, arena: &mut Arena, end: usize) -> Result<()> {
        while self.pages.len() < end.div_ceil(PAGE) {
            let rotary = Rotary::new(self.inverse_frequencies.clone(), self.isa);
            let angles = rotary.angles(self.pages.len() * PAGE, PAGE);
            let mut page = arena.take(self.page_bytes()).ok_or_else(|| out_of_memory(end))?;
            let (cos, sin) = page.as_mut_slice().split_at_mut(self.page_bytes() / 2);
            cast_mut(cos).copy_from_slice(angles.cos());
            cast_mut(sin).copy_from_slice(angles.sin());
            self.pages.push(page);
        }
        Ok(())
    }

    /// Makes the keys of page `page` of the sequence: `(len, head_dim)`, of values of that shape. `weight` `(head_dim)` is
    /// the key norm's. In f32 these are the bits that the layer computed.
    pub(super) fn keys(&self, page: usize, values: Elements<'_>, weight: &[f32], keys: &mut [f32]) {
        let pairs = self.inverse_frequencies.len();
        let (cos, sin) = self.pages[page].as_slice().split_at(self.page_bytes() / 2);
        let (cos, sin) = (cast(cos), cast(sin));
        let angles = ..keys.len() / weight.len() * pairs;
        rope::keys_of_values(self.isa, values, weight, &cos[angles], &sin[angles], keys);
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * self.page_bytes()
    }

    /// Bytes once positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        end.div_ceil(PAGE).saturating_mul(self.page_bytes())
    }

    fn page_bytes(&self) -> usize {
        2 * PAGE * self.inverse_frequencies.len() * size_of::<f32>()
    }
}
