//! Sealed pages: 128 rows in codes.

use super::layout::{LANES, LINE, PageLayout, Run, ScaleGroup};
use super::quantizer::{self, GROUP};
use super::{NonFinite, PAGE_TOKENS, Side};
use crate::Isa;
use crate::lanes::{Lanes, Op};
use half::f16;

/// A page of coded rows.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    pub(super) layout: PageLayout,
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f16],
    pub(super) mean: &'a [f16],
}

impl<'a> Page<'a> {
    /// A page over memory that [`encode_page`] filled. `codes` should start at a multiple of 64 bytes.
    ///
    /// # Panics
    /// If a length is not the layout's.
    pub fn new(layout: PageLayout, codes: &'a [u8], scales: &'a [f16], mean: &'a [f16]) -> Self {
        let lengths = (codes.len(), scales.len(), mean.len());
        assert_eq!(lengths, (layout.code_bytes(), layout.scales(), layout.mean()), "page: not of this layout");
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

/// A page to be filled: as [`Page`], of any content.
#[derive(Debug)]
pub struct PageMut<'a> {
    /// Codes, [`PageLayout::code_bytes`].
    pub codes: &'a mut [u8],
    /// Scales, `(scale groups, 128)`.
    pub scales: &'a mut [f16],
    /// Mean, `(head_dim)` or empty: see [`PageLayout::mean`].
    pub mean: &'a mut [f16],
}

/// Codes a page of rotated rows; every ISA gives the same bytes.
///
/// * `rows`: `(128, head_dim)`, rotated.
///
/// # Errors
/// If a value is infinite or not a number; the page's content is then unspecified.
///
/// # Panics
/// If a length is not the layout's.
pub fn encode_page(isa: Isa, layout: PageLayout, rows: &[f32], page: PageMut<'_>) -> Result<(), NonFinite> {
    assert_eq!(rows.len(), PAGE_TOKENS * layout.head_dim(), "encode: not 128 rows");
    let lengths = (page.codes.len(), page.scales.len(), page.mean.len());
    assert_eq!(lengths, (layout.code_bytes(), layout.scales(), layout.mean()), "encode: not a page of this layout");
    NonFinite::check(rows, layout.head_dim())?;
    isa.run(Encode { layout, rows, page });
    Ok(())
}

struct Encode<'a> {
    layout: PageLayout,
    rows: &'a [f32],
    page: PageMut<'a>,
}

/// Plain Rust, compiled once for each ISA's registers; nothing is contracted or reordered, so the bytes are the same.
impl Op for Encode<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, _: L) {
        let Self { layout, rows, page: PageMut { codes, scales, mean } } = self;
        codes.fill(0);
        for group in layout.scale_groups() {
            let mut means = [0.0; GROUP];
            if !mean.is_empty() {
                average(rows, layout.head_dim(), group, &mut means);
                for (kept, mean) in mean[group.channels()].iter_mut().zip(&mut means) {
                    *kept = quantizer::half(*mean);
                    *mean = kept.to_f32();
                }
            }
            let mut group_codes = [[0; GROUP]; PAGE_TOKENS];
            let scales = &mut scales[group.index * PAGE_TOKENS..][..PAGE_TOKENS];
            for ((row, codes), scale) in rows.chunks_exact(layout.head_dim()).zip(&mut group_codes).zip(scales) {
                let mut x = [0.0; GROUP];
                for ((x, row), mean) in x.iter_mut().zip(&row[group.channels()]).zip(&means) {
                    *x = row - mean;
                }
                *scale = quantizer::quantize(layout.format(), layout.side(), &x[..group.len], &mut codes[..group.len]);
            }
            put(layout, group, &group_codes, codes);
        }
    }
}

/// The mean of every channel of a group, added up in order of token.
#[inline(always)]
fn average(rows: &[f32], head_dim: usize, group: ScaleGroup, means: &mut [f32; GROUP]) {
    for row in rows.chunks_exact(head_dim) {
        for (mean, x) in means.iter_mut().zip(&row[group.channels()]) {
            *mean += x * (1.0 / PAGE_TOKENS as f32);
        }
    }
}

/// Puts a group's codes in their planes, which are zero there.
#[inline(always)]
fn put(layout: PageLayout, group: ScaleGroup, group_codes: &[[u8; GROUP]; PAGE_TOKENS], codes: &mut [u8]) {
    let (lanes, depth) = match layout.side() {
        Side::Keys => (PAGE_TOKENS, group.len),
        Side::Values | Side::Shared => (group.len, PAGE_TOKENS),
    };
    let (upper, lower) = layout.plane_bits();
    for strip in 0..lanes / LANES {
        let run = match layout.side() {
            Side::Keys => layout.run(strip, group),
            Side::Values | Side::Shared => layout.run(group.first / LANES + strip, group),
        };
        for vector in 0..depth / 4 {
            let mut elements = [0; LINE];
            for lane in 0..LANES {
                for d in 0..4 {
                    let (lane_at, depth_at) = (strip * LANES + lane, vector * 4 + d);
                    elements[4 * lane + d] = match layout.side() {
                        Side::Keys => group_codes[lane_at][depth_at],
                        Side::Values | Side::Shared => group_codes[depth_at][lane_at],
                    };
                }
            }
            let mut put_bits = |start: usize, bits: usize, drop: usize| {
                let at = vector * bits;
                let line = &mut codes[start + at / 8 * LINE..][..LINE];
                let mask = ((1u32 << bits) - 1) as u8;
                for (byte, code) in line.iter_mut().zip(&elements) {
                    *byte |= (code >> drop & mask) << (at % 8);
                }
            };
            put_bits(run.upper, upper, lower);
            if lower > 0 {
                put_bits(run.lower, lower, 0);
            }
        }
    }
}

/// Expands a page into rotated rows, as attention over it sees them.
///
/// * `rows`: `(128, head_dim)`.
///
/// # Panics
/// If `rows` has another length.
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
