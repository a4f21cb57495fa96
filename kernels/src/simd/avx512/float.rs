//! `f32` lanes: sixteen in a zmm register.

use crate::simd::avx2::float::sum128;
use crate::simd::float::{Floats, Lanes};
use half::{bf16, f16};
use std::arch::x86_64::*;

/// Adds the upper half to the lower half, twice: 16 lanes to 4.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn fold(a: __m512) -> __m128 {
    // SAFETY: the caller is inside a function with AVX-512.
    unsafe {
        let x = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1))
    }
}

// Pairwise transpose and reduce: the folds below add in the order of `fold` and `sum128`, but two vectors per
// instruction. Each uses one blend and one shuffle, because shuffles have a single port and blends share the ports of
// additions.

/// The folded halves of `a` in the lower half, of `b` in the upper.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn fold_halves(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller is inside a function with AVX-512.
    unsafe { _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4(a, b, 0x4E)) }
}

/// Four vectors, each folded to a quarter.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn fold4(a: [__m512; 4]) -> __m512 {
    // SAFETY: the caller is inside a function with AVX-512.
    unsafe {
        let (x, y) = (fold_halves(a[0], a[2]), fold_halves(a[1], a[3]));
        // Quarters: of `x` two of a[0] and two of a[2], of `y` two of a[1] and two of a[3]; the result has a[0], a[1],
        // a[2], a[3].
        let others = _mm512_setr_epi32(4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
        _mm512_add_ps(_mm512_mask_blend_ps(0xF0F0, x, y), _mm512_permutex2var_ps(x, others, y))
    }
}

/// In every quarter, the folded halves of `a` in the lower half, of `b` in the upper.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn fold_quarters(a: __m512, b: __m512) -> __m512 {
    // SAFETY: the caller is inside a function with AVX-512.
    unsafe { _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, a, b), _mm512_shuffle_ps(a, b, 0x4E)) }
}

/// The 16-bit words that are the upper halves of 32-bit lanes.
const UPPER: __mmask32 = 0xAAAA_AAAA;

/// Source indices of `vpermw` that place sixteen 16-bit words in the upper halves of 32-bit lanes.
#[repr(align(64))]
struct Spread([u16; 32]);

static SPREAD: Spread = {
    let mut from = [0; 32];
    let mut i = 0;
    while i < 32 {
        from[i] = i as u16 / 2;
        i += 1;
    }
    Spread(from)
};

/// Sixteen bf16 as `f32`: one masked `vpermw`, instead of a widening and a shift. `asm!`, because the compiler turns
/// the intrinsic into two instructions. (With 32 bf16 as its memory operand, twice as many loads straddle cache lines.)
///
/// # Safety
/// The processor has AVX-512 F and BW, and `from` has 16 readable elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn widen(from: *const bf16) -> __m512 {
    // SAFETY: the caller's pointer has 16 elements.
    unsafe {
        let indices = _mm512_load_si512(SPREAD.0.as_ptr().cast());
        let narrow = _mm512_castsi256_si512(_mm256_loadu_si256(from.cast()));
        let wide: __m512;
        std::arch::asm!(
            "vpermw {wide}{{{upper}}}{{z}}, {indices}, {narrow}",
            wide = lateout(zmm_reg) wide,
            upper = in(kreg) UPPER,
            indices = in(zmm_reg) indices,
            narrow = in(zmm_reg) narrow,
            options(pure, nomem, nostack, preserves_flags)
        );
        wide
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Avx512Lanes;

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Lanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Floats for Avx512Lanes {
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
    unsafe fn store(self, to: *mut f32, v: __m512) {
        unsafe { _mm512_storeu_ps(to, v) }
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
    unsafe fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Lanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for Avx512Lanes {
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> __m512 {
        unsafe { widen(from) }
    }
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> __m512 {
        unsafe { _mm512_maskz_loadu_ps((1u16 << count) - 1, from) }
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
            let x = fold4(a);
            let x = _mm512_add_ps(x, _mm512_permute_ps(x, 0x4E));
            let x = _mm512_add_ps(x, _mm512_movehdup_ps(x));
            let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, x)));
            sums
        }
    }
    #[inline(always)]
    unsafe fn sum16(self, a: [__m512; 16]) -> [f32; 16] {
        unsafe {
            // As a 4 by 4 matrix of vectors: a row becomes a quarter of a register, its columns the quarter's lanes.
            let mut columns = [_mm512_setzero_ps(); 4];
            for (i, column) in columns.iter_mut().enumerate() {
                *column = fold4([a[i], a[4 + i], a[8 + i], a[12 + i]]);
            }
            let pairs = [fold_quarters(columns[0], columns[1]), fold_quarters(columns[2], columns[3])];
            let even = _mm512_shuffle_ps(pairs[0], pairs[1], 0x88);
            let odd = _mm512_shuffle_ps(pairs[0], pairs[1], 0xDD);
            let mut sums = [0.0; 16];
            _mm512_storeu_ps(sums.as_mut_ptr(), _mm512_add_ps(even, odd));
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
