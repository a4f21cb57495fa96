//! Byte lanes: sixteen words in two ymm registers, a whole panel.

use crate::simd::avx2::products::{Multiply, Vnni, Ymm, YmmPair, YmmProducts, opaque_ymm};
use crate::simd::both::both;
use crate::simd::bytes::{ByteLanes, Bytes, Offsets, PanelOp, Scale};
use crate::simd::entry;
use crate::simd::float::Floats;
use crate::simd::words::Words;
use half::f16;
use std::arch::x86_64::*;

/// The `#[target_feature]` function of a kind of products.
pub(crate) trait Enter: YmmProducts {
    /// Evaluates an operation in a separate function.
    ///
    /// # Safety
    /// The caller is inside a function with the instruction set's features.
    unsafe fn call<O: PanelOp>(op: O);
}

impl Enter for Multiply {
    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        // SAFETY: the caller is inside a function with AVX2, FMA and F16C.
        unsafe { entry::avx2_panels::eval(op) }
    }
}

impl Enter for Vnni {
    #[inline(always)]
    unsafe fn call<O: PanelOp>(op: O) {
        // SAFETY: the caller is inside a function with AVX-VNNI, AVX2, FMA and F16C.
        unsafe { entry::avx_vnni_panels::eval(op) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Floats` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: YmmProducts> Floats for YmmPair<P> {
    const LANES: usize = 16;
    type V = [__m256; 2];

    #[inline(always)]
    unsafe fn splat(self, x: f32) -> Self::V {
        unsafe { [Ymm(self.0).splat(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        unsafe { both!(|I| Ymm(self.0).load(from.add(8 * I))) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        unsafe { both!(|I| Ymm(self.0).load_f16(from.add(8 * I))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Self::V) {
        unsafe {
            Ymm(self.0).store(to, v[0]);
            Ymm(self.0).store(to.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| Ymm(self.0).sub(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| Ymm(self.0).mul(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { both!(|I| Ymm(self.0).fma(a[I], b[I], c[I])) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Words` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: YmmProducts> Words for YmmPair<P> {
    type I = [__m256i; 2];

    #[inline(always)]
    unsafe fn splat_word(self, x: i32) -> Self::I {
        unsafe { [opaque_ymm(_mm256_set1_epi32(x)); 2] }
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> Self::I {
        unsafe { both!(|I| _mm256_loadu_si256(from.add(32 * I).cast())) }
    }
    #[inline(always)]
    unsafe fn add_words(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| _mm256_add_epi32(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn to_float(self, a: Self::I) -> Self::V {
        unsafe { both!(|I| _mm256_cvtepi32_ps(a[I])) }
    }
    #[inline(always)]
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32 {
        unsafe { Ymm(self.0).largest_magnitude(x) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `ByteLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Enter> ByteLanes for YmmPair<P> {
    const ALL_BYTES: bool = P::ALL_BYTES;
    const MAX_ROWS: usize = 4;
    // Processors that read a single run faster and have AVX-VNNI also have AVX-512.
    const SINGLE_STREAM_ROWS: usize = if P::ALL_BYTES { 0 } else { 2 };
    const BARRIERS: bool = true;
    const MASKS: bool = !P::ALL_BYTES;
    const CENTERED_UP: u32 = if P::ALL_BYTES { 0 } else { 8 };
    const OFFSETS: Option<Offsets> = if P::ALL_BYTES { None } else { Some(Offsets::Pairs) };
    type Sum = [P::Sum; 2];

    #[inline(always)]
    unsafe fn call<O: PanelOp>(self, op: O) {
        unsafe { P::call(op) }
    }
    #[inline(always)]
    unsafe fn zero(self) -> Self::I {
        unsafe { [_mm256_setzero_si256(); 2] }
    }
    #[inline(always)]
    unsafe fn store_words(self, to: *mut u8, v: Self::I) {
        unsafe {
            _mm256_storeu_si256(to.cast(), v[0]);
            _mm256_storeu_si256(to.add(32).cast(), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_signed_bytes(self, from: *const u8) -> Self::I {
        unsafe { both!(|I| _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8 * I).cast()))) }
    }
    #[inline(always)]
    unsafe fn load_unsigned_bytes(self, from: *const u8) -> Self::I {
        unsafe { both!(|I| _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.add(8 * I).cast()))) }
    }
    #[inline(always)]
    unsafe fn and(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| _mm256_and_si256(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn or(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| _mm256_or_si256(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn max_words(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| _mm256_max_epi32(a[I], b[I])) }
    }
    // AVX2 has no rotation. One of the two shifts has count zero; with a constant `by` it is optimised away.
    #[inline(always)]
    unsafe fn shift(self, a: Self::I, by: i32) -> Self::I {
        unsafe {
            let (left, right) = (_mm256_set1_epi32(by.max(0)), _mm256_set1_epi32((-by).max(0)));
            both!(|I| _mm256_srlv_epi32(_mm256_sllv_epi32(a[I], left), right))
        }
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16], a: Self::I) -> Self::I {
        unsafe {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            both!(|I| _mm256_shuffle_epi8(table, a[I]))
        }
    }
    #[inline(always)]
    unsafe fn as_float(self, a: Self::I) -> Self::V {
        unsafe { both!(|I| _mm256_castsi256_ps(a[I])) }
    }
    #[inline(always)]
    unsafe fn to_scale(self, words: Self::I) -> Self::I {
        unsafe { both!(|I| P::to_scale(words[I])) }
    }
    #[inline(always)]
    unsafe fn byte_scale(self, words: Self::I, b: i32, up: i32) -> Self::I {
        unsafe { both!(|I| P::byte_scale(words[I], b, up)) }
    }
    #[inline(always)]
    unsafe fn offset_scale(self, scale: Self::I, by: i16) -> Self::I {
        unsafe { both!(|I| P::offset_scale(scale[I], by)) }
    }
    // A byte in the upper half of an `i16` keeps its sign: 32 is subtracted from four scales at once.
    #[inline(always)]
    unsafe fn centered_scale(self, words: Self::I, b: i32) -> Self::I {
        unsafe {
            if P::ALL_BYTES {
                return self.offset_scale(self.byte_scale(words, b, 0), -32);
            }
            let centered = both!(|I| _mm256_sub_epi8(words[I], _mm256_set1_epi8(32)));
            self.byte_scale(centered, b, Self::CENTERED_UP as i32)
        }
    }
    // A scale is in the lower half of a word, and with AVX2 alone in both.
    #[inline(always)]
    unsafe fn pair_scales(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe {
            let upper = if P::ALL_BYTES { both!(|I| _mm256_slli_epi32::<16>(b[I])) } else { b };
            both!(|I| _mm256_blend_epi16::<0xaa>(a[I], upper[I]))
        }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(self, from: [i32; R]) -> [Self::Sum; R] {
        unsafe {
            let mut sums = [[P::begin(0); 2]; R];
            for (sum, from) in sums.iter_mut().zip(from) {
                *sum = [P::begin(from); 2];
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn add_products<const R: usize>(
        self,
        sums: &mut [Self::Sum; R],
        bytes: Bytes,
        (g, quads): (usize, usize),
        weights: [Self::I; 2],
        x: [*const i32; 2],
        scale: Option<Scale<Self::I>>,
    ) {
        let max = largest::<P>(bytes, scale.is_some_and(|scale| scale.offsets.is_some()));
        unsafe {
            // Row by row if sums are widened that often, else quad by quad: takes fewer registers.
            if P::quads_together(max, quads) <= 2 {
                for (r, sum) in sums.iter_mut().enumerate() {
                    for i in 0..2 {
                        add_quad::<P>(sum, bytes, weights[i], x[i], r, (g + i, quads), scale);
                    }
                }
            } else {
                for i in 0..2 {
                    for (r, sum) in sums.iter_mut().enumerate() {
                        add_quad::<P>(sum, bytes, weights[i], x[i], r, (g + i, quads), scale);
                    }
                }
            }
        }
    }
    // With `m` -1 for a negative weight, else 0: w x = |w| (x ^ m) - |w| m, because x ^ m is -x - 1 if it is negative.
    // So a product takes an exclusive or, which runs in any of four pipes of a Zen 4, instead of `vpsignb`, which runs
    // in the two that multiply; and the last term is the same for all rows.
    #[inline(always)]
    unsafe fn store_masked(self, to: *mut u8, weights: Self::I, negative: Self::I) -> Self::I {
        unsafe {
            let signed = both!(|I| _mm256_xor_si256(weights[I], _mm256_set1_epi8(-128)));
            let magnitudes = both!(|I| _mm256_abs_epi8(signed[I]));
            let masks = both!(|I| _mm256_cmpgt_epi8(_mm256_setzero_si256(), signed[I]));
            self.store_words(to, magnitudes);
            self.store_words(to.add(64), masks);
            both!(|I| _mm256_add_epi16(negative[I], _mm256_maddubs_epi16(magnitudes[I], masks[I])))
        }
    }
    #[inline(always)]
    unsafe fn add_masked<const R: usize>(
        self,
        sums: &mut [Self::Sum; R],
        from: *const u8,
        (g, quads): (usize, usize),
        x: *const i32,
        scale: Option<Scale<Self::I>>,
    ) {
        unsafe {
            let scale = scale.map(|scale| scale.by);
            let (magnitudes, masks) = (self.load_words(from.add(128 * g)), self.load_words(from.add(128 * g + 64)));
            for (r, sum) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(*x.add(r));
                for half in 0..2 {
                    let x = _mm256_xor_si256(x, masks[half]);
                    let (weights, scale) = (magnitudes[half], scale.map(|scale| scale[half]));
                    P::add_quad(&mut sum[half], weights, x, 128, (g, quads), None, scale);
                }
            }
            if g + 1 == quads {
                let negative = self.load_words(from.add(128 * quads));
                let scale = scale.unwrap_or([_mm256_set1_epi16(1); 2]);
                let negative = both!(|I| _mm256_madd_epi16(negative[I], scale[I]));
                for sum in sums {
                    P::subtract(&mut sum[0], negative[0]);
                    P::subtract(&mut sum[1], negative[1]);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(self, sums: [Self::Sum; R]) -> [Self::I; R] {
        unsafe {
            let mut words = [self.zero(); R];
            for (words, sum) in words.iter_mut().zip(sums) {
                *words = both!(|I| P::end(sum[I]));
            }
            words
        }
    }
    #[inline(always)]
    unsafe fn add_pairs<const R: usize>(self, totals: &mut [Self::I; R], pairs: Self::I, x: *const i32) {
        unsafe {
            for (r, total) in totals.iter_mut().enumerate() {
                let x = _mm256_set1_epi32(*x.add(r));
                *total = both!(|I| P::add_pairs(total[I], pairs[I], x));
            }
        }
    }
    #[inline(always)]
    unsafe fn sub_product(self, a: Self::I, b: Self::I, by: i32) -> Self::I {
        unsafe { both!(|I| _mm256_sub_epi32(a[I], _mm256_mullo_epi32(b[I], _mm256_set1_epi32(by)))) }
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

/// The largest magnitude of the weights, which are signed if sums start from offsets.
fn largest<P: YmmProducts>(bytes: Bytes, has_offsets: bool) -> u8 {
    match bytes {
        Bytes::Unsigned(max) if has_offsets => max / 2 + 1,
        Bytes::Unsigned(max) => max,
        Bytes::Biased if P::ALL_BYTES => 255,
        Bytes::Biased => 128,
        Bytes::Indices(_) => 19,
    }
}

/// [`YmmProducts::add_quad`] for both registers and row `r` of `x`.
///
/// # Safety
/// As [`YmmProducts`]; `x` and the scale's offsets have the row.
#[inline(always)]
unsafe fn add_quad<P: YmmProducts>(
    sum: &mut [P::Sum; 2],
    bytes: Bytes,
    weights: [__m256i; 2],
    x: *const i32,
    r: usize,
    quad: (usize, usize),
    scale: Option<Scale<[__m256i; 2]>>,
) {
    // SAFETY: the caller entered the features; `x` and the scale's offsets have row `r`.
    unsafe {
        let offsets = scale.and_then(|scale| scale.offsets);
        let max = largest::<P>(bytes, offsets.is_some());
        let from = match offsets {
            Some((offsets, shift)) if quad.0 == 0 => {
                let offset = _mm256_set1_epi32(*offsets.add(r));
                Some(_mm256_sra_epi16(offset, _mm_cvtsi32_si128(shift as i32)))
            }
            _ => None,
        };
        let x = _mm256_set1_epi32(*x.add(r));
        for half in 0..2 {
            let (mut weights, mut x) = (weights[half], x);
            let scale = scale.map(|scale| scale.by[half]);
            if bytes == Bytes::Biased && !P::ALL_BYTES {
                // |w| (at most 128, as an unsigned byte) times x with w's sign.
                let signed = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
                (weights, x) = (_mm256_abs_epi8(signed), _mm256_sign_epi8(x, signed));
            } else if let Bytes::Indices(table) = bytes {
                P::add_indices(&mut sum[half], weights, x, quad, scale);
                let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
                weights = _mm256_shuffle_epi8(table, weights);
            }
            P::add_quad(&mut sum[half], weights, x, max, quad, from, scale);
        }
    }
}
