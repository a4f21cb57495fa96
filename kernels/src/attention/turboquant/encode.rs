//! Quantizing 128 rotated rows to a page.

use half::f16;

use super::layout::{LANES, LINE, PageLayout, ScaleGroup};
use super::quantizer::{GROUP, NonFinite, half, quantize};
use super::side::{PAGE_TOKENS, Side};
use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// Memory for a page; previous contents are ignored.
#[derive(Debug)]
pub struct PageMut<'a> {
    /// [`PageLayout::code_bytes`] of codes.
    pub codes: &'a mut [u8],
    /// Scales, `(scale groups, 128)`: [`PageLayout::scales`].
    pub scales: &'a mut [f16],
    /// Mean, `(head_dim)` or empty: see [`PageLayout::mean`].
    pub mean: &'a mut [f16],
}

/// Quantizes a page of rotated rows; every ISA gives the same bytes.
///
/// * `rows`: `(128, head_dim)`, rotated.
///
/// # Errors
/// If a value is infinite or NaN; the page's content is then unspecified.
///
/// # Panics
/// If a length does not match the layout.
pub fn encode_page(isa: Isa, layout: PageLayout, rows: &[f32], page: PageMut<'_>) -> Result<(), NonFinite> {
    assert_eq!(rows.len(), PAGE_TOKENS * layout.head_dim(), "encode: not 128 rows");
    let lengths = (page.codes.len(), page.scales.len(), page.mean.len());
    assert_eq!(lengths, (layout.code_bytes(), layout.scales(), layout.mean()), "encode: wrong length");
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
                for (stored, mean) in mean[group.channels()].iter_mut().zip(&mut means) {
                    *stored = half(*mean);
                    *mean = stored.to_f32();
                }
            }
            let mut group_codes = [[0; GROUP]; PAGE_TOKENS];
            let scales = &mut scales[group.index * PAGE_TOKENS..][..PAGE_TOKENS];
            for ((row, codes), scale) in rows.chunks_exact(layout.head_dim()).zip(&mut group_codes).zip(scales) {
                let mut x = [0.0; GROUP];
                for ((x, row), mean) in x.iter_mut().zip(&row[group.channels()]).zip(&means) {
                    *x = row - mean;
                }
                *scale = quantize(layout.format(), layout.side(), &x[..group.len], &mut codes[..group.len]);
            }
            pack_codes(layout, group, &group_codes, codes);
        }
    }
}

/// The mean of every channel of a group, summed in token order.
#[inline(always)]
fn average(rows: &[f32], head_dim: usize, group: ScaleGroup, means: &mut [f32; GROUP]) {
    for row in rows.chunks_exact(head_dim) {
        for (mean, x) in means.iter_mut().zip(&row[group.channels()]) {
            *mean += x * (1.0 / PAGE_TOKENS as f32);
        }
    }
}

/// Writes a group's codes to their planes, which must be zeroed.
#[inline(always)]
fn pack_codes(layout: PageLayout, group: ScaleGroup, group_codes: &[[u8; GROUP]; PAGE_TOKENS], codes: &mut [u8]) {
    let (lanes, depth) = match layout.side() {
        Side::Keys => (PAGE_TOKENS, group.len),
        Side::Values | Side::KEqV => (group.len, PAGE_TOKENS),
    };
    let (upper, lower) = layout.plane_bits();
    for strip in 0..lanes / LANES {
        let run = match layout.side() {
            Side::Keys => layout.run(strip, group),
            Side::Values | Side::KEqV => layout.run(group.first / LANES + strip, group),
        };
        for vector in 0..depth / 4 {
            let mut elements = [0; LINE];
            for lane in 0..LANES {
                for d in 0..4 {
                    let (lane_at, depth_at) = (strip * LANES + lane, vector * 4 + d);
                    elements[4 * lane + d] = match layout.side() {
                        Side::Keys => group_codes[lane_at][depth_at],
                        Side::Values | Side::KEqV => group_codes[depth_at][lane_at],
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
