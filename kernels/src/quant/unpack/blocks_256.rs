//! Formats with blocks of 256 and integer weights.

use super::blocks_32::five_bits;
use super::format::{BlockScales, Format, load_field, load_halves, shifted_bits};
use super::levels::three_bits;
use crate::quant::layout::QUAD_BYTES;
use crate::quant::recode::weights_at;
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};

/// Weights in one plane: bits `mask << up` of the bytes.
///
/// If [`ByteLanes::ALL_BYTES`], the bits stay where they are, which saves a shift. Scales compensate, all of a block
/// times the same power of two.
#[derive(Clone, Copy)]
pub(in crate::quant) struct Plane<L: ByteLanes> {
    from: *const u8,
    mask: L::I,
    up: i32,
}

impl<L: ByteLanes> Plane<L> {
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    unsafe fn new(l: L, from: *const u8, mask: i32, up: i32) -> Self {
        // SAFETY: the caller entered the features.
        unsafe { Self { from, mask: l.splat_word(if L::ALL_BYTES { mask << up } else { mask }), up } }
    }

    /// `bits` if weights stay shifted left, else zero.
    const fn up(bits: i32) -> i32 {
        if L::ALL_BYTES { bits } else { 0 }
    }

    /// # Safety
    /// The caller is inside a function with `L`'s features; the plane has a quad `g`.
    #[inline(always)]
    unsafe fn quad(self, l: L, g: usize) -> L::I {
        // SAFETY: the plane has a quad `g`.
        unsafe {
            let bytes = l.load_words(self.from.add(g * QUAD_BYTES));
            l.and(if L::ALL_BYTES { bytes } else { l.shift_bytes(bytes, -self.up) }, self.mask)
        }
    }
}

/// The 6-bit scales and mins of Q4_K and Q5_K, four to a word; `ggml.rs` shows their bits. The weights of odd
/// sub-blocks stay shifted left by `up` bits.
///
/// # Safety
/// As [`Format::load_scales`], of Q4_K or Q5_K.
#[inline(always)]
unsafe fn load_six_bit_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, up: i32, scales: &mut BlockScales<L>) {
    // SAFETY: the caller entered the features; both formats begin with two scales and twelve bytes.
    unsafe {
        scales.d[0] = l.mul(load_halves(l, block, 0, lane), l.splat(1.0 / (1u32 << up) as f32));
        let [a, b, c] = [load_field(l, block, 4, lane), load_field(l, block, 8, lane), load_field(l, block, 12, lane)];
        let (six, four, two) = (l.splat_word(0x3f3f_3f3f), l.splat_word(0x0f0f_0f0f), l.splat_word(0x3030_3030));
        let six_bit = [l.and(a, six), l.or(l.and(c, four), l.and(l.shift(a, -2), two))];
        let mins = [l.and(b, six), l.or(l.and(l.shift(c, -4), four), l.and(l.shift(b, -2), two))];
        for s in 0..8 {
            scales.scales[s] = l.byte_scale(six_bit[s / 4], s as i32 % 4, if s % 2 == 0 { up } else { 0 });
        }
        let even = l.splat_word(0x00ff_00ff);
        for (w, mins) in mins.into_iter().enumerate() {
            scales.mins[2 * w] = l.and(mins, even);
            scales.mins[2 * w + 1] = l.and(l.shift(mins, -8), even);
        }
        // From -0.0, so that a `dmin` of zero also changes its sign, as in `scalar.rs`.
        scales.dmin = l.sub(l.splat(-0.0), load_halves(l, block, 2, lane));
    }
}

pub(in crate::quant) struct Q4K;

impl Q4K {
    /// Odd sub-blocks are the upper nibbles.
    const ODD_SHIFT: u32 = 4;
}

