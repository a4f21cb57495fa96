//! Level lanes: eight words in two NEON registers, `tbl` table lookups.

use crate::simd::both::both;
use crate::simd::levels::LevelLanes;
use crate::simd::neon::pair::{Dot, NeonPair, Widen, sdot};
use crate::simd::words::Words;
use std::arch::aarch64::*;

/// How signed bytes are multiplied and added.
///
/// # Safety
/// The caller of any function is inside a function with the instruction set's features.
pub(crate) trait LevelProducts: Copy {
    /// Adds to each word the dot product of its four bytes and those of word `LANE` of `x`. Products are at most
    /// 127 * 128.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add<const LANE: i32>(sum: int32x4_t, levels: int8x16_t, x: int32x4_t) -> int32x4_t;
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `LevelLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl LevelProducts for Widen {
    #[inline(always)]
    unsafe fn add<const LANE: i32>(sum: int32x4_t, levels: int8x16_t, x: int32x4_t) -> int32x4_t {
        unsafe {
            let x = vreinterpretq_s8_s32(vdupq_laneq_s32::<LANE>(x));
            let low = vmull_s8(vget_low_s8(levels), vget_low_s8(x));
            // The sum of two products fits 16 bits.
            vpadalq_s16(sum, vpaddq_s16(low, vmull_high_s8(levels, x)))
        }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `LevelLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl LevelProducts for Dot {
    #[inline(always)]
    unsafe fn add<const LANE: i32>(sum: int32x4_t, levels: int8x16_t, x: int32x4_t) -> int32x4_t {
        unsafe { sdot::<LANE>(sum, levels, x) }
    }
}

/// Byte order: for each four words, byte 1 of each, then byte 0 of each.
const PARTS: [u8; 16] = [1, 5, 9, 13, 0, 4, 8, 12, 17, 21, 25, 29, 16, 20, 24, 28];

/// The byte order of a 4 by 4 transpose.
const TRANSPOSED: [u8; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `LevelLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: LevelProducts> LevelLanes for NeonPair<P> {
    const QUERIES: usize = 4;
    const BIAS: u8 = 0;
    type Table = uint8x16x4_t;
    type Key = [uint8x16_t; 2];
    type Value = [uint8x16_t; 2];

    #[inline(always)]
    unsafe fn xor(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| veorq_u8(a[I], b[I])) }
    }
    // Shifts bytes, not words: no code crosses a byte.
    #[inline(always)]
    unsafe fn shift_right(self, a: Self::I, by: i32) -> Self::I {
        unsafe { both!(|I| vshlq_u8(a[I], vdupq_n_s8(-by as i8))) }
    }
    #[inline(always)]
    unsafe fn select(self, mask: Self::I, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| vbslq_u8(mask[I], a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn table(self, bytes: &[u8; 64]) -> uint8x16x4_t {
        unsafe { vld1q_u8_x4(bytes.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn lookup<const BITS: usize>(self, table: uint8x16x4_t, index: Self::I) -> Self::I {
        unsafe {
            let mask = vdupq_n_u8((1 << BITS) - 1);
            both!(|I| {
                let index = vandq_u8(index[I], mask);
                match BITS {
                    6 => vqtbl4q_u8(table, index),
                    5 => vqtbl2q_u8(uint8x16x2_t(table.0, table.1), index),
                    _ => vqtbl1q_u8(table.0, index),
                }
            })
        }
    }
    #[inline(always)]
    unsafe fn key(self, levels: Self::I) -> Self::I {
        levels
    }
    #[inline(always)]
    unsafe fn dot_key(self, sum: Self::I, key: Self::I, query: *const i32, v: usize) -> Self::I {
        unsafe {
            let query = vld1q_s32(query);
            both!(|I| {
                let (sum, key) = (vreinterpretq_s32_u8(sum[I]), vreinterpretq_s8_u8(key[I]));
                vreinterpretq_u8_s32(match v {
                    0 => P::add::<0>(sum, key, query),
                    1 => P::add::<1>(sum, key, query),
                    2 => P::add::<2>(sum, key, query),
                    _ => P::add::<3>(sum, key, query),
                })
            })
        }
    }
    // Weights are 256 * a + b with signed bytes, as in AVX-512.
    #[inline(always)]
    unsafe fn value(self, levels: Self::I) -> Self::I {
        levels
    }
    #[inline(always)]
    unsafe fn dot_value(self, sums: [Self::I; 2], value: Self::I, weights: *const i32, v: usize) -> [Self::I; 2] {
        unsafe {
            let weights = weights.add(v / 2 * 4);
            [self.dot_key(sums[0], value, weights, v % 2 * 2), self.dot_key(sums[1], value, weights, v % 2 * 2 + 1)]
        }
    }
    #[inline(always)]
    unsafe fn join(self, sums: [Self::I; 2], offset: i32) -> Self::I {
        unsafe {
            let shifted = both!(|I| vreinterpretq_u8_u32(vshlq_n_u32::<8>(vreinterpretq_u32_u8(sums[0][I]))));
            self.add_words(self.add_words(shifted, sums[1]), self.splat_word(offset))
        }
    }
    #[inline(always)]
    unsafe fn store_weights(self, to: *mut i32, weights: Self::V) -> Self::I {
        unsafe {
            let weights = both!(|I| vreinterpretq_u8_s32(vcvtnq_s32_f32(weights[I])));
            // After adding 128, byte 1 is the upper part, and byte 0 the lower part plus 128.
            let biased = self.add_words(weights, self.splat_word(128));
            let parts = vqtbl2q_u8(uint8x16x2_t(biased[0], biased[1]), vld1q_u8(PARTS.as_ptr()));
            let bias = vreinterpretq_u8_u64(vdupq_n_u64(0x8080_8080_0000_0000));
            vst1q_u8(to.cast(), veorq_u8(parts, bias));
            weights
        }
    }
    #[inline(always)]
    unsafe fn sum_words(self, a: Self::I) -> i32 {
        unsafe { vaddvq_s32(vaddq_s32(vreinterpretq_s32_u8(a[0]), vreinterpretq_s32_u8(a[1]))) }
    }
    // A register is four channels of four tokens: transposed, a quarter of a result.
    #[inline(always)]
    unsafe fn transpose(self, vectors: [[Self::I; 4]; 2]) -> [[Self::I; 2]; 4] {
        unsafe {
            let order = vld1q_u8(TRANSPOSED.as_ptr());
            let mut transposed = [[[vdupq_n_u8(0); 2]; 2]; 4];
            for (half, quads) in vectors.into_iter().enumerate() {
                for (tokens, quad) in quads.into_iter().enumerate() {
                    for (i, quad) in quad.into_iter().enumerate() {
                        transposed[2 * half + i][tokens / 2][tokens % 2] = vqtbl1q_u8(quad, order);
                    }
                }
            }
            transposed
        }
    }
}
