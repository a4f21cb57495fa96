//! Unpacking in registers: each format's weights as unsigned bytes, and its scales as vectors.
//!
//! Offsets are those of [`super::layout`]: a GGUF field at byte `o` starts at byte `16 o` of the packed block. `lane` is the
//! first of the panel's rows that the vectors hold: 0 with 16 lanes, 0 or 8 with 8.

mod blocks_32;
mod decoded;
#[cfg(target_arch = "x86_64")]
mod iq3_vbmi;
mod levels;

pub(super) use blocks_32::{Q40, Q41, Q50, Q51, Q80};
pub(super) use decoded::InMemory;
pub(super) use levels::{Iq4Nl, Iq4Xs, Mxfp4, Nvfp4};

use crate::quant::layout::QUAD_BYTES;
use crate::quant::packed_matrix::PackedMatrix;
use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};
use half::f16;
use std::ops::Range;

/// A block's scales, for the rows that one vector holds.
pub(super) struct BlockScales<L: ByteLanes> {
    /// Sub-block scales, for [`ByteLanes::add_products`]. Where [`Format::quad`] leaves weights a power of two high, those
    /// of the other sub-blocks are that much larger, and `d` smaller. Blocks of 32 have `d` alone.
    pub scales: [L::I; 16],
    /// The sub-blocks' mins as pairs of `i16`, in the order of the activations' bsums.
    pub mins: [L::I; 8],
    /// The block's scale; of NVFP4, those of its four sub-blocks.
    pub d: [L::V; 4],
    /// What multiplies the mins' part: `-dmin`, or `m` of Q4_1 and Q5_1.
    pub dmin: L::V,
}

impl<L: ByteLanes> BlockScales<L> {
    /// Zeros, to be filled block by block by [`Format::load_scales`].
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    pub unsafe fn empty(l: L) -> Self {
        // SAFETY: as the caller's.
        unsafe { Self { scales: [l.zero(); 16], mins: [l.zero(); 8], d: [l.splat(0.0); 4], dmin: l.splat(0.0) } }
    }
}

/// A packed format. A quad is four consecutive inputs.
///
/// # Safety
/// Functions are unsafe for one reason: they must run inside a function with `L`'s features, with `block` being what
/// [`Format::prepare`] returned for a packed block of this format.
pub(super) trait Format {
    const TYPE: WeightType;
    /// Quads per scale: 8 or 4.
    const QUADS_PER_SCALE: usize;
    /// The stored value of a zero weight; `None` if stored weights are the weights, unsigned (a min shifts them).
    const ZERO_POINT: Option<u8>;
    /// What the bytes of [`Format::quad`] are.
    const BYTES: Bytes;
    /// Scales in a block: 1, 4, 8 or 16.
    const SCALES: usize = Self::TYPE.block_len() / 4 / Self::QUADS_PER_SCALE;
    /// Pairs of mins in a block of 256.
    const MIN_PAIRS: usize = 0;
    /// Whether blocks of 32 have a min.
    const HAS_MIN: bool = false;
    /// The offsets in an activation block of 32 are for zero point 128: the shift to `ZERO_POINT`.
    const OFFSET_SHIFT: u32 = match Self::ZERO_POINT {
        Some(zero_point) => (128 / zero_point).ilog2(),
        None => 0,
    };
    /// The place of a scale's quads.
    type Cursor<L: ByteLanes>: Copy;
    /// Memory for a block that is decoded before its weights are read.
    type Scratch;
    const SCRATCH: Self::Scratch;

    /// The type of a matrix: [`Format::TYPE`], if the format is of one type only.
    #[inline(always)]
    fn weight_type(_: &PackedMatrix<'_>) -> WeightType {
        Self::TYPE
    }
    /// Decodes some rows of a block of that type into `scratch`, where the format does so; what the functions below get as
    /// `block`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; `block` points at a packed block.
    #[inline(always)]
    unsafe fn prepare<L: ByteLanes>(
        _: L,
        _: WeightType,
        block: *const u8,
        _rows: Range<usize>,
        _: &mut Self::Scratch,
    ) -> *const u8 {
        block
    }
    /// # Safety
    /// As the trait's.
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>);
    /// The place of scale `s`'s quads.
    ///
    /// # Safety
    /// As the trait's; the block has a scale `s`.
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Self::Cursor<L>;
    /// Quad `g` of the cursor's scale: four unsigned bytes per lane.
    ///
    /// # Safety
    /// As the trait's; `g < QUADS_PER_SCALE`.
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Self::Cursor<L>, g: usize) -> L::I;
}

/// The field of `f16` at byte `offset` of a GGUF block.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed block with such a field, `lane` one of its rows.
#[inline(always)]
unsafe fn load_halves<L: ByteLanes>(l: L, block: *const u8, offset: usize, lane: usize) -> L::V {
    // SAFETY: the caller names a field of `f16` scales; byte lanes are vectors, which load from any address.
    unsafe { l.load_f16(block.add(16 * offset + 2 * lane).cast::<f16>()) }
}