impl Format for Q4K {
    const TYPE: WeightType = WeightType::Q4_K;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = None;
    const BYTES: Bytes = Bytes::Unsigned(15);
    const DIGITS: Option<u32> = Some(Self::ODD_SHIFT);
    const MIN_PAIRS: usize = 4;
    const UNPACKED_FROM: usize = 7;
    type Cursor<L: ByteLanes> = Plane<L>;

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; `block` is one of Q4_K.
        unsafe { load_six_bit_scales(l, block, lane, Plane::<L>::up(Self::ODD_SHIFT as i32), scales) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Plane<L> {
        // SAFETY: the caller entered the features; the block has a scale `s`: per row 16 bytes, then 32 per two scales.
        unsafe { Plane::new(l, block.add(16 * (16 + s / 2 * 32) + 4 * lane), 0x0f0f_0f0f, s as i32 % 2 * 4) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Plane<L>, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the plane has quad `g` of its scale.
        unsafe { cursor.quad(l, g) }
    }
}

pub(in crate::quant) struct Q5K;

impl Format for Q5K {
    const TYPE: WeightType = WeightType::Q5_K;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = None;
    const BYTES: Bytes = Bytes::Unsigned(31);
    const DIGITS: Option<u32> = Some(0);
    const MIN_PAIRS: usize = 4;
    type Cursor<L: ByteLanes> = *const u8;

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; `block` is one of Q5_K.
        unsafe { load_six_bit_scales(l, block, lane, 0, scales) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> *const u8 {
        // SAFETY: the caller's block has a scale `s`; a scale's quads take five words.
        unsafe { block.add(16 * const { weights_at(Self::TYPE) } + 5 * s * QUAD_BYTES + 4 * lane) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, from: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the five words of the scale's quads begin at `from`.
        unsafe { five_bits(l, from, g) }
    }
}

pub(in crate::quant) struct Q6K;

impl Format for Q6K {
    const TYPE: WeightType = WeightType::Q6_K;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = Some(32);
    const BYTES: Bytes = Bytes::Unsigned(63);
    const PREFETCH_SINGLE_STREAM_FROM: usize = 4;
    /// With the first quad of the scale.
    type Cursor<L: ByteLanes> = (*const u8, usize);

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; byte `s` of lane `n` is at `16 s + n` of the scales.
        unsafe {
            scales.d[0] = load_halves(l, block, 0, lane);
            for s in 0..16 {
                scales.scales[s] = l.to_scale(l.load_signed_bytes(block.add(16 * (2 + s) + lane)));
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L> {
        // SAFETY: the caller's block has a scale `s`; the quads of two scales take six words.
        unsafe {
            let weights = block.add(16 * const { weights_at(Self::TYPE) } + 4 * lane);
            (weights.add(s / 2 * 6 * QUAD_BYTES), s % 2 * 4)
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, (from, first): Self::Cursor<L>, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the six words that contain quad `first + g` begin at `from`.
        unsafe { six_bits(l, from, first + g) }
    }
}

/// Quad `q` of 32 weights of six bits, which `recode.rs` lays out.
///
/// # Safety
/// The caller is inside a function with `L`'s features; six quads of bytes begin at `from`.
#[inline(always)]
unsafe fn six_bits<L: ByteLanes>(l: L, from: *const u8, q: usize) -> L::I {
    let t = q % 4;
    // SAFETY: the caller entered the features; six quads of bytes begin at `from`.
    unsafe {
        let word = from.add(t * QUAD_BYTES);
        if q < 4 {
            return shifted_bits(l, word, 0, 0x3f3f_3f3f);
        }
        let upper = shifted_bits(l, from.add((4 + t / 2) * QUAD_BYTES), 2 - 4 * (t as i32 % 2), 0x3c3c_3c3c);
        l.or(shifted_bits(l, word, -6, 0x0303_0303), upper)
    }
}

pub(in crate::quant) struct Q2K;

impl Format for Q2K {
    const TYPE: WeightType = WeightType::Q2_K;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = None;
    const BYTES: Bytes = Bytes::Unsigned(3);
    const MIN_PAIRS: usize = 8;
    const UNPACKED_FROM: usize = 7;
    const PREFETCH_SINGLE_STREAM_FROM: usize = 1;
    type Cursor<L: ByteLanes> = Plane<L>;

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; a row has 16 bytes of scales and mins, 64 of weights, and two `f16`.
        unsafe {
            let max_up = Plane::<L>::up(6);
            scales.d[0] = l.mul(load_halves(l, block, 80, lane), l.splat(1.0 / (1u32 << max_up) as f32));
            let (nibbles, even) = (l.splat_word(0x0f0f_0f0f), l.splat_word(0x000f_000f));
            for w in 0..4 {
                let word = load_field(l, block, 4 * w, lane);
                for b in 0..4 {
                    let s = 4 * w + b;
                    let up = max_up - Plane::<L>::up(s as i32 % 8 / 2 * 2);
                    scales.scales[s] = l.byte_scale(l.and(word, nibbles), b as i32, up);
                }
                scales.mins[2 * w] = l.and(l.shift(word, -4), even);
                scales.mins[2 * w + 1] = l.and(l.shift(word, -12), even);
            }
            scales.dmin = l.sub(l.splat(-0.0), load_halves(l, block, 82, lane));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Plane<L> {
        // SAFETY: the caller entered the features; the block has a scale `s`, whose four quads begin at `from`.
        unsafe {
            let from = block.add(16 * (16 + s / 8 * 32 + s % 2 * 16) + 4 * lane);
            Plane::new(l, from, 0x0303_0303, s as i32 % 8 / 2 * 2)
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Plane<L>, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the plane has quad `g` of its scale.
        unsafe { cursor.quad(l, g) }
    }
}

pub(in crate::quant) struct Q3K;

impl Format for Q3K {
    const TYPE: WeightType = WeightType::Q3_K;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = Some(4);
    const BYTES: Bytes = Bytes::Unsigned(7);
    /// With the first quad of the scale.
    type Cursor<L: ByteLanes> = (*const u8, usize);

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: the caller entered the features; a scale's 6 bits are a nibble of `a` or `b` and a pair of `high`.
        unsafe {
            scales.d[0] = l.mul(load_halves(l, block, 0, lane), l.splat(1.0 / (1u32 << L::CENTERED_UP) as f32));
            let (a, b, high) =
                (load_field(l, block, 2, lane), load_field(l, block, 6, lane), load_field(l, block, 10, lane));
            // Not in a loop, which the compiler leaves rolled.
            let low = [a, b, l.shift(a, -4), l.shift(b, -4)];
            let high = [l.shift(high, 4), l.shift(high, 2), high, l.shift(high, -2)];
            for w in 0..4 {
                let pairs = l.and(high[w], l.splat_word(0x3030_3030));
                let word = l.or(l.and(low[w], l.splat_word(0x0f0f_0f0f)), pairs);
                for b in 0..4 {
                    scales.scales[4 * w + b] = l.centered_scale(word, b as i32);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(_: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L> {
        // SAFETY: the caller's block has a scale `s`; the quads of two scales take three words.
        unsafe {
            let weights = block.add(16 * const { weights_at(Self::TYPE) } + 4 * lane);
            (weights.add(s / 2 * 3 * QUAD_BYTES), s % 2 * 4)
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, (from, first): Self::Cursor<L>, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the three words that contain quad `first + g` begin at `from`.
        unsafe { three_bits(l, from, first + g) }
    }
}
