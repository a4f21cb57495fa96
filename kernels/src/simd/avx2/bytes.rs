//! Byte lanes: eight words in a ymm register, half a panel at a time.

use crate::simd::avx2::products::{Multiply, Products, Vnni, Ymm, ymm_barrier};
use crate::simd::bytes::{ByteLanes, Bytes, PanelOp};
use crate::simd::entry;
use std::arch::x86_64::*;

/// The entry of a kind of products.
pub(crate) trait Enter: Products {
    /// Evaluates an operation in a function of its own.
    ///
    /// # Safety
    /// The caller is inside a function with the instruction set's features.
    unsafe fn call<O: PanelOp>(op: O);
}

impl Enter for Multiply {
    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        // SAFETY: as the caller's.
        unsafe { entry::avx2_panels::eval(op) }
    }
}

impl Enter for Vnni {
    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        // SAFETY: as the caller's.
        unsafe { entry::avx_vnni_panels::eval(op) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, which is what `ByteLanes` demands.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Enter> ByteLanes for Ymm<P> {
    const ALL_BYTES: bool = P::ALL_BYTES;
    const MAX_ROWS: usize = 4;
    const BARRIERS: bool = true;
    type I = __m256i;
    type Sum = P::Sum;

    #[inline(always)]
    unsafe fn call<O: PanelOp>(self, op: O) {
        unsafe { P::call(op) }
    }
    #[inline(always)]
    unsafe fn zero(self) -> __m256i {
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn splat_word(self, x: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn store_words(self, to: *mut u8, v: __m256i) {
        unsafe { _mm256_storeu_si256(to.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_signed_bytes(self, from: *const u8) -> __m256i {
        unsafe { _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast())) }
    }
    #[inline(always)]
    unsafe fn and(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(a, b) }
    }
    #[inline(always)]
    unsafe fn or(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(a, b) }
    }
    // AVX2 has no rotation. One of the two shifts has count zero; with a constant `by` it is optimised away.
    #[inline(always)]
    unsafe fn shift(self, a: __m256i, by: i32) -> __m256i {
        unsafe {
            let left = _mm256_sllv_epi32(a, _mm256_set1_epi32(by.max(0)));
            _mm256_srlv_epi32(left, _mm256_set1_epi32((-by).max(0)))
        }
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16], a: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), a) }
    }
    #[inline(always)]
    unsafe fn to_float(self, a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn barrier(self, x: __m256) -> __m256 {
        unsafe { _mm256_castsi256_ps(ymm_barrier(_mm256_castps_si256(x))) }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(self, from: [i32; R]) -> [P::Sum; R] {
        unsafe {
            let mut sums = [P::begin(0); R];
            for (sum, from) in sums.iter_mut().zip(from) {
                *sum = P::begin(from);
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn add_products<const R: usize>(
        self,
        sums: &mut [P::Sum; R],
        bytes: Bytes,
        (g, quads): (usize, usize),
        weights: [__m256i; 2],
        x: [*const i32; 2],
    ) {
        unsafe {
            for (i, (weights, x)) in weights.into_iter().zip(x).enumerate() {
                for (r, sum) in sums.iter_mut().enumerate() {
                    let x = self.splat_word(*x.add(r));
                    match bytes {
                        Bytes::Unsigned(max) => P::add_quad(sum, weights, x, max, g + i, quads),
                        Bytes::Biased if P::ALL_BYTES => P::add_quad(sum, weights, x, 255, g + i, quads),
                        Bytes::Biased => {
                            // |w| (at most 128, as an unsigned byte) times x with w's sign.
                            let signed = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
                            let (weights, x) = (_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
                            P::add_quad(sum, weights, x, 128, g + i, quads);
                        }
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(self, sums: [P::Sum; R]) -> [__m256i; R] {
        unsafe {
            let mut words = [self.zero(); R];
            for (words, sum) in words.iter_mut().zip(sums) {
                *words = P::end(sum);
            }
            words
        }
    }
    #[inline(always)]
    unsafe fn add_pairs<const R: usize>(self, totals: &mut [__m256i; R], pairs: __m256i, x: *const i32) {
        unsafe {
            for (r, total) in totals.iter_mut().enumerate() {
                *total = P::add_pairs(*total, pairs, self.splat_word(*x.add(r)));
            }
        }
    }

    #[inline(always)]
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32 {
        unsafe {
            let magnitude = _mm256_set1_epi32(0x7fff_ffff);
            let mut largest = _mm256_setzero_si256();
            for x in x.chunks_exact(8) {
                let x = _mm256_and_si256(_mm256_loadu_si256(x.as_ptr().cast()), magnitude);
                largest = _mm256_max_epu32(largest, x);
            }
            let mut lanes = [0u32; 8];
            _mm256_storeu_si256(lanes.as_mut_ptr().cast(), largest);
            lanes.into_iter().fold(0, u32::max)
        }
    }
    #[inline(always)]
    unsafe fn first_of_magnitude(self, x: &[f32], largest: u32) -> usize {
        unsafe {
            let (magnitude, largest) = (_mm256_set1_epi32(0x7fff_ffff), _mm256_set1_epi32(largest as i32));
            for (i, x) in x.chunks_exact(8).enumerate() {
                let x = _mm256_and_si256(_mm256_loadu_si256(x.as_ptr().cast()), magnitude);
                let found = _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, largest)));
                if found != 0 {
                    return 8 * i + found.trailing_zeros() as usize;
                }
            }
            0
        }
    }
    #[inline(always)]
    unsafe fn round_to_bytes(self, x: &[f32], scale: f32, out: &mut [u8]) {
        unsafe {
            let scale = _mm256_set1_ps(scale);
            let (low, high) = (_mm256_set1_epi32(-127), _mm256_set1_epi32(127));
            let round = |x: *const f32| {
                let x = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), scale));
                _mm256_min_epi32(_mm256_max_epi32(x, low), high)
            };
            for (x, out) in x.chunks_exact(32).zip(out.chunks_exact_mut(32)) {
                let x = x.as_ptr();
                let a = _mm256_packs_epi32(round(x), round(x.add(8)));
                let b = _mm256_packs_epi32(round(x.add(16)), round(x.add(24)));
                // Packing works within 128-bit halves; this restores the order of words.
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(a, b), order);
                _mm256_storeu_si256(out.as_mut_ptr().cast(), bytes);
            }
        }
    }
}
