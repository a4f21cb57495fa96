//! Byte lanes: sixteen words in a zmm register, VNNI dot products.

use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::bytes::{ByteLanes, Bytes, Offsets, PanelOp, Scale};
use crate::simd::entry;
use crate::simd::words::Words;
use std::arch::asm;
use std::arch::x86_64::*;

/// Adds to each word the dot product of two `i16` and two `i16`. `asm!`, because the compiler splits
/// the intrinsic into a product and a sum: a shorter latency chain, but throughput is the bound
/// here, with independent chains for several rows.
#[inline]
#[target_feature(enable = "avx512f,avx512vnni")]
fn add_pairs(mut sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: the function has the feature; the instruction accesses registers only.
    unsafe {
        asm!("vpdpwssd {}, {}, {}", inout(zmm_reg) sum, in(zmm_reg) a, in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Compiler barrier: keeps `x` and what it depends on in program order.
#[inline]
#[target_feature(enable = "avx512f")]
fn barrier(mut x: __m512i) -> __m512i {
    // SAFETY: the template has no instruction.
    unsafe { asm!("/* {} */", inout(zmm_reg) x, options(nomem, nostack, preserves_flags)) };
    x
}

/// A row's sum over a block, and its dot products over the quads of one scale.
#[derive(Clone, Copy)]
pub(crate) struct ScaledSum {
    total: __m512i,
    dots: __m512i,
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Words` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Words for Avx512Lanes {
    type I = __m512i;

    #[inline(always)]
    unsafe fn splat_word(self, x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn add_words(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn to_float(self, a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32 {
        unsafe {
            let magnitude = _mm512_set1_epi32(0x7fff_ffff);
            let mut largest = _mm512_setzero_si512();
            for x in x.chunks_exact(16) {
                let x = _mm512_and_si512(_mm512_loadu_si512(x.as_ptr().cast()), magnitude);
                largest = _mm512_max_epu32(largest, x);
            }
            _mm512_reduce_max_epu32(largest)
        }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `ByteLanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl ByteLanes for Avx512Lanes {
    const ALL_BYTES: bool = true;
    const MAX_ROWS: usize = 8;
    const SINGLE_STREAM_ROWS: usize = 4;
    const OFFSETS: Option<Offsets> = Some(Offsets::Words);
    const BARRIERS: bool = true;
    type Sum = ScaledSum;

    #[inline(always)]
    unsafe fn call<O: PanelOp>(self, op: O) {
        unsafe { entry::avx512_panels::eval(op) }
    }
    #[inline(always)]
    unsafe fn zero(self) -> __m512i {
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn store_words(self, to: *mut u8, v: __m512i) {
        unsafe { _mm512_storeu_si512(to.cast(), v) }
    }
    #[inline(always)]
    unsafe fn load_signed_bytes(self, from: *const u8) -> __m512i {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_unsigned_bytes(self, from: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn and(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn or(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn max_words(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_max_epi32(a, b) }
    }
    // A rotation by a count modulo 32 shifts either way.
    #[inline(always)]
    unsafe fn shift(self, a: __m512i, by: i32) -> __m512i {
        unsafe { _mm512_rolv_epi32(a, _mm512_set1_epi32(by & 31)) }
    }
    #[inline(always)]
    unsafe fn lookup(self, table: &[u8; 16], a: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), a) }
    }
    #[inline(always)]
    unsafe fn as_float(self, a: __m512i) -> __m512 {
        unsafe { _mm512_castsi512_ps(a) }
    }
    #[inline(always)]
    unsafe fn to_scale(self, words: __m512i) -> __m512i {
        words
    }
    #[inline(always)]
    unsafe fn pair_scales(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_mask_blend_epi16(0xaaaa_aaaa, a, _mm512_slli_epi32::<16>(b)) }
    }
    #[inline(always)]
    unsafe fn begin<const R: usize>(self, from: [i32; R]) -> [ScaledSum; R] {
        unsafe {
            let mut sums = [ScaledSum { total: self.zero(), dots: self.zero() }; R];
            for (sum, from) in sums.iter_mut().zip(from) {
                sum.total = self.splat_word(from);
            }
            sums
        }
    }
    #[inline(always)]
    unsafe fn add_products<const R: usize>(
        self,
        sums: &mut [ScaledSum; R],
        _: Bytes,
        (g, quads): (usize, usize),
        weights: [__m512i; 2],
        x: [*const i32; 2],
        scale: Option<Scale<__m512i>>,
    ) {
        unsafe {
            for (i, (weights, x)) in weights.into_iter().zip(x).enumerate() {
                for (r, sum) in sums.iter_mut().enumerate() {
                    let dots = if scale.is_none() { &mut sum.total } else { &mut sum.dots };
                    let from = match scale {
                        Some(Scale { offsets: Some((offsets, shift)), .. }) if g + i == 0 => {
                            let offset = self.splat_word(*offsets.add(r));
                            if shift == 0 { offset } else { _mm512_srav_epi32(offset, self.splat_word(shift as i32)) }
                        }
                        Some(_) if g + i == 0 => self.zero(),
                        _ => *dots,
                    };
                    *dots = _mm512_dpbusd_epi32(from, weights, self.splat_word(*x.add(r)));
                }
            }
            for sum in sums {
                match scale {
                    None => sum.total = barrier(sum.total),
                    Some(scale) if g + 2 == quads => {
                        sum.total = barrier(_mm512_add_epi32(sum.total, _mm512_mullo_epi32(sum.dots, scale.by)));
                    }
                    Some(_) => sum.dots = barrier(sum.dots),
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn end<const R: usize>(self, sums: [ScaledSum; R]) -> [__m512i; R] {
        unsafe {
            let mut totals = [self.zero(); R];
            for (total, sum) in totals.iter_mut().zip(sums) {
                *total = sum.total;
            }
            totals
        }
    }
    #[inline(always)]
    unsafe fn add_pairs<const R: usize>(self, totals: &mut [__m512i; R], pairs: __m512i, x: *const i32) {
        unsafe {
            for (r, total) in totals.iter_mut().enumerate() {
                *total = add_pairs(*total, pairs, self.splat_word(*x.add(r)));
            }
        }
    }
    #[inline(always)]
    unsafe fn sub_product(self, a: __m512i, b: __m512i, by: i32) -> __m512i {
        unsafe { _mm512_sub_epi32(a, _mm512_mullo_epi32(b, _mm512_set1_epi32(by))) }
    }

    #[inline(always)]
    unsafe fn first_of_magnitude(self, x: &[f32], largest: u32) -> usize {
        unsafe {
            let (magnitude, largest) = (_mm512_set1_epi32(0x7fff_ffff), _mm512_set1_epi32(largest as i32));
            for (i, x) in x.chunks_exact(16).enumerate() {
                let x = _mm512_and_si512(_mm512_loadu_si512(x.as_ptr().cast()), magnitude);
                let found = _mm512_cmpeq_epi32_mask(x, largest);
                if found != 0 {
                    return 16 * i + found.trailing_zeros() as usize;
                }
            }
            0
        }
    }
    #[inline(always)]
    unsafe fn round_to_bytes(self, x: &[f32], scale: f32, out: &mut [u8]) {
        unsafe {
            let (scale, low, high) = (_mm512_set1_ps(scale), _mm512_set1_epi32(-127), _mm512_set1_epi32(127));
            for (x, out) in x.chunks_exact(16).zip(out.chunks_exact_mut(16)) {
                let x = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), scale));
                let x = _mm512_min_epi32(_mm512_max_epi32(x, low), high);
                _mm_storeu_si128(out.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(x));
            }
        }
    }
}
