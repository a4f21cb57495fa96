//! Integer products in ymm registers, with AVX2 or AVX-VNNI.

use std::arch::x86_64::*;

/// Integer products: [`Multiply`] with AVX2, [`Vnni`] with AVX-VNNI.
///
/// # Safety
/// The caller of any function is inside a function with the instruction set's features.
pub(crate) trait YmmProducts: Copy {
    /// Whether [`YmmProducts::add_bytes`] is exact for all bytes. If not, only for unsigned ones up to 128.
    const ALL_BYTES: bool;
    /// A row's sum over a block, during accumulation.
    type Sum: Copy;

    /// Adds to each word the dot product of four unsigned and four signed bytes.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i;
    /// The initial sums.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn begin(from: i32) -> Self::Sum;
    /// Words within the range of `i16` as scales.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn to_scale(words: __m256i) -> __m256i;
    /// Byte `b` of every word, unsigned, times `2^up` as a scale, `up` in 0..=8; with [`Multiply`], `up` is 0, or 8 and
    /// the byte signed.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn byte_scale(words: __m256i, b: i32, up: i32) -> __m256i;
    /// Adds `by` to every scale.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn offset_scale(scale: __m256i, by: i16) -> __m256i;
    /// How many quads of unsigned bytes up to `max`, of `quads`, are added before the sum is widened: a power of two.
    fn quads_together(max: u8, quads: usize) -> usize;
    /// Adds to each word the dot product of four unsigned bytes, at most `max`, and four signed ones in -127..=127,
    /// times the scale: quad `g` of the `quads` that share it. Calls are in order of `g`, up to the last. If the first
    /// has `from`, sums of pairs start from it, of as many quads as sums of signed bytes of magnitude `max` allow.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_quad(
        sum: &mut Self::Sum,
        unsigned: __m256i,
        signed: __m256i,
        max: u8,
        quad: (usize, usize),
        from: Option<__m256i>,
        scale: Option<__m256i>,
    );
    /// Adds 15 times the dot product of indices below 16 and signed bytes, times the scale. Calls are as those of
    /// [`YmmProducts::add_quad`].
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_indices(
        sum: &mut Self::Sum,
        indices: __m256i,
        signed: __m256i,
        quad: (usize, usize),
        scale: Option<__m256i>,
    );
    /// Subtracts words.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn subtract(sum: &mut Self::Sum, words: __m256i);
    /// The sums, one word per lane.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn end(sum: Self::Sum) -> __m256i;
    /// Adds to each word the dot product of two `i16` and two `i16`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_pairs(sum: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

/// AVX2 alone.
#[derive(Clone, Copy)]
pub(crate) struct Multiply;

/// A sum of products with AVX2: 16-bit pairs over as many quads as fit, then words.
#[derive(Clone, Copy)]
pub(crate) struct PairSum {
    words: __m256i,
    pairs: __m256i,
    indices: __m256i,
}

/// Compiler barrier: keeps `x` and what it depends on in program order. Without it, the compiler interleaves the
/// products of many scales until registers spill, and issues the prefetches in bursts.
#[inline]
#[target_feature(enable = "avx")]
pub(crate) fn ymm_barrier(mut x: __m256i) -> __m256i {
    // SAFETY: the template has no instruction.
    unsafe { std::arch::asm!("/* {} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

// SAFETY of the blocks below: the caller is inside a function with this instruction set's features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl YmmProducts for Multiply {
    // `vpmaddubsw` saturates its 16-bit pairs: 2 * 128 * 127 fits, 2 * 240 * 127 does not.
    const ALL_BYTES: bool = false;
    type Sum = PairSum;

    #[inline(always)]
    unsafe fn add_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        unsafe {
            let pairs = _mm256_maddubs_epi16(unsigned, signed);
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
    #[inline(always)]
    unsafe fn begin(from: i32) -> PairSum {
        unsafe {
            PairSum { words: _mm256_set1_epi32(from), pairs: _mm256_setzero_si256(), indices: _mm256_setzero_si256() }
        }
    }
    #[inline(always)]
    unsafe fn to_scale(words: __m256i) -> __m256i {
        unsafe {
            let low = _mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9, 8, 9, 12, 13, 12, 13);
            _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(low))
        }
    }
    #[inline(always)]
    unsafe fn byte_scale(words: __m256i, b: i32, up: i32) -> __m256i {
        unsafe {
            // Bytes 0 and 2 of a word are its byte `b`, or bytes 1 and 3 if `up` is 8; the others are zero.
            let bytes = (0x8000_8000 | (b << 16 | b) as u32).rotate_left(up as u32) as i32;
            let words_at = _mm_setr_epi32(0, 0x0004_0004 << up, 0x0008_0008 << up, 0x000c_000c << up);
            let at = _mm256_or_si256(_mm256_set1_epi32(bytes), _mm256_broadcastsi128_si256(words_at));
            _mm256_shuffle_epi8(words, at)
        }
    }
    #[inline(always)]
    unsafe fn offset_scale(scale: __m256i, by: i16) -> __m256i {
        unsafe { _mm256_add_epi16(scale, _mm256_set1_epi16(by)) }
    }
    // The largest number of pair sums whose total fits in 16 bits.
    #[inline(always)]
    fn quads_together(max: u8, quads: usize) -> usize {
        (1 << (32767 / (2 * 127 * usize::from(max))).ilog2()).min(quads)
    }
    #[inline(always)]
    unsafe fn add_quad(
        sum: &mut PairSum,
        unsigned: __m256i,
        signed: __m256i,
        max: u8,
        (g, quads): (usize, usize),
        from: Option<__m256i>,
        scale: Option<__m256i>,
    ) {
        unsafe {
            let together = Self::quads_together(max, quads);
            let pairs = _mm256_maddubs_epi16(unsigned, signed);
            let from = if g.is_multiple_of(together) { from } else { Some(sum.pairs) };
            sum.pairs = from.map_or(pairs, |from| _mm256_add_epi16(from, pairs));
            if g % together == together - 1 {
                let scale = scale.unwrap_or(_mm256_set1_epi16(1));
                sum.words = ymm_barrier(_mm256_add_epi32(sum.words, _mm256_madd_epi16(sum.pairs, scale)));
            } else if together > 2 {
                sum.pairs = ymm_barrier(sum.pairs);
            }
        }
    }
    #[inline(always)]
    unsafe fn add_indices(
        sum: &mut PairSum,
        indices: __m256i,
        signed: __m256i,
        (g, quads): (usize, usize),
        scale: Option<__m256i>,
    ) {
        unsafe {
            let pairs = _mm256_maddubs_epi16(indices, signed);
            sum.indices = if g == 0 { pairs } else { ymm_barrier(_mm256_add_epi16(sum.indices, pairs)) };
            if g + 1 == quads {
                let fifteen = _mm256_set1_epi16(15);
                let scale = scale.map_or(fifteen, |scale| _mm256_mullo_epi16(scale, fifteen));
                sum.words = _mm256_add_epi32(sum.words, _mm256_madd_epi16(sum.indices, scale));
            }
        }
    }
    #[inline(always)]
    unsafe fn subtract(sum: &mut PairSum, words: __m256i) {
        unsafe { sum.words = _mm256_sub_epi32(sum.words, words) }
    }
    #[inline(always)]
    unsafe fn end(sum: PairSum) -> __m256i {
        sum.words
    }
    #[inline(always)]
    unsafe fn add_pairs(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)) }
    }
}

