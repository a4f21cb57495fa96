//! One row's quantized block: its quants, its scale, and sums of quants.

use half::f16;

use crate::quant::layout::{PAIRS, q8_1, q8k};
use crate::simd::bytes::ByteLanes;

/// The loops over a block's elements.
pub(super) trait Loops: Copy {
    /// The bits of the largest magnitude. Compared as integers, which order like magnitudes except that a NaN is the
    /// largest, so that the scale becomes NaN as well.
    fn largest(self, x: &[f32]) -> u32;
    /// The first element of that magnitude.
    fn first(self, x: &[f32], largest: u32) -> f32;
    /// The nearest integers to `inverse * x`, ties to even, clamped to -127..=127: rounding makes products up to
    /// 127.00001, the inverse of a subnormal scale is infinite, and -128 would overflow the kernels' 16-bit sums.
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]);
}

#[derive(Clone, Copy)]
pub(super) struct ScalarLoops;

impl Loops for ScalarLoops {
    fn largest(self, x: &[f32]) -> u32 {
        x.iter().fold(0, |a, x| a.max(x.abs().to_bits()))
    }
    fn first(self, x: &[f32], largest: u32) -> f32 {
        x.iter().copied().find(|x| x.abs().to_bits() == largest).unwrap_or(0.0)
    }
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]) {
        for (q, x) in out.iter_mut().zip(x) {
            *q = (inverse * x).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
        }
    }
}

/// Explicit vectors: the compiler vectorizes the scalar loops into gathers and single lanes (1.1 ns per element instead
/// of 0.2).
#[derive(Clone, Copy)]
pub(super) struct VectorLoops<L>(pub L);

impl<L: ByteLanes> Loops for VectorLoops<L> {
    #[inline(always)]
    fn largest(self, x: &[f32]) -> u32 {
        // SAFETY: `run_panels` entered the features; blocks are whole vectors.
        unsafe { self.0.largest_magnitude(x) }
    }
    #[inline(always)]
    fn first(self, x: &[f32], largest: u32) -> f32 {
        // SAFETY: `run_panels` entered the features; `x` is whole vectors and has an element of that magnitude.
        unsafe { x[self.0.first_of_magnitude(x, largest)] }
    }
    #[inline(always)]
    fn round(self, x: &[f32], inverse: f32, out: &mut [u8]) {
        // SAFETY: `run_panels` entered the features; `x` is whole vectors, and `out` as long.
        unsafe { self.0.round_to_bytes(x, inverse, out) }
    }
}

/// The sums of the first two of every four of 16 signed bytes, and of the others, eight bytes at a time in a
/// `u64` (SWAR): its 16-bit fields stay below 2^11.
#[inline(always)]
fn sums_of_pairs(bytes: &[u8; 16]) -> [i32; 2] {
    let word = |half: usize| u64::from_le_bytes(bytes.as_chunks::<8>().0[half]) ^ 0x8080_8080_8080_8080;
    let pairs = |word: u64| (word & 0x00ff_00ff_00ff_00ff) + (word >> 8 & 0x00ff_00ff_00ff_00ff);
    let sums = pairs(word(0)) + pairs(word(1));
    let sums = sums + (sums >> 32);
    [(sums & 0xffff) as i32 - 8 * 128, (sums >> 16 & 0xffff) as i32 - 8 * 128]
}

#[inline(always)]
fn sum_of_16(bytes: &[u8; 16]) -> i32 {
    let [a, b] = sums_of_pairs(bytes);
    a + b
}

#[inline(always)]
pub(super) fn q8k_block(loops: impl Loops, x: &[f32], block: &mut [i32; q8k::WORDS]) {
    let largest = loops.largest(x);
    let mut quants = [0; 256];
    let mut scale = 0.0;
    if largest != 0 {
        // The first element of that magnitude decides the sign, as in llama.cpp.
        let inverse = -127.0 / loops.first(x, largest);
        // Infinite for magnitudes below 127 / f32::MAX, whose scale would be 0.
        if !inverse.is_infinite() {
            loops.round(x, inverse, &mut quants);
            scale = 1.0 / inverse;
        }
    }
    for (word, quants) in block.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*quants);
    }
    let pair = |a: i32, b: i32| a & 0xffff | b << 16;
    let mut sums = [0i32; 16];
    for (s, quants) in quants.as_chunks::<16>().0.iter().enumerate() {
        let [a, b] = sums_of_pairs(quants);
        sums[s] = a + b;
        block[q8k::OFFSETS + s] = -32 * sums[s];
        block[q8k::PAIR_OFFSETS + s] = pair(-32 * a, -32 * b);
    }
    let sum_of_32 = |s: usize| sums[2 * s] + sums[2 * s + 1];
    for (p, (a, b)) in PAIRS.into_iter().enumerate() {
        block[q8k::BSUMS_OF_32 + p] = pair(sum_of_32(a), sum_of_32(b));
        block[q8k::BSUMS_OF_16 + p] = pair(sums[a], sums[b]);
        block[q8k::BSUMS_OF_16 + 4 + p] = pair(sums[8 + a], sums[8 + b]);
    }
    block[q8k::SCALE] = scale.to_bits() as i32;
}

#[inline(always)]
pub(super) fn q8_1_block(loops: impl Loops, x: &[f32], block: &mut [i32; q8_1::WORDS]) {
    let mut quants = [0; 32];
    let scale = f32::from_bits(loops.largest(x)) / 127.0;
    // Infinite for the smallest scales, which are 0 in f16.
    let inverse = 1.0 / scale;
    loops.round(x, if inverse.is_infinite() { 0.0 } else { inverse }, &mut quants);
    for (word, quants) in block.iter_mut().zip(quants.as_chunks::<4>().0) {
        *word = i32::from_le_bytes(*quants);
    }
    let halves = [0, 1].map(|half| sum_of_16(&quants.as_chunks::<16>().0[half]));
    let sum = halves[0] + halves[1];
    block[q8_1::OFFSETS] = -128 * sum;
    for (s, sum) in halves.into_iter().enumerate() {
        block[q8_1::OFFSETS_OF_16 + s] = -16 * sum;
    }
    block[q8_1::SCALE] = f16::from_f32(scale).to_f32().to_bits() as i32;
    block[q8_1::SUM] = f16::from_f32(sum as f32 * scale).to_f32().to_bits() as i32;
}
