//! `f32` lanes: four in a NEON register.

use crate::simd::float::{Floats, Lanes};
use half::{bf16, f16};
use std::arch::aarch64::*;
use std::arch::asm;

#[derive(Clone, Copy)]
pub(crate) struct NeonLanes;

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Lanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Floats for NeonLanes {
    const LANES: usize = 4;
    type V = float32x4_t;

    #[inline(always)]
    unsafe fn splat(self, x: f32) -> float32x4_t {
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> float32x4_t {
        let wide;
        // The intrinsic is not stable in the oldest supported compiler.
        unsafe {
            asm!("fcvtl {:v}.4s, {:v}.4h", out(vreg) wide, in(vreg) vld1_u16(from.cast()),
                options(pure, nomem, nostack, preserves_flags));
        }
        wide
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: float32x4_t) {
        unsafe { vst1q_f32(to, v) }
    }
    #[inline(always)]
    unsafe fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        unsafe { vfmaq_f32(c, a, b) }
    }
}

// SAFETY of every block below: the caller is inside a function with this instruction set's features and gives pointers
// that are valid for the elements read or written, as `Lanes` requires.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Lanes for NeonLanes {
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> float32x4_t {
        unsafe { vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from.cast()), 16)) }
    }
    #[inline(always)]
    unsafe fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vmaxq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        unsafe { vminq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn round(self, a: float32x4_t) -> float32x4_t {
        unsafe { vrndnq_f32(a) }
    }
    #[inline(always)]
    unsafe fn exp2_int(self, n: float32x4_t) -> float32x4_t {
        unsafe { vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)) }
    }
    #[inline(always)]
    unsafe fn sum(self, a: float32x4_t) -> f32 {
        unsafe { vaddvq_f32(a) }
    }
    #[inline(always)]
    unsafe fn sum_f64(self, a: float32x4_t) -> f64 {
        unsafe { vaddvq_f64(vaddq_f64(vcvt_f64_f32(vget_low_f32(a)), vcvt_high_f64_f32(a))) }
    }
    #[inline(always)]
    unsafe fn maximum(self, a: float32x4_t) -> f32 {
        unsafe { vmaxvq_f32(a) }
    }
}
