//! Formats whose weights are indices into sixteen levels, or eight.

use super::blocks_32::nibbles;
use super::format::{BlockScales, Format, load_field, load_halves, shifted_bits};
use crate::quant::ggml::{E2M1_LEVELS, IQ4_NL_LEVELS};
use crate::quant::layout::QUAD_BYTES;
use crate::quant::recode::{IQ1_M_LEVELS, IQ2_LEVELS, IQ3_S_LEVELS, IQ3_XXS_LEVELS, weights_at};
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};

/// Levels plus a zero point, as unsigned bytes; eight levels twice.
const fn shifted<const N: usize>(levels: [i8; N], zero_point: u8) -> [u8; 16] {
    let mut shifted = [0; 16];
    let mut i = 0;
    while i < 16 {
        shifted[i] = (levels[i % N] as u8).wrapping_add(zero_point);
        i += 1;
    }
    shifted
}

const BIASED_IQ4_NL: [u8; 16] = shifted(IQ4_NL_LEVELS, 128);
/// The levels plus 128, less 15 times their index.
const IQ4_NL_RESIDUALS: [u8; 16] = {
    let mut residuals = BIASED_IQ4_NL;
    let mut n = 0;
    while n < 16 {
        residuals[n] -= 15 * n as u8;
        assert!(residuals[n] <= 19);
        n += 1;
    }
    residuals
};
/// Zero point 16: sums of pairs of products stay small, so that more of them fit 16 bits.
const E2M1: [u8; 16] = shifted(E2M1_LEVELS, 16);

pub(in crate::quant) struct Iq4Nl;

