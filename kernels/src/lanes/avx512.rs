//! Sixteen lanes in a zmm register.

use super::Lanes;
use half::{bf16, f16};
use std::arch::x86_64::*;

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
        unsafe { _mm512_reduce_add_ps(a) }
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
