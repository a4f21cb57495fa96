//! Sixteen lanes in a zmm register.

use super::Lanes;
use half::{bf16, f16};
use std::arch::x86_64::*;

use super::avx2::sum128;

/// Halves added, and their halves.
#[inline(always)]
unsafe fn fold(a: __m512) -> __m128 {
    // SAFETY: the caller is inside a function with AVX-512.
    unsafe {
        let x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Avx512Lanes;

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, which is what `Lanes` demands.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx512Lanes {
    const LANES: usize = 16;
    type V = __m512;

    #[inline(always)]
    unsafe fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())), 16)) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps((1u16 << count) - 1, from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(to, v) }
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, v: __m512, count: usize) {
        unsafe { _mm512_mask_storeu_ps(to, (1u16 << count) - 1, v) }
    }
    #[inline(always)]
    unsafe fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn round(self, a: __m512) -> __m512 {
        unsafe { _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self, n: __m512) -> __m512 {
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23))
        }
    }
    #[inline(always)]
    unsafe fn sum(self, a: __m512) -> f32 {
        unsafe { sum128(fold(a)) }
    }
    #[inline(always)]
    unsafe fn sum4(self, a: [__m512; 4]) -> [f32; 4] {
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
    unsafe fn sum_f64(self, a: __m512) -> f64 {
        unsafe {
            let low = _mm512_cvtps_pd(_mm512_castps512_ps256(a));
            let high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(a, 1));
            _mm512_reduce_add_pd(_mm512_add_pd(low, high))
        }
    }
    #[inline(always)]
    unsafe fn maximum(self, a: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(a) }
    }
}
