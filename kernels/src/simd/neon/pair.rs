//! Eight lanes in two NEON registers, for integer kernels: a loaded word of activations is used for two registers of
//! weights, and half a cache line of a panel is read at a time.

use crate::simd::both::both;
use crate::simd::float::{Floats, Lanes};
use crate::simd::neon::float::NeonLanes;
use crate::simd::words::Words;
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

/// Eight lanes in two NEON registers; `P` is the kind of integer products.
#[derive(Clone, Copy)]
pub(crate) struct NeonPair<P>(pub P);

/// 16-bit products of bytes (`smull`): baseline NEON.
#[derive(Clone, Copy)]
pub(crate) struct Widen;

/// Dot products of four bytes (`sdot`).
#[derive(Clone, Copy)]
pub(crate) struct Dot;

/// Products of 2 by 8 matrices of bytes (`usmmla`).
#[derive(Clone, Copy)]
pub(crate) struct Matrix;

// SAFETY of every block below: the caller gives pointers that are valid for the elements read or written, as `Lanes`
// requires; every aarch64 has the instructions.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Copy> Floats for NeonPair<P> {
    const LANES: usize = 8;
    type V = [float32x4_t; 2];

    #[inline(always)]
    unsafe fn splat(self, x: f32) -> Self::V {
        unsafe { [NeonLanes.splat(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::V {
        unsafe { both!(|I| NeonLanes.load(from.add(4 * I))) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> Self::V {
        unsafe { both!(|I| NeonLanes.load_f16(from.add(4 * I))) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: Self::V) {
        unsafe {
            NeonLanes.store(to, v[0]);
            NeonLanes.store(to.add(4), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.sub(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.mul(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.fma(a[I], b[I], c[I])) }
    }
}

// SAFETY of every block below: the caller gives pointers that are valid for the elements read or written, as `Lanes`
// requires; every aarch64 has the instructions.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Copy> Lanes for NeonPair<P> {
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V {
        unsafe { both!(|I| NeonLanes.load_bf16(from.add(4 * I))) }
    }
    #[inline(always)]
    unsafe fn add(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.add(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn div(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.div(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn max(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.max(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn min(self, a: Self::V, b: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.min(a[I], b[I])) }
    }
    #[inline(always)]
    unsafe fn round(self, a: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.round(a[I])) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self, n: Self::V) -> Self::V {
        unsafe { both!(|I| NeonLanes.exp2_int(n[I])) }
    }
    #[inline(always)]
    unsafe fn sum(self, a: Self::V) -> f32 {
        unsafe { NeonLanes.sum(NeonLanes.add(a[0], a[1])) }
    }
    #[inline(always)]
    unsafe fn sum_f64(self, a: Self::V) -> f64 {
        unsafe { NeonLanes.sum_f64(a[0]) + NeonLanes.sum_f64(a[1]) }
    }
    #[inline(always)]
    unsafe fn maximum(self, a: Self::V) -> f32 {
        unsafe { NeonLanes.maximum(NeonLanes.max(a[0], a[1])) }
    }
}

// SAFETY of every block below: the caller gives pointers that are valid for the elements read or written, as `Words`
// requires; every aarch64 has the instructions.
#[allow(clippy::undocumented_unsafe_blocks)]
impl<P: Copy> Words for NeonPair<P> {
    type I = [uint8x16_t; 2];

    #[inline(always)]
    unsafe fn splat_word(self, x: i32) -> Self::I {
        unsafe { [vreinterpretq_u8_s32(vdupq_n_s32(x)); 2] }
    }
    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> Self::I {
        unsafe { both!(|I| vld1q_u8(from.add(16 * I))) }
    }
    #[inline(always)]
    unsafe fn add_words(self, a: Self::I, b: Self::I) -> Self::I {
        unsafe { both!(|I| vreinterpretq_u8_u32(vaddq_u32(vreinterpretq_u32_u8(a[I]), vreinterpretq_u32_u8(b[I])))) }
    }
    #[inline(always)]
    unsafe fn to_float(self, a: Self::I) -> Self::V {
        unsafe { both!(|I| vcvtq_f32_s32(vreinterpretq_s32_u8(a[I]))) }
    }
    #[inline(always)]
    unsafe fn largest_magnitude(self, x: &[f32]) -> u32 {
        unsafe {
            let mut largest = [vdupq_n_u32(0); 2];
            for x in x.chunks_exact(8) {
                largest = both!(|I| {
                    let bits = vreinterpretq_u32_f32(vabsq_f32(vld1q_f32(x.as_ptr().add(4 * I))));
                    vmaxq_u32(largest[I], bits)
                });
            }
            vmaxvq_u32(vmaxq_u32(largest[0], largest[1]))
        }
    }
}

/// Adds to each word the dot product of its four signed bytes and those of word `LANE` of `x`.
///
/// Here and below, `asm!` replaces intrinsics that are not stable in Rust.
///
/// # Safety
/// The caller is inside a function with `dotprod`.
#[inline(always)]
pub(crate) unsafe fn sdot<const LANE: i32>(mut sum: int32x4_t, a: int8x16_t, x: int32x4_t) -> int32x4_t {
    // SAFETY: the caller has the feature; the instruction accesses registers only.
    unsafe {
        asm!("sdot {:v}.4s, {:v}.16b, {:v}.4b[{}]", inout(vreg) sum, in(vreg) a, in(vreg) x, const LANE,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// As [`sdot`], of unsigned and signed bytes.
///
/// # Safety
/// The caller is inside a function with `i8mm`.
#[inline(always)]
pub(crate) unsafe fn usdot<const LANE: i32>(mut sum: int32x4_t, a: uint8x16_t, x: int32x4_t) -> int32x4_t {
    // SAFETY: the caller has the feature; the instruction accesses registers only.
    unsafe {
        asm!("usdot {:v}.4s, {:v}.16b, {:v}.4b[{}]", inout(vreg) sum, in(vreg) a, in(vreg) x, const LANE,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Adds to words 0 to 3 the dot products `a0 x0`, `a0 x1`, `a1 x0`, `a1 x1` of eight unsigned and eight signed bytes,
/// where 0 and 1 are the lower and the upper half.
///
/// # Safety
/// The caller is inside a function with `i8mm`.
#[inline(always)]
pub(crate) unsafe fn usmmla(mut sum: int32x4_t, a: uint8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller has the feature; the instruction accesses registers only.
    unsafe {
        asm!("usmmla {:v}.4s, {:v}.16b, {:v}.16b", inout(vreg) sum, in(vreg) a, in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    sum
}
