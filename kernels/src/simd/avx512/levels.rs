//! Level lanes: sixteen words in a zmm register, VBMI table lookups, VNNI dot products.

use crate::simd::avx2::levels::transpose_bytes;
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::levels::LevelLanes;
use std::arch::x86_64::*;

/// Byte order: for each four words, byte 1 of each, then byte 0 of each; 32 bytes, the rest is unused.
const PARTS: [u8; 64] = {
    let mut bytes = [0; 64];
    let mut i = 0;
    while i < 32 {
        let (four, part, word) = (i / 8, i / 4 % 2, i % 4);
        bytes[i] = (4 * (4 * four + word) + 1 - part) as u8;
        i += 1;
    }
    bytes
};

/// Subtracts 128 from byte 0 of each word.
const PARTS_BIAS: i64 = i64::from_le_bytes([0, 0, 0, 0, 128, 128, 128, 128]);

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `LevelLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl LevelLanes for Avx512Lanes {
    const QUERIES: usize = 8;
    // `vpdpbusd` takes one operand unsigned.
    const BIAS: u8 = 128;
    type Table = __m512i;
    type Key = __m512i;
    type Value = __m512i;

    #[inline(always)]
    unsafe fn xor(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_xor_si512(a, b) }
    }
    // A rotation by a count modulo 32 shifts either way.
    #[inline(always)]
    unsafe fn shift_right(self, a: __m512i, by: i32) -> __m512i {
        unsafe { _mm512_rorv_epi32(a, _mm512_set1_epi32(by & 31)) }
    }
    #[inline(always)]
    unsafe fn select(self, mask: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_ternarylogic_epi32::<0xca>(mask, a, b) }
    }
    #[inline(always)]
    unsafe fn table(self, bytes: &[u8; 64]) -> __m512i {
        unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
    }
    // `vpermb` for every size: it ignores the upper two bits of an index.
    #[inline(always)]
    unsafe fn lookup<const BITS: usize>(self, table: __m512i, index: __m512i) -> __m512i {
        unsafe { _mm512_permutexvar_epi8(index, table) }
    }
    #[inline(always)]
    unsafe fn key(self, levels: __m512i) -> __m512i {
        levels
    }
    #[inline(always)]
    unsafe fn dot_key(self, acc: __m512i, key: __m512i, query: *const i32, v: usize) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(acc, key, _mm512_set1_epi32(*query.add(v))) }
    }
    // Weights are 256 * a + b with signed bytes: two byte products cost as much as one 16-bit
    // product, and levels need no widening.
    #[inline(always)]
    unsafe fn value(self, levels: __m512i) -> __m512i {
        levels
    }
    #[inline(always)]
    unsafe fn dot_value(self, sums: [__m512i; 2], value: __m512i, weights: *const i32, v: usize) -> [__m512i; 2] {
        unsafe {
            [
                _mm512_dpbusd_epi32(sums[0], value, _mm512_set1_epi32(*weights.add(2 * v))),
                _mm512_dpbusd_epi32(sums[1], value, _mm512_set1_epi32(*weights.add(2 * v + 1))),
            ]
        }
    }
    #[inline(always)]
    unsafe fn join(self, sums: [__m512i; 2], offset: i32) -> __m512i {
        unsafe {
            let sum = _mm512_add_epi32(_mm512_slli_epi32::<8>(sums[0]), sums[1]);
            _mm512_add_epi32(sum, _mm512_set1_epi32(offset))
        }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut i32, weights: __m512) -> __m512i {
        unsafe {
            let weights = _mm512_cvtps_epi32(weights);
            // After adding 128, byte 1 is the upper part, and byte 0 the lower part plus 128.
            let biased = _mm512_add_epi32(weights, _mm512_set1_epi32(128));
            let parts = _mm512_permutexvar_epi8(_mm512_loadu_si512(PARTS.as_ptr().cast()), biased);
            let parts = _mm256_xor_si256(_mm512_castsi512_si256(parts), _mm256_set1_epi64x(PARTS_BIAS));
            _mm256_storeu_si256(to.cast(), parts);
            weights
        }
    }
    #[inline(always)]
    unsafe fn sum_words(self, a: __m512i) -> i32 {
        unsafe { _mm512_reduce_add_epi32(a) }
    }
    #[inline(always)]
    unsafe fn transpose(self, vectors: [[__m512i; 4]; 2]) -> [[__m512i; 2]; 4] {
        unsafe {
            let [mut a, mut b, mut c, mut d] = vectors[0];
            // 4 by 4 bytes within each quarter, then the quarters of four vectors.
            let order = _mm512_broadcast_i32x4(transpose_bytes());
            for x in [&mut a, &mut b, &mut c, &mut d] {
                *x = _mm512_shuffle_epi8(*x, order);
            }
            let (ab_low, ab_high) = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0xee>(a, b));
            let (cd_low, cd_high) = (_mm512_shuffle_i32x4::<0x44>(c, d), _mm512_shuffle_i32x4::<0xee>(c, d));
            [
                [_mm512_shuffle_i32x4::<0x88>(ab_low, cd_low); 2],
                [_mm512_shuffle_i32x4::<0xdd>(ab_low, cd_low); 2],
                [_mm512_shuffle_i32x4::<0x88>(ab_high, cd_high); 2],
                [_mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high); 2],
            ]
        }
    }
}
