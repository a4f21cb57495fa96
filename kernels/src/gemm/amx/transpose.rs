//! A 16 by 16 transpose in registers.

use std::arch::x86_64::*;

/// Lane `j` of vector `i` becomes lane `i` of vector `j`. Unrolled: loops would keep the vectors in memory.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
pub(super) unsafe fn transpose(v: [__m512; 16]) -> [__m512; 16] {
    /// Transposes 4 by 4 lanes within each quarter.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn within_quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> [__m512; 4] {
        // SAFETY: the caller is inside a function with the features.
        unsafe {
            let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)];
            let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let high = [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)];
            [_mm512_castpd_ps(low[0]), _mm512_castpd_ps(low[1]), _mm512_castpd_ps(high[0]), _mm512_castpd_ps(high[1])]
        }
    }
    /// Transposes 4 by 4 quarters.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> [__m512; 4] {
        // SAFETY: the caller is inside a function with the features.
        unsafe {
            let (ab, cd) = (_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(c, d, 0x88));
            let even = [_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD)];
            let (ab, cd) = (_mm512_shuffle_f32x4(a, b, 0xDD), _mm512_shuffle_f32x4(c, d, 0xDD));
            let odd = [_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD)];
            [even[0], odd[0], even[1], odd[1]]
        }
    }
    // SAFETY: the caller is inside a function with the features.
    unsafe {
        let [a0, a1, a2, a3] = within_quarters(v[0], v[1], v[2], v[3]);
        let [b0, b1, b2, b3] = within_quarters(v[4], v[5], v[6], v[7]);
        let [c0, c1, c2, c3] = within_quarters(v[8], v[9], v[10], v[11]);
        let [d0, d1, d2, d3] = within_quarters(v[12], v[13], v[14], v[15]);
        let (w, x) = (quarters(a0, b0, c0, d0), quarters(a1, b1, c1, d1));
        let (y, z) = (quarters(a2, b2, c2, d2), quarters(a3, b3, c3, d3));
        [w[0], x[0], y[0], z[0], w[1], x[1], y[1], z[1], w[2], x[2], y[2], z[2], w[3], x[3], y[3], z[3]]
    }
}
