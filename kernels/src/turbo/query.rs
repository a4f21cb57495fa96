//! Queries in integers, for keys in codes.

use super::layout::{PageLayout, ScaleGroup};
use super::{CodeFormat, Groups, Side};

/// A rotated query in 8-bit integers, one scale per scale group of the keys.
///
/// Its words, for keys of `n` scale groups: `head_dim / 4` of four integers; then for each group a scale (the bits of an
/// `f32`, the format's unit included) and -128 times the integers' sum.
#[derive(Clone, Copy, Debug)]
pub struct PreparedQuery<'a> {
    pub(super) own: Words<'a>,
    pub(super) values: Option<Words<'a>>,
}

/// One query's words against one layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct Words<'a> {
    format: CodeFormat,
    groups: Groups,
    words: &'a [i32],
}

impl<'a> PreparedQuery<'a> {
    /// Words of one query against keys of `format`.
    pub fn words(format: CodeFormat, groups: Groups) -> usize {
        let layout = PageLayout::new(format, Side::Keys, groups);
        groups.head_dim() / 4 + 2 * layout.scale_groups().count()
    }

    /// Quantizes a rotated query. Every ISA gives the same words.
    ///
    /// * `query`: `(head_dim)`.
    /// * `words`: [`PreparedQuery::words`] of them, of any content.
    ///
    /// # Panics
    /// If a length is not that.
    pub fn prepare(format: CodeFormat, groups: Groups, query: &[f32], words: &'a mut [i32]) -> Self {
        assert_eq!(query.len(), groups.head_dim(), "query: not (head_dim)");
        assert_eq!(words.len(), Self::words(format, groups), "query: not its words");
        let (quads, tail) = words.split_at_mut(query.len() / 4);
        let layout = PageLayout::new(format, Side::Keys, groups);
        for (group, tail) in layout.scale_groups().zip(tail.chunks_exact_mut(2)) {
            let query = &query[group.channels()];
            // Magnitudes order as integers do; a NaN is the largest, so that it reaches the scale and the scores.
            let largest = f32::from_bits(query.iter().fold(0, |a, x| a.max(x.abs().to_bits())));
            let inverse = if largest < f32::MIN_POSITIVE { 0.0 } else { 127.0 / largest };
            let mut sum = 0;
            for (word, query) in quads[group.first / 4..].iter_mut().zip(query.as_chunks::<4>().0) {
                let mut bytes = [0; 4];
                for (byte, x) in bytes.iter_mut().zip(query) {
                    // Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the lowest bits.
                    *byte = (x * inverse + 12_582_912.0).to_bits() as u8;
                    sum += i32::from(*byte as i8);
                }
                *word = i32::from_le_bytes(bytes);
            }
            tail[0] = (largest / 127.0 * format.unit()).to_bits() as i32;
            tail[1] = -128 * sum;
        }
        Self { own: Words { format, groups, words }, values: None }
    }

    /// Takes what [`PreparedQuery::prepare`] wrote, for a caller who keeps the words.
    ///
    /// # Panics
    /// If `words` has another length.
    pub fn from_words(format: CodeFormat, groups: Groups, words: &'a [i32]) -> Self {
        assert_eq!(words.len(), Self::words(format, groups), "query: not its words");
        Self { own: Words { format, groups, words }, values: None }
    }

    /// Against keys of which the last channels lie in a page of values: `self` is of the first channels, `values` of all,
    /// prepared for the values' format.
    pub fn with_values(self, values: PreparedQuery<'a>) -> Self {
        Self { own: self.own, values: Some(values.own) }
    }
}

impl<'a> Words<'a> {
    /// Whether it can meet pages of this layout.
    pub(super) fn fits(&self, layout: PageLayout) -> bool {
        self.format == layout.format() && self.groups.head_dim() == layout.head_dim()
    }

    /// The integers of a channel's word.
    #[inline(always)]
    pub(super) fn quads(&self) -> &'a [i32] {
        &self.words[..self.groups.head_dim() / 4]
    }

    /// A group's scale.
    #[inline(always)]
    pub(super) fn scale(&self, group: ScaleGroup) -> f32 {
        f32::from_bits(self.words[self.groups.head_dim() / 4 + 2 * group.index] as u32)
    }

    /// -128 times the sum of a group's integers.
    #[inline(always)]
    #[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(dead_code))]
    pub(super) fn offset(&self, group: ScaleGroup) -> i32 {
        self.words[self.groups.head_dim() / 4 + 2 * group.index + 1]
    }
}