/// The field of words at byte `offset` of a GGUF block.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed block with such a field, `lane` one of its rows.
#[inline(always)]
unsafe fn load_field<L: ByteLanes>(l: L, block: *const u8, offset: usize, lane: usize) -> L::I {
    // SAFETY: the caller names a field of words.
    unsafe { l.load_words(block.add(16 * offset + 4 * lane)) }
}

/// Weights in one plane: bits `mask << up` of the bytes.
///
/// If [`ByteLanes::ALL_BYTES`], the bits stay where they are: one shift less. Scales make up for it, all of a block times
/// the same power of two.
#[derive(Clone, Copy)]
pub(super) struct Plane<L: ByteLanes> {
    from: *const u8,
    mask: L::I,
    up: i32,
}

impl<L: ByteLanes> Plane<L> {
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    unsafe fn new(l: L, from: *const u8, mask: i32, up: i32) -> Self {
        // SAFETY: as the caller's.
        unsafe { Self { from, mask: l.splat_word(if L::ALL_BYTES { mask << up } else { mask }), up } }
    }

    /// `bits` where weights are left high, else zero.
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

/// Weights in two planes: `(low >> down) & low_mask | shift(high, high_up) & high_mask`.
#[derive(Clone, Copy)]
pub(super) struct Planes<L: ByteLanes> {
    low: *const u8,
    low_mask: L::I,
    down: i32,
    high: *const u8,
    high_mask: L::I,
    high_up: i32,
}

impl<L: ByteLanes> Planes<L> {
    /// # Safety
    /// The caller is inside a function with `L`'s features; the planes have a quad `g`.
    #[inline(always)]
    unsafe fn quad(self, l: L, g: usize) -> L::I {
        // SAFETY: the planes have a quad `g`.
        unsafe {
            let low = l.load_words(self.low.add(g * QUAD_BYTES));
            let high = l.load_words(self.high.add(g * QUAD_BYTES));
            let low = l.and(l.shift_bytes(low, -self.down), self.low_mask);
            l.or(low, l.and(l.shift_bytes(high, self.high_up), self.high_mask))
        }
    }
}

/// The 6-bit scales and mins of Q4_K and Q5_K, four to a word; `ggml.rs` says which bits they are. The weights of odd
/// sub-blocks are left `up` bits high.
///
/// # Safety
/// As [`Format::load_scales`], of Q4_K or Q5_K.
#[inline(always)]
unsafe fn load_six_bit_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, up: i32, scales: &mut BlockScales<L>) {
    // SAFETY: as the caller's; both formats begin with two scales and twelve bytes.
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
        scales.dmin = l.sub(l.splat(0.0), load_halves(l, block, 2, lane));
    }
}

pub(super) struct Q4K;

impl Format for Q4K {
    const TYPE: WeightType = WeightType::Q4_K;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = None;
    const BYTES: Bytes = Bytes::Unsigned(15);
    const MIN_PAIRS: usize = 4;
    type Cursor<L: ByteLanes> = Plane<L>;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's.
        unsafe { load_six_bit_scales(l, block, lane, Plane::<L>::up(4), scales) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Plane<L> {
        // SAFETY: as the caller's.
        unsafe { Plane::new(l, block.add(16 * (16 + s / 2 * 32) + 4 * lane), 0x0f0f_0f0f, s as i32 % 2 * 4) }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Plane<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.quad(l, g) }
    }
}

pub(super) struct Q5K;

impl Format for Q5K {
    const TYPE: WeightType = WeightType::Q5_K;
    const QUADS_PER_SCALE: usize = 8;
    const ZERO_POINT: Option<u8> = None;
    const BYTES: Bytes = Bytes::Unsigned(31);
    const MIN_PAIRS: usize = 4;
    type Cursor<L: ByteLanes> = Planes<L>;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's.
        unsafe { load_six_bit_scales(l, block, lane, 0, scales) }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Planes<L> {
        // SAFETY: as the caller's.
        unsafe {
            Planes {
                low: block.add(16 * (48 + s / 2 * 32) + 4 * lane),
                low_mask: l.splat_word(0x0f0f_0f0f),
                down: s as i32 % 2 * 4,
                high: block.add(16 * 16 + 4 * lane),
                high_mask: l.splat_word(0x1010_1010),
                high_up: 4 - s as i32,
            }
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Planes<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.quad(l, g) }
    }
}

pub(super) struct Q6K;

