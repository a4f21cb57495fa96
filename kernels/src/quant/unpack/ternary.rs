//! Formats whose weights are -1, 0 and 1, with or without an offset of an eighth.

use super::format::{BlockScales, Format, load_field, load_halves, shifted_bits};
use super::levels::load_odd_scales;
use crate::quant::layout::QUAD_BYTES;
use crate::quant::recode::weights_at;
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};

/// Quad `g` of scale `s` in bits `up..up + 2` of every byte.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the two bits of 64 quads begin at `from`,
/// and they include the quad.
#[inline(always)]
unsafe fn pairs<L: ByteLanes>(l: L, from: *const u8, s: usize, g: usize, up: i32) -> L::I {
    // SAFETY: the caller entered the features; the two bits of 64 quads begin at `from`, and they include this one.
    unsafe { shifted_bits(l, from.add((s / 4 * 8 + g) * QUAD_BYTES), up - s as i32 % 4 * 2, 0x0303_0303 << up) }
}

/// TQ1_0 and TQ2_0.
pub(in crate::quant) struct Tq;

impl Format for Tq {
    const TYPE: WeightType = WeightType::TQ2_0;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(1);
    const BYTES: Bytes = Bytes::Unsigned(3);
    const UNPACKED_FROM: usize = 9;
    type Cursor<L: ByteLanes> = (*const u8, usize);

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; the block begins with its scales.
        unsafe {
            scales.d[0] = load_halves(l, block, 0, lane);
            scales.scales[..Self::SCALES].fill(l.to_scale(l.splat_word(1)));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L> {
        // SAFETY: the caller's block has 2 bytes of scale per row, then its weights.
        unsafe { (block.add(16 * 2 + 4 * lane), s) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, (from, s): Self::Cursor<L>, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the two bits of 64 quads begin at `from`; scale `s` has quad `g`.
        unsafe { pairs(l, from, s, g, 0) }
    }
}

pub(in crate::quant) struct Iq1S;

impl Format for Iq1S {
    const TYPE: WeightType = WeightType::IQ1_S;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(9);
    const BYTES: Bytes = Bytes::Unsigned(18);
    type Cursor<L: ByteLanes> = (*const u8, usize, L::I);

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; the block has `SCALES` scales.
        unsafe { load_odd_scales(l, block, lane, &mut scales.scales[..Self::SCALES], &mut scales.d[0]) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L> {
        // SAFETY: the caller entered the features; the block has offsets at byte 8 of a row, weights at `weights_at`.
        unsafe {
            let offsets = l.shift_bytes(load_field(l, block, 8, lane), 1 - s as i32);
            let from = block.add(16 * const { weights_at(Self::TYPE) } + 4 * lane);
            (from, s, l.and(offsets, l.splat_word(0x0202_0202)))
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, (from, s, offset): Self::Cursor<L>, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the two bits of 64 quads begin at `from`; scale `s` has quad `g`.
        unsafe { l.or(pairs(l, from, s, g, 3), offset) }
    }
}
