//! Activations as B tiles: each `f32` split into three bf16.

use std::arch::x86_64::*;

use super::layout::{DEPTH, PARTS, SIDE, block_words, width};
use super::transpose::transpose;
use crate::isa::Amx;
use crate::simd::amx::AmxOp;
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::float::{Floats, Lanes};

/// Packs `x`, `(rows, inputs)`, into the `words` of [`super::layout`], as many as [`super::words`] says.
pub(in crate::gemm) fn split(isa: Amx, x: &[f32], inputs: usize, words: &mut [u32]) {
    isa.run_tiles(Split { x, inputs, words });
}

struct Split<'a> {
    x: &'a [f32],
    inputs: usize,
    words: &'a mut [u32],
}

impl AmxOp for Split<'_> {
    #[inline(always)]
    fn eval(self, l: Avx512Lanes) {
        let rows = self.x.len() / self.inputs.max(1);
        let width = width(rows);
        let blocks = self.words.chunks_exact_mut(block_words(width, self.inputs).max(1));
        for (words, x) in blocks.zip(self.x.chunks(SIDE * self.inputs.max(1))) {
            // SAFETY: `run_tiles` entered the features. Missing rows of the block stay zero.
            let mut parts = unsafe { [[l.splat(0.0); SIDE]; PARTS] };
            for (step, words) in words.chunks_exact_mut(PARTS * DEPTH / 2 * width).enumerate() {
                for (r, row) in x.chunks_exact(self.inputs).enumerate() {
                    let row = &row[step * DEPTH..];
                    let later = &row[row.len().min(SIDE)..];
                    // SAFETY: `run_tiles` entered the features; loads stay within the row.
                    unsafe {
                        let halves = [
                            l.load_first(row.as_ptr(), row.len().min(SIDE)),
                            l.load_first(later.as_ptr(), later.len().min(SIDE)),
                        ];
                        for (parts, pairs) in parts.iter_mut().zip(thirds(halves)) {
                            parts[r] = pairs;
                        }
                    }
                }
                for (words, pairs) in words.chunks_exact_mut(DEPTH / 2 * width).zip(&parts) {
                    // SAFETY: `run_tiles` entered the features; there is a word for every lane that is stored.
                    unsafe {
                        if width == 1 {
                            l.store(words.as_mut_ptr().cast(), pairs[0]);
                            continue;
                        }
                        for (words, rows) in words.chunks_exact_mut(width).zip(transpose(*pairs)) {
                            l.store_first(words.as_mut_ptr().cast(), rows, width);
                        }
                    }
                }
            }
        }
    }
}

/// Splits 32 floats into three bf16 each, as 16 pairs per part, the most significant part first: each part is the upper
/// 16 bits of the remainder, so each subtraction is exact.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn thirds(x: [__m512; 2]) -> [__m512; PARTS] {
    #[repr(align(64))]
    struct UpperWords([u16; 32]);
    static UPPER: UpperWords = {
        let mut words = [0; 32];
        let mut i = 0;
        while i < 32 {
            words[i] = 2 * i as u16 + 1;
            i += 1;
        }
        UpperWords(words)
    };
    // SAFETY: the caller entered the features; the index table is 64 bytes, aligned.
    unsafe {
        let indices = _mm512_load_si512(UPPER.0.as_ptr().cast());
        let upper_half = _mm512_castsi512_ps(_mm512_set1_epi32(0xFFFF_0000_u32 as i32));
        let mut rest = x;
        let mut parts = [_mm512_setzero_ps(); PARTS];
        for part in &mut parts {
            let cut = [_mm512_and_ps(rest[0], upper_half), _mm512_and_ps(rest[1], upper_half)];
            let pairs = _mm512_permutex2var_epi16(_mm512_castps_si512(cut[0]), indices, _mm512_castps_si512(cut[1]));
            *part = _mm512_castsi512_ps(pairs);
            rest = [_mm512_sub_ps(rest[0], cut[0]), _mm512_sub_ps(rest[1], cut[1])];
        }
        parts
    }
}