impl Format for Q6K {
    const TYPE: WeightType = WeightType::Q6_K;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = Some(32);
    const BYTES: Bytes = Bytes::Unsigned(63);
    type Cursor<L: ByteLanes> = Planes<L>;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's; byte `s` of lane `n` is at `16 s + n` of the scales.
        unsafe {
            scales.d[0] = load_halves(l, block, 208, lane);
            for s in 0..16 {
                scales.scales[s] = l.to_scale(l.load_signed_bytes(block.add(16 * (192 + s) + lane)));
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Planes<L> {
        // SAFETY: as the caller's.
        unsafe {
            let (half, quarter, start) = (s / 8, s % 8 / 2, s % 2 * 16);
            Planes {
                low: block.add(16 * (half * 64 + quarter % 2 * 32 + start) + 4 * lane),
                low_mask: l.splat_word(0x0f0f_0f0f),
                down: quarter as i32 / 2 * 4,
                high: block.add(16 * (128 + half * 32 + start) + 4 * lane),
                high_mask: l.splat_word(0x3030_3030),
                high_up: 4 - 2 * quarter as i32,
            }
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Planes<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.quad(l, g) }
    }
}

pub(super) struct Q2K;

impl Format for Q2K {
    const TYPE: WeightType = WeightType::Q2_K;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = None;
    const BYTES: Bytes = Bytes::Unsigned(3);
    const MIN_PAIRS: usize = 8;
    type Cursor<L: ByteLanes> = Plane<L>;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's.
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
            scales.dmin = l.sub(l.splat(0.0), load_halves(l, block, 82, lane));
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Plane<L> {
        // SAFETY: as the caller's.
        unsafe {
            let from = block.add(16 * (16 + s / 8 * 32 + s % 2 * 16) + 4 * lane);
            Plane::new(l, from, 0x0303_0303, s as i32 % 8 / 2 * 2)
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Plane<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.quad(l, g) }
    }
}

pub(super) struct Q3K;

impl Format for Q3K {
    const TYPE: WeightType = WeightType::Q3_K;
    const QUADS_PER_SCALE: usize = 4;
    const ZERO_POINT: Option<u8> = Some(4);
    const BYTES: Bytes = Bytes::Unsigned(7);
    type Cursor<L: ByteLanes> = Planes<L>;
    type Scratch = ();
    const SCRATCH: () = ();

    #[inline(always)]
    unsafe fn load_scales<L: ByteLanes>(l: L, block: *const u8, lane: usize, scales: &mut BlockScales<L>) {
        // SAFETY: as the caller's; the 6 bits of a scale are a nibble of the first two words and a pair of the third's.
        unsafe {
            scales.d[0] = load_halves(l, block, 108, lane);
            let low = [load_field(l, block, 96, lane), load_field(l, block, 100, lane)];
            let high = load_field(l, block, 104, lane);
            for w in 0..4 {
                let nibbles = l.and(l.shift(low[w % 2], -(w as i32 / 2 * 4)), l.splat_word(0x0f0f_0f0f));
                let pairs = l.and(l.shift(high, 4 - 2 * w as i32), l.splat_word(0x3030_3030));
                let word = l.or(nibbles, pairs);
                for b in 0..4 {
                    scales.scales[4 * w + b] = l.offset_scale(l.byte_scale(word, b as i32, 0), -32);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn cursor<L: ByteLanes>(l: L, block: *const u8, lane: usize, s: usize) -> Planes<L> {
        // SAFETY: as the caller's.
        unsafe {
            let start = s % 2 * 16;
            Planes {
                low: block.add(16 * (32 + s / 8 * 32 + start) + 4 * lane),
                low_mask: l.splat_word(0x0303_0303),
                down: s as i32 % 8 / 2 * 2,
                high: block.add(16 * start + 4 * lane),
                high_mask: l.splat_word(0x0404_0404),
                high_up: 2 - s as i32 / 2,
            }
        }
    }
    #[inline(always)]
    unsafe fn quad<L: ByteLanes>(l: L, cursor: Planes<L>, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { cursor.quad(l, g) }
    }
}

/// Evaluates `$run` with `$F` as the [`Format`] of a weight type.
macro_rules! with_format {
    ($weight_type:expr, |$F:ident| $run:expr) => {
        with_format!(@each $weight_type, $F, $run, Q4_0 Q40, Q4_1 Q41, Q5_0 Q50, Q5_1 Q51, Q8_0 Q80, Q2_K Q2K, Q3_K Q3K,
            Q4_K Q4K, Q5_K Q5K, Q6_K Q6K, IQ4_NL Iq4Nl, IQ4_XS Iq4Xs, MXFP4 Mxfp4, NVFP4 Nvfp4
            | TQ1_0 TQ2_0 IQ1_S IQ2_XXS IQ3_XXS IQ3_S <8> | IQ1_M IQ2_XS IQ2_S <4>)
    };
    (@each $weight_type:expr, $F:ident, $run:expr, $($type:ident $format:ident),* $(| $($decoded:ident)* <$quads:literal>)*) => {
        match $weight_type {
            $($crate::quant::weight_type::WeightType::$type => {
                type $F = $crate::quant::unpack::$format;
                $run
            })*
            $($(| $crate::quant::weight_type::WeightType::$decoded)* => {
                type $F = $crate::quant::unpack::InMemory<$quads>;
                $run
            })*
        }
    };
}
pub(super) use with_format;
