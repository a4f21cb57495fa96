//! One lane: the reference.

use crate::simd::float::{Floats, Lanes};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub(crate) struct Scalar;

impl Floats for Scalar {
    const LANES: usize = 1;
    type V = f32;

    #[inline(always)]
    unsafe fn splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> f32 {
        // SAFETY: the caller gives one readable element.
        unsafe { *from }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const f16) -> f32 {
        // SAFETY: the caller gives one readable element.
        unsafe { (*from).to_f32() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: f32) {
        // SAFETY: the caller gives one writable element.
        unsafe { *to = v }
    }
    #[inline(always)]
    unsafe fn sub(self, a: f32, b: f32) -> f32 {
        a - b
    }
    #[inline(always)]
    unsafe fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    // Two roundings: `mul_add` is a library call where the build's baseline has no FMA.
    #[inline(always)]
    unsafe fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        a * b + c
    }
}

impl Lanes for Scalar {
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const bf16) -> f32 {
        // SAFETY: the caller gives one readable element.
        unsafe { (*from).to_f32() }
    }
    #[inline(always)]
    unsafe fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    unsafe fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    unsafe fn max(self, a: f32, b: f32) -> f32 {
        a.max(b)
    }
    #[inline(always)]
    unsafe fn min(self, a: f32, b: f32) -> f32 {
        a.min(b)
    }
    #[inline(always)]
    unsafe fn round(self, a: f32) -> f32 {
        a.round_ties_even()
    }
    #[inline(always)]
    unsafe fn exp2_int(self, n: f32) -> f32 {
        f32::from_bits(((n as i32 + 127) as u32) << 23)
    }
    #[inline(always)]
    unsafe fn sum(self, a: f32) -> f32 {
        a
    }
    #[inline(always)]
    unsafe fn sum_f64(self, a: f32) -> f64 {
        f64::from(a)
    }
    #[inline(always)]
    unsafe fn maximum(self, a: f32) -> f32 {
        a
    }
    // The polynomial of the vector code, with the same roundings: softmax weights have the same bits on every ISA.
    #[inline(always)]
    unsafe fn exp(self, x: f32) -> f32 {
        let x = if x < -88.0 { -88.0 } else { x };
        let x = if x > 88.376_26 { 88.376_26 } else { x };
        let n = (x * std::f32::consts::LOG2_E).round_ties_even();
        let r = n.mul_add(2.121_944_4e-4, n.mul_add(-0.693_359_4, x));
        let mut p = 1.987_569_1e-4f32;
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            p = p.mul_add(r, c);
        }
        // SAFETY: plain Rust, which needs no feature.
        (p * r).mul_add(r, r + 1.0) * unsafe { self.exp2_int(n) }
    }
    #[inline(always)]
    unsafe fn tanh(self, x: f32) -> f32 {
        x.tanh()
    }
}
