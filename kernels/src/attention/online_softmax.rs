//! The online softmax (Milakov and Gimelshein, 2018): maximum and sum over the keys seen so far.

use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// The state of a softmax over the keys seen so far: `sum = sum_i e^(score_i - max)`; the caller's buffer holds
/// `output = sum_i e^(score_i - max) * value_i`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OnlineSoftmax {
    /// The largest score so far.
    pub max: f64,
    /// The sum of the weights so far. `f64`, because it divides every output.
    pub sum: f64,
}

impl OnlineSoftmax {
    /// No key seen yet. Its output is all zeros.
    pub const EMPTY: Self = Self { max: f64::NEG_INFINITY, sum: 0.0 };
}

/// Weights below `e^MIN_EXPONENT` are zero: they do not change an `f32` result, and products with
/// subnormal numbers take a hundred cycles each.
pub(super) const MIN_EXPONENT: f64 = -64.0;

/// `e^difference`: rescales weights from one maximum to a larger one.
pub(super) fn rescale_factor(difference: f64) -> f32 {
    if difference < MIN_EXPONENT { 0.0 } else { (difference as f32).exp() }
}

/// Merges the attention over `later` keys into that over earlier ones: a split's partial result into the total.
///
/// # Panics
/// If the outputs differ in length.
pub fn merge(isa: Isa, softmax: &mut OnlineSoftmax, output: &mut [f32], later: OnlineSoftmax, later_output: &[f32]) {
    assert_eq!(output.len(), later_output.len(), "attend: outputs differ in length");
    if later.sum == 0.0 {
        return;
    }
    let max = softmax.max.max(later.max);
    // Without earlier keys max = -inf, and the factor e^-inf = 0.
    let (a, b) = (rescale_factor(softmax.max - max), rescale_factor(later.max - max));
    *softmax = OnlineSoftmax { max, sum: softmax.sum * f64::from(a) + later.sum * f64::from(b) };
    isa.run(Blend { output, a, other: later_output, b });
}

/// Divides the weighted sum by the sum of its weights. A row without keys stays zero. No result is -0.0: whether a sum
/// is depends on keys that only other queries of the block see, whose values are added with weight 0.
pub fn finish(isa: Isa, softmax: OnlineSoftmax, output: &mut [f32]) {
    if softmax.sum > 0.0 {
        isa.run(Scale { output, by: (1.0 / softmax.sum) as f32 });
    }
}

/// `x *= by`.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
pub(super) unsafe fn scale_by<L: Lanes>(l: L, x: &mut [f32], by: f32) {
    let mut lanes = x.chunks_exact_mut(L::LANES);
    // SAFETY: the caller entered the features; chunks are `LANES` long.
    unsafe {
        for x in lanes.by_ref() {
            l.store(x.as_mut_ptr(), l.mul(l.load(x.as_ptr()), l.splat(by)));
        }
    }
    for x in lanes.into_remainder() {
        *x *= by;
    }
}

struct Scale<'a> {
    output: &'a mut [f32],
    by: f32,
}

impl Op for Scale<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        // SAFETY: `run` entered the features.
        unsafe { scale_by(l, self.output, self.by) }
        self.output.iter_mut().for_each(|x| *x += 0.0);
    }
}

/// `output = output * a + other * b`.
struct Blend<'a> {
    output: &'a mut [f32],
    a: f32,
    other: &'a [f32],
    b: f32,
}

impl Op for Blend<'_> {
    type Output = ();
    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let mut out = self.output.chunks_exact_mut(L::LANES);
        let mut other = self.other.chunks_exact(L::LANES);
        for (out, other) in out.by_ref().zip(other.by_ref()) {
            // SAFETY: `run` entered the features; chunks are `LANES` long.
            unsafe {
                let sum =
                    l.add(l.mul(l.load(out.as_ptr()), l.splat(self.a)), l.mul(l.load(other.as_ptr()), l.splat(self.b)));
                l.store(out.as_mut_ptr(), sum);
            }
        }
        for (out, other) in out.into_remainder().iter_mut().zip(other.remainder()) {
            *out = *out * self.a + other * self.b;
        }
    }
}
