//! Queries in 8 bits, for quantized keys.

use super::codebook::CodeFormat;
use super::layout::{PageLayout, ScaleGroup};
use super::rotation::RotationGroups;
use super::side::Side;

/// A rotated query in 8-bit integers, one scale per scale group of the keys.
///
/// Its words, for keys of `n` scale groups:
///
/// ```text
/// word 0                  head_dim / 4 words of four i8
/// word head_dim / 4       for each of n groups: scale * unit (f32 bits), -128 * sum of the group's i8
/// ```
#[derive(Clone, Copy, Debug)]
pub struct QuantizedQuery<'a> {
    /// Against keys; for [`super::Side::KEqV`], against the keys of the rotary channels.
    pub(super) rotary: QueryWords<'a>,
    /// Against the page of values, for [`super::Side::KEqV`].
    pub(super) values: Option<QueryWords<'a>>,
}

/// One query's words for one layout.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueryWords<'a> {
    format: CodeFormat,
    groups: RotationGroups,
    words: &'a [i32],
}

impl<'a> QuantizedQuery<'a> {
    /// Number of words of one query against keys of `format`.
    pub fn word_count(format: CodeFormat, groups: RotationGroups) -> usize {
        let layout = PageLayout::new(format, Side::Keys, groups);
        groups.head_dim() / 4 + 2 * layout.scale_groups().count()
    }

    /// Quantizes a rotated query. Every ISA gives the same words.
    ///
    /// * `query`: `(head_dim)`.
    /// * `words`: [`QuantizedQuery::word_count`] of them; previous contents are ignored.
    ///
    /// # Panics
    /// If a length differs.
    pub fn quantize(format: CodeFormat, groups: RotationGroups, query: &[f32], words: &'a mut [i32]) -> Self {
        assert_eq!(query.len(), groups.head_dim(), "query: not (head_dim)");
        assert_eq!(words.len(), Self::word_count(format, groups), "query: words are not word_count() long");
        let (quads, tail) = words.split_at_mut(query.len() / 4);
        let layout = PageLayout::new(format, Side::Keys, groups);
        for (group, tail) in layout.scale_groups().zip(tail.chunks_exact_mut(2)) {
            let query = &query[group.channels()];
            // Compared as integers, magnitudes keep their order and a NaN is the largest: the scale
            // and the scores become NaN.
            let largest = f32::from_bits(query.iter().fold(0, |a, x| a.max(x.abs().to_bits())));
            let inverse = if largest < f32::MIN_POSITIVE { 0.0 } else { 127.0 / largest };
            let mut sum = 0;
            for (word, query) in quads[group.first / 4..].iter_mut().zip(query.as_chunks::<4>().0) {
                let mut bytes = [0; 4];
                for (byte, x) in bytes.iter_mut().zip(query) {
                    // Adding 1.5 * 2^23 puts the nearest integer, ties to even, in the lowest bits.
                    *byte = (x * inverse + 12_582_912.0).to_bits() as u8;
                    sum += i32::from(*byte as i8);
                }
                *word = i32::from_le_bytes(bytes);
            }
            tail[0] = (largest / 127.0 * format.unit()).to_bits() as i32;
            tail[1] = -128 * sum;
        }
        Self { rotary: QueryWords { format, groups, words }, values: None }
    }

    /// Reads what [`QuantizedQuery::quantize`] wrote into `words` earlier.
    ///
    /// # Panics
    /// If `words` has a different length.
    pub fn from_words(format: CodeFormat, groups: RotationGroups, words: &'a [i32]) -> Self {
        assert_eq!(words.len(), Self::word_count(format, groups), "query: words are not word_count() long");
        Self { rotary: QueryWords { format, groups, words }, values: None }
    }

    /// For [`super::Side::KEqV`]: `self` has the rotary channels, `values` all channels, quantized for the values'
    /// format.
    pub fn with_values(self, values: QuantizedQuery<'a>) -> Self {
        Self { rotary: self.rotary, values: Some(values.rotary) }
    }
}

impl<'a> QueryWords<'a> {
    /// Whether the words are for pages of this layout.
    pub(super) fn fits(&self, layout: PageLayout) -> bool {
        self.format == layout.format() && self.groups.head_dim() == layout.head_dim()
    }

    /// The integers, four channels per word.
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
