//! Formats whose weights are indices into sixteen levels.

use super::blocks_32::nibbles;
use super::format::{BlockScales, Format, load_field, load_halves};
use crate::quant::ggml::{E2M1_LEVELS, IQ4_NL_LEVELS};
use crate::quant::layout::QUAD_BYTES;
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};

/// Levels plus a zero point, as unsigned bytes.
const fn shifted(levels: [i8; 16], zero_point: u8) -> [u8; 16] {
    let mut shifted = [0; 16];
    let mut i = 0;
    while i < 16 {
        shifted[i] = (levels[i] as u8).wrapping_add(zero_point);
        i += 1;
    }
    shifted
}

const BIASED_IQ4_NL: [u8; 16] = shifted(IQ4_NL_LEVELS, 128);
/// Zero point 16: sums of pairs of products stay small, so that more of them fit 16 bits.
const E2M1: [u8; 16] = shifted(E2M1_LEVELS, 16);

pub(in crate::quant) struct Iq4Nl;

impl Format for Iq4Nl {
    const TYPE: WeightType = WeightType::IQ4_NL;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(128);
    const BYTES: Bytes = Bytes::Biased;
    type Cursor<L: ByteLanes> = *const u8;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's.
        unsafe { scales.d[0] = load_halves(l, block, 0, lane) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, _: usize) -> *const u8 {
        // SAFETY: as the caller's.
        unsafe { block.add(16 * 2 + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { l.lookup(&BIASED_IQ4_NL, nibbles(l, from, g)) }
    }
}

pub(in crate::quant) struct Iq4Xs;

impl Format for Iq4Xs {
    const TYPE: WeightType = WeightType::IQ4_XS;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(128);
    const BYTES: Bytes = Bytes::Biased;
    const SLOW_TO_UNPACK: bool = true;
    type Cursor<L: ByteLanes> = *const u8;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's; the lower four bits of scale `s` are nibble `s` of a word, its upper two are bits `2 s` of
        // two bytes, of which byte `n` of lane `m` is at `16 n + m`.
        unsafe {
            scales.d[0] = load_halves(l, block, 0, lane);
            let low = load_field(l, block, 4, lane);
            let high = [l.load_signed_bytes(block.add(16 * 2 + lane)), l.load_signed_bytes(block.add(16 * 3 + lane))];
            for s in 0..8 {
                let (nibble, pair) = (l.shift(low, -4 * s as i32), l.shift(high[s / 4], 4 - 2 * (s as i32 % 4)));
                let scale = l.or(l.and(nibble, l.splat_word(0x0f)), l.and(pair, l.splat_word(0x30)));
                scales.scales[s] = l.offset_scale(l.to_scale(scale), -32);
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> *const u8 {
        // SAFETY: as the caller's.
        unsafe { block.add(16 * (8 + 16 * s) + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { l.lookup(&BIASED_IQ4_NL, nibbles(l, from, g)) }
    }
}

pub(in crate::quant) struct Mxfp4;

impl Format for Mxfp4 {
    const TYPE: WeightType = WeightType::MXFP4;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(16);
    const BYTES: Bytes = Bytes::Unsigned(28);
    type Cursor<L: ByteLanes> = *const u8;
    type Scratch = ();
    const SCRATCH: () = ();

    /// `2^(e - 128)` as a product of two normal numbers, because `e` of 0 and 1 make it subnormal: with `e = 16 h + l`, of
    /// `2^(16 h - 113)` and `2^(l - 15)`.
    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's; lane `n`'s exponent is byte `n`.
        unsafe {
            let exponent = l.load_signed_bytes(block.add(lane));
            let high = l.or(l.and(exponent, l.splat_word(0xf0)), l.splat_word(0x0e));
            let low = l.or(l.and(exponent, l.splat_word(0x0f)), l.splat_word(0x70));
            scales.d[0] = l.mul(l.as_float(l.shift(high, 23)), l.as_float(l.shift(low, 23)));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, _: usize) -> *const u8 {
        // SAFETY: as the caller's.
        unsafe { block.add(16 + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { l.lookup(&E2M1, nibbles(l, from, g)) }
    }
}

pub(in crate::quant) struct Nvfp4;

impl Format for Nvfp4 {
    const TYPE: WeightType = WeightType::NVFP4;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = Some(16);
    const BYTES: Bytes = Bytes::Unsigned(28);
    type Cursor<L: ByteLanes> = *const u8;
    type Scratch = ();
    const SCRATCH: () = ();

    /// The seven bits of a scale are those of an `f32`'s exponent and mantissa but for the bias: 127 instead of 7, and one
    /// for the doubled levels.
    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        const BIAS: f32 = f32::from_bits((127 + 119) << 23);
        // SAFETY: as the caller's; scale `s` is byte `s` of a word.
        unsafe {
            let bytes = load_field(l, block, 0, lane);
            for s in 0..4 {
                let bits = l.and(l.shift(bytes, 20 - 8 * s as i32), l.splat_word(0x7f << 20));
                scales.d[s] = l.mul(l.as_float(bits), l.splat(BIAS));
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> *const u8 {
        // SAFETY: as the caller's.
        unsafe { block.add(16 * (4 + 8 * s) + 4 * lane) }
    }
    /// Quads 0 and 1 are the low nibbles of two words, 2 and 3 the high ones.
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe {
            let bytes = l.shift_bytes(l.load_words(from.add(g % 2 * QUAD_BYTES)), -(g as i32 / 2 * 4));
            l.lookup(&E2M1, l.and(bytes, l.splat_word(0x0f0f_0f0f)))
        }
    }
}
