//! `f32` lanes: eight in a ymm register.

use crate::simd::avx2::products::{Ymm, YmmProducts};
use crate::simd::float::{Floats, Lanes};
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

/// Adds the upper half to the lower half.
///
/// # Safety
/// The caller is inside a function with AVX2.
#[inline(always)]
unsafe fn fold(a: __m256) -> __m128 {
    // SAFETY: the caller is inside a function with AVX2.
    unsafe { _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1)) }
}

/// `(x0 + x2) + (x1 + x3)`.
///
/// # Safety
/// The caller is inside a function with AVX2.
#[inline(always)]
pub(crate) unsafe fn sum128(x: __m128) -> f32 {
    // SAFETY: the caller is inside a function with AVX2.
    unsafe {
        let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
        _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Lanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: YmmProducts> Floats for Ymm<P> {
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
    unsafe fn store(self, to: *mut f32, v: __m256) {
        unsafe { _mm256_storeu_ps(to, v) }
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
    unsafe fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Lanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: YmmProducts> Lanes for Ymm<P> {
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m256 {
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())), 16)) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> __m256 {
        unsafe { _mm256_maskload_ps(from, first(count)) }
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
            // Transposes 4 by 4, then (x0 + x2) + (x1 + x3), as `sum` does.
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