/// A row's sum over a block, and its dot products over the quads of one scale.
#[derive(Clone, Copy)]
pub(crate) struct ScaledSum {
    total: __m256i,
    dots: __m256i,
}

/// Hides a value from the optimizer: constants stay in registers or memory instead of being rematerialized at each use.
#[inline]
#[target_feature(enable = "avx")]
pub(crate) fn opaque_ymm(mut x: __m256i) -> __m256i {
    // SAFETY: the template has no instruction.
    unsafe { std::arch::asm!("/* {} */", inout(ymm_reg) x, options(pure, nomem, nostack, preserves_flags)) };
    x
}

/// AVX-VNNI: `vpdpbusd` in VEX encoding, without AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Vnni;

// SAFETY of the blocks below: the caller is inside a function with this instruction set's features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl YmmProducts for Vnni {
    const ALL_BYTES: bool = true;
    type Sum = ScaledSum;

    #[inline(always)]
    unsafe fn add_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(sum, unsigned, signed) }
    }
    #[inline(always)]
    unsafe fn begin(from: i32) -> ScaledSum {
        unsafe { ScaledSum { total: _mm256_set1_epi32(from), dots: _mm256_setzero_si256() } }
    }
    #[inline(always)]
    unsafe fn to_scale(words: __m256i) -> __m256i {
        words
    }
    #[inline(always)]
    unsafe fn byte_scale(words: __m256i, b: i32, up: i32) -> __m256i {
        unsafe {
            let byte = _mm256_and_si256(_mm256_srlv_epi32(words, _mm256_set1_epi32(8 * b)), _mm256_set1_epi32(0xff));
            _mm256_sllv_epi32(byte, _mm256_set1_epi32(up))
        }
    }
    #[inline(always)]
    unsafe fn offset_scale(scale: __m256i, by: i16) -> __m256i {
        unsafe { _mm256_add_epi32(scale, _mm256_set1_epi32(by.into())) }
    }
    #[inline(always)]
    fn quads_together(_: u8, quads: usize) -> usize {
        quads
    }
    #[inline(always)]
    unsafe fn add_quad(
        sum: &mut ScaledSum,
        unsigned: __m256i,
        signed: __m256i,
        _: u8,
        (g, quads): (usize, usize),
        _: Option<__m256i>,
        scale: Option<__m256i>,
    ) {
        unsafe {
            let Some(scale) = scale else {
                sum.total = ymm_barrier(_mm256_dpbusd_avx_epi32(sum.total, unsigned, signed));
                return;
            };
            let from = if g == 0 { _mm256_setzero_si256() } else { sum.dots };
            sum.dots = ymm_barrier(_mm256_dpbusd_avx_epi32(from, unsigned, signed));
            if g + 1 == quads {
                sum.total = _mm256_add_epi32(sum.total, _mm256_mullo_epi32(sum.dots, scale));
            }
        }
    }
    #[inline(always)]
    unsafe fn add_indices(_: &mut ScaledSum, _: __m256i, _: __m256i, _: (usize, usize), _: Option<__m256i>) {
        unreachable!("lanes with masks")
    }
    #[inline(always)]
    unsafe fn subtract(sum: &mut ScaledSum, words: __m256i) {
        unsafe { sum.total = _mm256_sub_epi32(sum.total, words) }
    }
    #[inline(always)]
    unsafe fn end(sum: ScaledSum) -> __m256i {
        sum.total
    }
    #[inline(always)]
    unsafe fn add_pairs(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_dpwssd_avx_epi32(sum, a, b) }
    }
}

/// Eight lanes in a ymm register; `P` is the kind of integer products.
#[derive(Clone, Copy)]
pub(crate) struct Ymm<P>(pub P);

/// Sixteen lanes in two ymm registers, for products with panels: a loaded word of activations is used for both.
#[derive(Clone, Copy)]
pub(crate) struct YmmPair<P>(pub P);
