//! The trait of a format: a block's weights, quad by quad, and its scales.

use crate::quant::weight_type::WeightType;
use crate::simd::bytes::{ByteLanes, Bytes};
use half::f16;

/// A block's scales, for the rows that one vector holds.
pub(in crate::quant) struct BlockScales<L: ByteLanes> {
    /// Sub-block scales, for [`ByteLanes::add_products`]. Where [`Format::quad`] leaves weights multiplied by a power
    /// of two, the scales of the other sub-blocks are larger by it, and `d` is smaller; so it is where
    /// [`ByteLanes::CENTERED_UP`] makes all of them larger. Blocks of 32 have `d` alone.
    pub scales: [L::I; 16],
    /// The sub-blocks' mins as pairs of `i16`, in the order of the activations' bsums.
    pub mins: [L::I; 8],
    /// The block's scale; for NVFP4, those of its four sub-blocks.
    pub d: [L::V; 4],
    /// The factor of the mins: `-dmin`, or `m` of Q4_1 and Q5_1.
    pub dmin: L::V,
}

impl<L: ByteLanes> BlockScales<L> {
    /// Zeros, to be filled block by block by [`Format::load_scales`].
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    pub unsafe fn empty(l: L) -> Self {
        // SAFETY: the caller entered the features.
        unsafe { Self { scales: [l.zero(); 16], mins: [l.zero(); 8], d: [l.splat(0.0); 4], dmin: l.splat(0.0) } }
    }
}

/// A packed format. A quad is four consecutive inputs.
///
/// # Safety
/// Functions are unsafe for one reason: they must run inside a function with `L`'s features, with `block` being a
/// packed block of this format, `lane` the first of `L::LANES` of its rows, and a cursor being [`Format::cursor`]'s.
pub(in crate::quant) trait Format {
    /// The type, or one of those whose packed blocks are the same.
    const TYPE: WeightType;
    /// Quads per scale: 8 or 4.
    const QUADS_PER_SCALE: usize;
    /// The stored value of a zero weight; `None` if stored weights are the weights, unsigned (a min shifts them).
    const ZERO_POINT: Option<u8>;
    /// The encoding of the bytes of [`Format::quad`].
    const BYTES: Bytes;
    /// The table of [`Bytes::Indices`] for [`Format::indices`].
    const INDICES: Option<&'static [u8; 16]> = None;
    /// Scales in a block: 1, 4, 8 or 16.
    const SCALES: usize = Self::TYPE.block_len() / 4 / Self::QUADS_PER_SCALE;
    /// Whether the code that unpacks a scale depends on its index, by shifts and masks that are to be constants.
    const SCALES_DIFFER: bool = true;
    /// Rows from which a single stream of panels is also prefetched in software. At one row, a Zen 4's hardware prefetcher
    /// covers the run for most types, and software prefetches would cost up to a quarter of the bandwidth; with more
    /// rows, which compute longer, it stops.
    const PREFETCH_SINGLE_STREAM_FROM: usize = usize::MAX;
    /// Rows from which blocks are unpacked into memory, where registers hold four. Measured on a Zen 3: fewer are faster
    /// in two passes of up to four rows that each unpack in registers, depending on what unpacking takes.
    const UNPACKED_FROM: usize = 5;
    /// If weights have at most five bits and scales six: by how many bits, 0 or 4, [`Format::quad`] leaves the weights of
    /// odd sub-blocks shifted left if [`ByteLanes::ALL_BYTES`]. Weights times three bits of a scale then fit a byte.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    const DIGITS: Option<u32> = None;
    /// Pairs of mins in a block of 256.
    const MIN_PAIRS: usize = 0;
    /// Whether blocks of 32 have a min.
    const HAS_MIN: bool = false;
    /// The offsets in an activation block of 32 are for zero point 128: the shift to `ZERO_POINT`.
    const OFFSET_SHIFT: u32 = match Self::ZERO_POINT {
        Some(zero_point) => (128 / zero_point).ilog2(),
        None => 0,
    };
    /// In blocks of 256 whose zero point is a power of two, with a scale per 16 weights: the shift of the
    /// activations' offsets, which are for zero point 32.
    const OFFSETS_SHIFT: Option<u32> = match (Self::TYPE.block_len(), Self::QUADS_PER_SCALE, Self::ZERO_POINT) {
        (256, 4, Some(32)) => Some(0),
        (256, 4, Some(4)) => Some(3),
        _ => None,
    };
    /// The place of a scale's quads.
    type Cursor<L: ByteLanes>: Copy;
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
    /// As [`Format::quad`], the levels' indices.
    ///
    /// # Safety
    /// As its own.
    #[inline(always)]
    unsafe fn indices<L: ByteLanes>(_: L, _: Self::Cursor<L>, _: usize) -> L::I {
        unreachable!("a format with indices")
    }
}

/// The field of `f16` at byte `offset` of a row's block.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed block with such a
/// field, `lane` one of its rows.
#[inline(always)]
pub(super) unsafe fn load_halves<L: ByteLanes>(l: L, block: *const u8, offset: usize, lane: usize) -> L::V {
    // SAFETY: the caller names a field of `f16` scales; byte lanes are vectors, which load from any address.
    unsafe { l.load_f16(block.add(16 * offset + 2 * lane).cast::<f16>()) }
}

/// The field of words at byte `offset` of a row's block.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `block` is a packed block with such a
/// field, `lane` one of its rows.
#[inline(always)]
pub(super) unsafe fn load_field<L: ByteLanes>(l: L, block: *const u8, offset: usize, lane: usize) -> L::I {
    // SAFETY: the caller names a field of words.
    unsafe { l.load_words(block.add(16 * offset + 4 * lane)) }
}

/// Bytes shifted left, the bits of a mask.
///
/// # Safety
/// The caller is inside a function with `L`'s features; a quad of bytes begins at `from`.
#[inline(always)]
pub(super) unsafe fn shifted_bits<L: ByteLanes>(l: L, from: *const u8, up: i32, mask: i32) -> L::I {
    // SAFETY: the caller entered the features; a quad of bytes begins at `from`.
    unsafe { l.and(l.shift_bytes(l.load_words(from), up), l.splat_word(mask)) }
}
