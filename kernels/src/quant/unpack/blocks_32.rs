//! Formats with blocks of 32 and integer weights.

use super::format::{BlockScales, Format, load_halves, shifted_bits};
use crate::quant::layout::QUAD_BYTES;
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};

/// Quad `g` of a block of 32: quads 0 to 3 are the low nibbles, 4 to 7 the high ones.
///
/// # Safety
/// The caller is inside a function with `L`'s features; four quads of bytes begin at `from`.
#[inline(always)]
pub(super) unsafe fn nibbles<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
    // SAFETY: the caller entered the features; `g % 4` is one of the four quads at `from`.
    unsafe {
        let bytes = l.load_words(from.add(g % 4 * QUAD_BYTES));
        l.and(l.shift_bytes(bytes, -(g as i32 / 4 * 4)), l.splat_word(0x0f0f_0f0f))
    }
}

/// A format with blocks of 32: 2 bytes of scale, 2 more if `$has_min`, then the weights.
macro_rules! blocks_of_32 {
    ($name:ident, $type:ident, $has_min:literal, $zero_point:expr, $bytes:expr, |$l:ident, $from:ident, $g:ident| $weights:expr) => {
        pub(in crate::quant) struct $name;

        impl Format for $name {
            const TYPE: WeightType = WeightType::$type;
            const QUADS_PER_SCALE: usize = 8;
            const ZERO_POINT: Option<u8> = $zero_point;
            const BYTES: Bytes = $bytes;
            const HAS_MIN: bool = $has_min;
            const PREFETCH_SINGLE_STREAM_FROM: usize = 4;
            // Measured on a Zen 4: unpacking nibbles, and bytes of up to six rows, twice costs less
            // than writing and reading.
            const UNPACKED_FROM: usize = match $bytes {
                Bytes::Unsigned(15) => 9,
                Bytes::Biased => 7,
                _ => 5,
            };
            type Cursor<L: ByteLanes> = *const u8;

            #[inline(always)]
            unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
                // SAFETY: the caller entered the features; the block begins with its scales.
                unsafe {
                    scales.d[0] = load_halves(l, block, 0, lane);
                    if $has_min {
                        scales.dmin = load_halves(l, block, 2, lane);
                    }
                }
            }
            #[inline(always)]
            unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, _: usize) -> *const u8 {
                // SAFETY: the caller's block has its scales, and mins if `$has_min`, then its weights.
                unsafe { block.add(16 * if $has_min { 4 } else { 2 } + 4 * lane) }
            }
            #[inline(always)]
            unsafe fn quad<L: ByteLanes>($l: L, $from: *const u8, $g: usize) -> L::I {
                // SAFETY: the caller entered the features; the block's weights begin at `$from` and have quad `$g`.
                unsafe { $weights }
            }
        }
    };
}

/// Quad `g` of 32 weights of five bits, which `recode.rs` lays out.
///
/// # Safety
/// The caller is inside a function with `L`'s features; five quads of bytes begin at `from`.
#[inline(always)]
pub(super) unsafe fn five_bits<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
    let t = g % 4;
    // SAFETY: the caller entered the features; five quads of bytes begin at `from`.
    unsafe {
        let word = from.add(t * QUAD_BYTES);
        if g < 4 {
            return shifted_bits(l, word, 0, 0x1f1f_1f1f);
        }
        let upper = shifted_bits(l, from.add(4 * QUAD_BYTES), 3 - 2 * t as i32, 0x1818_1818);
        l.or(shifted_bits(l, word, -5, 0x0707_0707), upper)
    }
}

blocks_of_32!(Q40, Q4_0, false, Some(8), Bytes::Unsigned(15), |l, from, g| nibbles(l, from, g));
blocks_of_32!(Q41, Q4_1, true, None, Bytes::Unsigned(15), |l, from, g| nibbles(l, from, g));
blocks_of_32!(Q50, Q5_0, false, Some(16), Bytes::Unsigned(31), |l, from, g| five_bits(l, from, g));
blocks_of_32!(Q51, Q5_1, true, None, Bytes::Unsigned(31), |l, from, g| five_bits(l, from, g));
blocks_of_32!(Q80, Q8_0, false, Some(128), Bytes::Biased, |l, from, g| l.load_words(from.add(g * QUAD_BYTES)));
