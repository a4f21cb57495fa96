//! Integer products in ymm registers: what AVX-VNNI adds to AVX2.

use std::arch::x86_64::*;

/// Integer products: [`Multiply`] with AVX2, [`Vnni`] with AVX-VNNI.
///
/// # Safety
/// The caller of any function is inside a function with the instruction set's features.
pub(crate) trait Products: Copy {
    /// Whether [`Products::add_bytes`] is exact for all bytes. If not, only for unsigned ones up to 128.
    const ALL_BYTES: bool;
    /// A row's sum over the quads of one scale, during accumulation.
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
    /// Adds to each word the dot product of four unsigned bytes, at most `max`, and four signed ones in -127..=127: quad
    /// `g` of the `quads` that share a scale. Calls are in order of `g`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add_quad(sum: &mut Self::Sum, unsigned: __m256i, signed: __m256i, max: u8, g: usize, quads: usize);
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
}

/// Compiler barrier: keeps `x` and what it depends on in program order. Left free, the compiler mixes the products of
/// many scales until registers overflow, and issues the prefetches in bursts.
#[inline]
#[target_feature(enable = "avx")]
pub(crate) fn ymm_barrier(mut x: __m256i) -> __m256i {
    // SAFETY: the template has no instruction.
    unsafe { std::arch::asm!("/* {} */", inout(ymm_reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

// SAFETY of the blocks below: the caller is inside a function with this instruction set's features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Products for Multiply {
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
        unsafe { PairSum { words: _mm256_set1_epi32(from), pairs: _mm256_setzero_si256() } }
    }
    #[inline(always)]
    unsafe fn add_quad(sum: &mut PairSum, unsigned: __m256i, signed: __m256i, max: u8, g: usize, quads: usize) {
        unsafe {
            // Quads whose pair sums fit 16 bits together, rounded down to a power of two, which `quads` is.
            let fit = (1 << (32767 / (2 * 127 * usize::from(max))).ilog2()).min(quads);
            let pairs = _mm256_maddubs_epi16(unsigned, signed);
            sum.pairs = if g.is_multiple_of(fit) { pairs } else { _mm256_add_epi16(sum.pairs, pairs) };
            let widen = g % fit == fit - 1;
            if widen {
                sum.words = _mm256_add_epi32(sum.words, _mm256_madd_epi16(sum.pairs, _mm256_set1_epi16(1)));
            }
            if g % 2 == 1 {
                let changed = if widen { &mut sum.words } else { &mut sum.pairs };
                *changed = ymm_barrier(*changed);
            }
        }
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

/// AVX-VNNI: `vpdpbusd` in VEX encoding, without AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Vnni;

// SAFETY of the blocks below: the caller is inside a function with this instruction set's features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Products for Vnni {
    const ALL_BYTES: bool = true;
    type Sum = __m256i;

    #[inline(always)]
    unsafe fn add_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(sum, unsigned, signed) }
    }
    #[inline(always)]
    unsafe fn begin(from: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(from) }
    }
    #[inline(always)]
    unsafe fn add_quad(sum: &mut __m256i, unsigned: __m256i, signed: __m256i, _: u8, g: usize, _: usize) {
        unsafe {
            *sum = _mm256_dpbusd_avx_epi32(*sum, unsigned, signed);
            if g % 2 == 1 {
                *sum = ymm_barrier(*sum);
            }
        }
    }
    #[inline(always)]
    unsafe fn end(sum: __m256i) -> __m256i {
        sum
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
