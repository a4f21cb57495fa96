//! Eight lanes in a ymm register.

use super::Lanes;
use crate::quant::PanelOp;
use half::{bf16, f16};
use std::arch::x86_64::*;

/// A mask of the first `count` lanes.
///
/// # Safety
/// The caller is inside a function with AVX2.
#[inline(always)]
unsafe fn first(count: usize) -> __m256i {
    // SAFETY: the caller is inside a function with AVX2.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// Halves added.
///
/// # Safety
/// The caller is inside a function with AVX2.
#[inline(always)]
unsafe fn fold(a: __m256) -> __m128 {
    // SAFETY: the caller is inside a function with AVX2.
    unsafe { _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)) }
}

/// `(0 + 2) + (1 + 3)`.
///
/// # Safety
/// The caller is inside a function with AVX2.
#[inline(always)]
pub(super) unsafe fn sum128(x: __m128) -> f32 {
    // SAFETY: the caller is inside a function with AVX2.
    unsafe {
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

/// How integers are multiplied and added: what AVX-VNNI adds to AVX2.
///
/// # Safety
/// The caller of any function is inside a function with the instruction set's features.
pub(crate) trait Products: Copy {
    /// Whether [`Products::add_bytes`] is exact for all bytes. If not, only for unsigned ones up to 128.
    const ALL_BYTES: bool;
    /// A row's sum over one scale's groups, while it grows.
    type Sum: Copy;

    /// Evaluates an operation in a function of its own.
    unsafe fn call<O: PanelOp>(op: O);
    /// Adds to each word the dot product of four unsigned and four signed bytes.
    unsafe fn add_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i;
    unsafe fn begin(from: i32) -> Self::Sum;
    /// Adds to each word the dot product of four unsigned bytes, at most `max`, and four signed ones in -127..=127: group
    /// `g` of the `groups` that share a scale. Calls come in the order of `g`.
    unsafe fn add_group(sum: &mut Self::Sum, unsigned: __m256i, signed: __m256i, max: u8, g: usize, groups: usize);
    unsafe fn end(sum: Self::Sum) -> __m256i;
    /// Adds to each word the dot product of two `i16` and two `i16`.
    unsafe fn add_pairs(sum: __m256i, a: __m256i, b: __m256i) -> __m256i;
}

/// AVX2 alone.
#[derive(Clone, Copy)]
pub(crate) struct Multiply;

/// Sums of products with AVX2 alone: pairs of 16 bits for as many groups as fit, then words.
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
    // SAFETY: no instruction.
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
    unsafe fn call<O: PanelOp>(op: O) {
        unsafe { crate::isa::avx2_panels::eval(op) }
    }
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
    unsafe fn add_group(sum: &mut PairSum, unsigned: __m256i, signed: __m256i, max: u8, g: usize, groups: usize) {
        unsafe {
            // Groups whose sums of two products fit 16 bits together, down to a power of two, as `groups` is one.
            let fit = (1 << (32767 / (2 * 127 * usize::from(max))).ilog2()).min(groups);
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

/// AVX-VNNI: the dot products of AVX-512 VNNI in the encoding that does without AVX-512.
#[derive(Clone, Copy)]
pub(crate) struct Vnni;

// SAFETY of the blocks below: the caller is inside a function with this instruction set's features.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Products for Vnni {
    const ALL_BYTES: bool = true;
    type Sum = __m256i;

    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        unsafe { crate::isa::avx_vnni_panels::eval(op) }
    }
    #[inline(always)]
    unsafe fn add_bytes(sum: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        unsafe { _mm256_dpbusd_avx_epi32(sum, unsigned, signed) }
    }
    #[inline(always)]
    unsafe fn begin(from: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(from) }
    }
    #[inline(always)]
    unsafe fn add_group(sum: &mut __m256i, unsigned: __m256i, signed: __m256i, _: u8, g: usize, _: usize) {
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

/// Eight lanes; floats do not depend on the products.
#[derive(Clone, Copy)]
pub(crate) struct Ymm<P>(pub P);

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, which is what `Lanes` demands.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Products> Lanes for Ymm<P> {
    const LANES: usize = 8;
    type V = __m256;

    #[inline(always)]
    unsafe fn splat(self, x: f32) -> __m256 {
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())), 16)) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> __m256 {
        unsafe { _mm256_maskload_ps(from, first(count)) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, v: __m256, count: usize) {
        unsafe { _mm256_maskstore_ps(to, first(count), v) }
    }
    #[inline(always)]
    unsafe fn add(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(self, a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round(self, a: __m256) -> __m256 {
        unsafe { _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self, n: __m256) -> __m256 {
        unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
        }
    }
    #[inline(always)]
    unsafe fn sum(self, a: __m256) -> f32 {
        unsafe { sum128(fold(a)) }
    }
    #[inline(always)]
    unsafe fn sum4(self, a: [__m256; 4]) -> [f32; 4] {
        unsafe {
            let x = [fold(a[0]), fold(a[1]), fold(a[2]), fold(a[3])];
            // Four rows of four to four columns, then (0 + 2) + (1 + 3), as `sum` adds them.
            let (p, q) = (_mm_unpacklo_ps(x[0], x[1]), _mm_unpackhi_ps(x[0], x[1]));
            let (r, s) = (_mm_unpacklo_ps(x[2], x[3]), _mm_unpackhi_ps(x[2], x[3]));
            let even = _mm_add_ps(_mm_movelh_ps(p, r), _mm_movelh_ps(q, s));
            let odd = _mm_add_ps(_mm_movehl_ps(r, p), _mm_movehl_ps(s, q));
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(even, odd));
            sums
        }
    }
    #[inline(always)]
    unsafe fn sum_f64(self, a: __m256) -> f64 {
        unsafe {
            let low = _mm256_cvtps_pd(_mm256_castps256_ps128(a));
            let high = _mm256_cvtps_pd(_mm256_extractf128_ps(a, 1));
            let x = _mm256_add_pd(low, high);
            let x = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd(x, 1));
            _mm_cvtsd_f64(_mm_add_sd(x, _mm_unpackhi_pd(x, x)))
        }
    }
    #[inline(always)]
    unsafe fn maximum(self, a: __m256) -> f32 {
        unsafe {
            let x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }
}