impl Format for Iq4Nl {
    const TYPE: WeightType = WeightType::IQ4_NL;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(128);
    const BYTES: Bytes = Bytes::Biased;
    const INDICES: Option<&'static [u8; 16]> = Some(const { &IQ4_NL_RESIDUALS });
    type Cursor<L: ByteLanes> = *const u8;

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; the block begins with its scales.
        unsafe { scales.d[0] = load_halves(l, block, 0, lane) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, _: usize) -> *const u8 {
        // SAFETY: the caller's block has 2 bytes of scale per row, then its weights.
        unsafe { block.add(16 * 2 + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; four quads of nibbles begin at `from`.
        unsafe { l.lookup(&BIASED_IQ4_NL, nibbles(l, from, g)) }
    }
    #[inline(always)]
    unsafe fn indices<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; four quads of nibbles begin at `from`.
        unsafe { nibbles(l, from, g) }
    }
}

pub(in crate::quant) struct Iq4Xs;

impl Format for Iq4Xs {
    const TYPE: WeightType = WeightType::IQ4_XS;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(128);
    const BYTES: Bytes = Bytes::Biased;
    const INDICES: Option<&'static [u8; 16]> = Some(const { &IQ4_NL_RESIDUALS });
    const SCALES_DIFFER: bool = false;
    type Cursor<L: ByteLanes> = *const u8;

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; the lower four bits of scale `s` are nibble `s` of a word, its upper
        // two are bits `2 s` of two bytes, of which byte `n` of lane `m` is at `16 n + m`.
        unsafe {
            scales.d[0] = load_halves(l, block, 0, lane);
            let low = load_field(l, block, 4, lane);
            let next = l.load_unsigned_bytes(block.add(16 * 3 + lane));
            // Scales 0, 2, 4, 6 and 1, 3, 5, 7 as the bytes of two words.
            let high = l.or(l.load_unsigned_bytes(block.add(16 * 2 + lane)), l.shift(next, 16));
            // Bytes 1 and 3 of either word take their pairs from four bits further down than bytes 0 and 2.
            let high = l.or(high, l.shift(high, 4));
            for odd in 0..2 {
                let pairs = l.and(l.shift(high, 4 - 2 * odd as i32), l.splat_word(0x3030_3030));
                let nibbles = l.and(l.shift(low, -4 * odd as i32), l.splat_word(0x0f0f_0f0f));
                let word = l.or(pairs, nibbles);
                for b in 0..4 {
                    scales.scales[2 * b + odd] = l.offset_scale(l.byte_scale(word, b as i32, 0), -32);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> *const u8 {
        // SAFETY: the caller's block has a scale `s`: 8 bytes of scales per row, then 16 of weights per scale.
        unsafe { block.add(16 * (8 + 16 * s) + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; four quads of nibbles begin at `from`.
        unsafe { l.lookup(&BIASED_IQ4_NL, nibbles(l, from, g)) }
    }
    #[inline(always)]
    unsafe fn indices<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; four quads of nibbles begin at `from`.
        unsafe { nibbles(l, from, g) }
    }
}

pub(in crate::quant) struct Mxfp4;

impl Format for Mxfp4 {
    const TYPE: WeightType = WeightType::MXFP4;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = Some(16);
    const BYTES: Bytes = Bytes::Unsigned(28);
    type Cursor<L: ByteLanes> = *const u8;

    /// `2^(e - 128)`: the exponent field is `e - 1`, except for the subnormal results of 0 and 1, whose bits are those of
    /// `(e + 1) 2^21`. Of both, as signed words, the right one is the larger.
    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; lane `n`'s exponent is byte `n` of the block.
        unsafe {
            let exponent = l.load_unsigned_bytes(block.add(lane));
            let normal = l.shift(l.add_words(exponent, l.splat_word(-1)), 23);
            let subnormal = l.shift(l.add_words(exponent, l.splat_word(1)), 21);
            scales.d[0] = l.as_float(l.max_words(normal, subnormal));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, _: usize) -> *const u8 {
        // SAFETY: the caller's block has 1 byte of exponent per row, then its weights.
        unsafe { block.add(16 + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; four quads of nibbles begin at `from`.
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

    /// The seven bits of a scale are those of an `f32`'s exponent and mantissa except for the bias: 127 instead of 7,
    /// and one for the doubled levels.
    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        const BIAS: f32 = f32::from_bits((127 + 119) << 23);
        // SAFETY: the caller entered the features; the block begins with a word per row, whose byte `s` is scale `s`.
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
        // SAFETY: the caller's block has a scale `s`: 4 bytes of scales per row, then 8 of weights per scale.
        unsafe { block.add(16 * (4 + 8 * s) + 4 * lane) }
    }
    /// Quads 0 and 1 are the low nibbles of two words, 2 and 3 the high ones.
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; two quads of nibbles begin at `from`.
        unsafe {
            let bytes = l.shift_bytes(l.load_words(from.add(g % 2 * QUAD_BYTES)), -(g as i32 / 2 * 4));
            l.lookup(&E2M1, l.and(bytes, l.splat_word(0x0f0f_0f0f)))
        }
    }
}

/// A block's scale and four bits `b` of each other scale, `2 b + 1`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed grid block with as many scales, `lane` one
/// of its rows.
#[inline(always)]
pub(super) unsafe fn load_odd_scales<L: ByteLanes>(
    l: L,
    block: *const u8,
    lane: usize,
    scales: &mut [L::I],
    d: &mut L::V,
) {
    // SAFETY: the caller entered the features; `f32` begin the block; then nibble `s % 8` of word `s / 8` is scale `s`.
    unsafe {
        *d = l.load(block.add(4 * lane).cast());
        for (w, scales) in scales.chunks_exact_mut(8).enumerate() {
            let nibbles = load_field(l, block, 4 + 4 * w, lane);
            for odd in 0..2 {
                let bits = l.and(l.shift(nibbles, 1 - 4 * odd as i32), l.splat_word(0x1e1e_1e1e));
                let bytes = l.or(bits, l.splat_word(0x0101_0101));
                for b in 0..4 {
                    scales[2 * b + odd] = l.byte_scale(bytes, b as i32, 0);
                }
            }
        }
    }
}

/// Quad `q` of 32 weights of three bits, which `recode.rs` lays out: in one word, or two bits there
/// and the upper one in the second word.
///
/// One expression for all quads, although all indices are constants: one for each was a fifth of
/// this crate's compile time.
///
/// # Safety
/// The caller is inside a function with `L`'s features; three quads of bytes begin at `from`.
#[inline(always)]
pub(super) unsafe fn three_bits<L: ByteLanes>(l: L, from: *const u8, q: usize) -> L::I {
    /// The word, and how far up its bits are shifted.
    const LOW: [(usize, i32); 8] = [(0, 0), (0, -3), (1, 0), (0, -6), (1, -3), (2, 0), (2, -3), (2, -6)];
    let ((word, up), is_split) = (LOW[q % 8], q % 4 == 3);
    // SAFETY: the caller entered the features; three quads of bytes begin at `from`.
    unsafe {
        let low = shifted_bits(l, from.add(word * QUAD_BYTES), up, if is_split { 0x0303_0303 } else { 0x0707_0707 });
        if !is_split {
            return low;
        }
        l.or(low, shifted_bits(l, from.add(QUAD_BYTES), if q == 3 { -4 } else { -5 }, 0x0404_0404))
    }
}

/// A format with level indices: `$from` points at the 32 weights that contain quad `$q`.
macro_rules! levels {
    ($name:ident, $type:ident, $quads:literal, $levels:ident + $zero_point:literal, $max:literal, $bits:literal,
        |$l:ident, $from:ident, $q:ident| $number:expr) => {
        pub(in crate::quant) struct $name;

        impl Format for $name {
            const TYPE: WeightType = WeightType::$type;
            const QUADS_PER_SCALE: usize = $quads;
            const ZERO_POINT: Option<u8> = Some($zero_point);
            const BYTES: Bytes = Bytes::Unsigned($max);
            /// With three bits, code for each of them is up to 1.1 times as fast.
            const SCALES_DIFFER: bool = $bits == 3;
            /// With the first quad of the scale.
            type Cursor<L: ByteLanes> = (*const u8, usize);

            #[inline(always)]
            unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
                // SAFETY: the caller entered the features; the block has `SCALES` scales.
                unsafe { load_odd_scales(l, block, lane, &mut scales.scales[..Self::SCALES], &mut scales.d[0]) }
            }
            #[inline(always)]
            unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L> {
                let quad = s * $quads;
                // SAFETY: the caller's block has a scale `s`; eight quads take `$bits` words from `weights_at` on.
                unsafe {
                    let weights = block.add(16 * const { weights_at(Self::TYPE) } + 4 * lane);
                    (weights.add(quad / 8 * $bits * QUAD_BYTES), quad % 8)
                }
            }
            #[inline(always)]
            unsafe fn quad<L: ByteLanes>($l: L, ($from, first): Self::Cursor<L>, g: usize) -> L::I {
                const LEVELS: [u8; 16] = shifted($levels, $zero_point);
                let $q = first + g;
                // SAFETY: the caller entered the features; the `$bits` words that contain quad `$q` begin at `$from`.
                unsafe { $l.lookup(&LEVELS, $number) }
            }
        }
    };
}

levels!(Iq3Xxs, IQ3_XXS, 8, IQ3_XXS_LEVELS + 31, 62, 4, |l, from, q| nibbles(l, from, q));
levels!(Iq3S, IQ3_S, 8, IQ3_S_LEVELS + 15, 30, 4, |l, from, q| nibbles(l, from, q));
levels!(Iq2Xxs, IQ2_XXS, 8, IQ2_LEVELS + 43, 86, 3, |l, from, q| three_bits(l, from, q));
// And IQ2_XS.
levels!(Iq2Xs, IQ2_S, 4, IQ2_LEVELS + 43, 86, 3, |l, from, q| three_bits(l, from, q));
levels!(Iq1M, IQ1_M, 4, IQ1_M_LEVELS + 9, 18, 3, |l, from, q| three_bits(l, from, q));
