//! A page in memory, and its values.

use half::f16;

use super::layout::{LINE, PageLayout, Run, ScaleGroup};
use super::side::PAGE_TOKENS;

/// A page of 128 quantized rows.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    pub(super) layout: PageLayout,
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f16],
    pub(super) mean: &'a [f16],
}

impl<'a> Page<'a> {
    /// A page over memory that [`encode_page`](super::encode_page) filled. `codes` should begin at
    /// a multiple of 64 bytes.
    ///
    /// # Panics
    /// If a length does not match the layout.
    pub fn new(layout: PageLayout, codes: &'a [u8], scales: &'a [f16], mean: &'a [f16]) -> Self {
        let lengths = (codes.len(), scales.len(), mean.len());
        assert_eq!(lengths, (layout.code_bytes(), layout.scales(), layout.mean()), "page: wrong length");
        Self { layout, codes, scales, mean }
    }

    /// Its layout.
    pub fn layout(&self) -> PageLayout {
        self.layout
    }

    /// The code of an element of a run's vector.
    #[inline(always)]
    fn code(&self, run: Run, vector: usize, element: usize) -> u8 {
        let (upper, lower) = self.layout.plane_bits();
        let field = |start: usize, bits: usize| {
            let at = vector * bits;
            let byte = self.codes[start + at / 8 * LINE + element];
            (u32::from(byte) >> (at % 8) & ((1 << bits) - 1)) as u8
        };
        match lower {
            0 => field(run.upper, upper),
            _ => field(run.upper, upper) << lower | field(run.lower, lower),
        }
    }

    /// The level of a token's channel of `group`.
    #[inline(always)]
    pub(super) fn level(&self, token: usize, channel: usize, group: ScaleGroup) -> i8 {
        let (strip, vector, element) = self.layout.place(token, channel, group);
        self.layout.format().level(self.code(self.layout.run(strip, group), vector, element))
    }

    /// The scale of a token's channels of `group`.
    #[inline(always)]
    pub(super) fn scale(&self, token: usize, group: ScaleGroup) -> f32 {
        self.scales[group.index * PAGE_TOKENS + token].to_f32()
    }
}

/// Dequantizes a page: the rotated rows that attention over it is equivalent to.
///
/// * `rows`: `(128, head_dim)`.
///
/// # Panics
/// If `rows` has a different length.
pub fn decode_page(page: &Page<'_>, rows: &mut [f32]) {
    let layout = page.layout;
    assert_eq!(rows.len(), PAGE_TOKENS * layout.head_dim(), "decode: not 128 rows");
    for (token, row) in rows.chunks_exact_mut(layout.head_dim()).enumerate() {
        for group in layout.scale_groups() {
            let scale = page.scale(token, group) * layout.format().unit();
            for channel in group.channels() {
                let mean = page.mean.get(channel).map_or(0.0, |mean| mean.to_f32());
                row[channel] = mean + scale * f32::from(page.level(token, channel, group));
            }
        }
    }
}
