//! Level lanes: eight words in a ymm register, half a line at a time.

use crate::simd::avx2::products::{Ymm, YmmProducts};
use crate::simd::levels::LevelLanes;
use crate::simd::words::Words;
use std::arch::x86_64::*;

/// The byte order of a 4 by 4 transpose.
///
/// # Safety
/// The caller is inside a function with AVX2.
#[inline(always)]
pub(crate) unsafe fn transpose_bytes() -> __m128i {
    // SAFETY: the caller is inside a function with AVX2.
    unsafe { _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15) }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Words` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: YmmProducts> Words for Ymm<P> {
    type I = __m256i;

    #[inline(always)]
    unsafe fn splat_word(self, x: i32) -> __m256i {
        unsafe { _mm256_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn add_words(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn to_float(self, a: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(a) }
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
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `LevelLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: YmmProducts> LevelLanes for Ymm<P> {
    const QUERIES: usize = 4;
    // `vpdpbusd` takes one operand unsigned.
    const BIAS: u8 = if P::ALL_BYTES { 128 } else { 0 };
    /// Four tables of 16, each twice.
    type Table = [__m256i; 4];
    /// Magnitudes, and levels.
    type Key = [__m256i; 2];
    /// Bytes 0 and 2 of each word in 16 bits, and bytes 1 and 3.
    type Value = [__m256i; 2];

    #[inline(always)]
    unsafe fn xor(self, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_xor_si256(a, b) }
    }
    // AVX2 has no rotation. One of the two shifts has count zero; with a constant `by` it is optimised away.
    #[inline(always)]
    unsafe fn shift_right(self, a: __m256i, by: i32) -> __m256i {
        unsafe {
            let right = _mm256_srlv_epi32(a, _mm256_set1_epi32(by.max(0)));
            _mm256_sllv_epi32(right, _mm256_set1_epi32((-by).max(0)))
        }
    }
    #[inline(always)]
    unsafe fn select(self, mask: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_or_si256(_mm256_and_si256(mask, a), _mm256_andnot_si256(mask, b)) }
    }
    #[inline(always)]
    unsafe fn table(self, bytes: &[u8; 64]) -> [__m256i; 4] {
        unsafe {
            let quarter = |i: usize| _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().add(16 * i).cast()));
            [quarter(0), quarter(1), quarter(2), quarter(3)]
        }
    }
    #[inline(always)]
    unsafe fn lookup<const BITS: usize>(self, table: [__m256i; 4], index: __m256i) -> __m256i {
        unsafe {
            let low = _mm256_and_si256(index, _mm256_set1_epi8(15));
            let first = _mm256_shuffle_epi8(table[0], low);
            if BITS <= 4 {
                return first;
            }
            // A blend selects by the upper bit of each byte: bits 4 and 5 are shifted there.
            let bit4 = _mm256_slli_epi16::<3>(index);
            let first = _mm256_blendv_epi8(first, _mm256_shuffle_epi8(table[1], low), bit4);
            if BITS == 5 {
                return first;
            }
            let (third, fourth) = (_mm256_shuffle_epi8(table[2], low), _mm256_shuffle_epi8(table[3], low));
            let second = _mm256_blendv_epi8(third, fourth, bit4);
            _mm256_blendv_epi8(first, second, _mm256_slli_epi16::<2>(index))
        }
    }
    #[inline(always)]
    unsafe fn key(self, levels: __m256i) -> [__m256i; 2] {
        unsafe { [_mm256_abs_epi8(levels), levels] }
    }
    #[inline(always)]
    unsafe fn dot_key(self, acc: __m256i, key: [__m256i; 2], query: *const i32, v: usize) -> __m256i {
        unsafe {
            let query = _mm256_set1_epi32(*query.add(v));
            if P::ALL_BYTES {
                P::add_bytes(acc, key[1], query)
            } else {
                // Magnitudes times the query with the levels' signs: 2 * 127 * 127 fits the 16 bits
                // to which `vpmaddubsw` saturates.
                P::add_bytes(acc, key[0], _mm256_sign_epi8(query, key[1]))
            }
        }
    }
    #[inline(always)]
    unsafe fn value(self, levels: __m256i) -> [__m256i; 2] {
        unsafe {
            if P::ALL_BYTES {
                [_mm256_and_si256(levels, _mm256_set1_epi16(255)), _mm256_srli_epi16::<8>(levels)]
            } else {
                [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(levels)), _mm256_srai_epi16::<8>(levels)]
            }
        }
    }
    #[inline(always)]
    unsafe fn dot_value(self, sums: [__m256i; 2], value: [__m256i; 2], weights: *const i32, v: usize) -> [__m256i; 2] {
        unsafe {
            [
                P::add_pairs(sums[0], value[0], _mm256_set1_epi32(*weights.add(2 * v))),
                P::add_pairs(sums[1], value[1], _mm256_set1_epi32(*weights.add(2 * v + 1))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn join(self, sums: [__m256i; 2], offset: i32) -> __m256i {
        unsafe { _mm256_add_epi32(_mm256_add_epi32(sums[0], sums[1]), _mm256_set1_epi32(offset)) }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut i32, weights: __m256) -> __m256i {
        unsafe {
            let weights = _mm256_cvtps_epi32(weights);
            let packed = _mm_packs_epi32(_mm256_castsi256_si128(weights), _mm256_extracti128_si256::<1>(weights));
            // Of four tokens, 0 and 2 in a word, then 1 and 3.
            let order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
            _mm_storeu_si128(to.cast(), _mm_shuffle_epi8(packed, order));
            weights
        }
    }
    #[inline(always)]
    unsafe fn sum_words(self, a: __m256i) -> i32 {
        let mut words = [0i32; 8];
        unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), a) };
        words.into_iter().fold(0, i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn transpose(self, vectors: [[__m256i; 4]; 2]) -> [[__m256i; 2]; 4] {
        unsafe {
            let order = _mm256_broadcastsi128_si256(transpose_bytes());
            let mut transposed = [[_mm256_setzero_si256(); 2]; 4];
            for (half, mut quads) in vectors.into_iter().enumerate() {
                for quad in &mut quads {
                    *quad = _mm256_shuffle_epi8(*quad, order);
                }
                for tokens in 0..2 {
                    let (a, b) = (quads[2 * tokens], quads[2 * tokens + 1]);
                    transposed[2 * half][tokens] = _mm256_permute2x128_si256::<0x20>(a, b);
                    transposed[2 * half + 1][tokens] = _mm256_permute2x128_si256::<0x31>(a, b);
                }
            }
            transposed
        }
    }
}
