//! `f32` vectors: the operations that kernels are written in, once for every instruction set.
//!
//! Kernels are [`Op`]s: `eval` is `#[inline(always)]`, so that it is compiled inside the `#[target_feature]` function
//! that `Isa::run` enters, and intrinsics become single instructions. Closures, and adapters that take them
//! (`array::map`), do not inherit the features: their intrinsics become calls, so inner loops are `for` loops.

use half::{bf16, f16};

/// The most lanes of any lane type.
pub(crate) const MAX_LANES: usize = 16;

/// An operation written once for all lane types.
pub(crate) trait Op {
    type Output;
    /// Must be `#[inline(always)]`, see the module documentation.
    fn eval<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// A vector of `LANES` floats. Every method is `#[inline(always)]`.
///
/// # Safety
/// All methods are unsafe for one reason: the code must run inside a function that has the instruction set's target
/// features, which only `dispatch.rs` enters. Pointers must be valid for the number of elements stated; vectors accept
/// any address, `Scalar` only an aligned one.
pub(crate) trait Floats: Copy {
    const LANES: usize;
    type V: Copy;

    /// `x` in every lane.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn splat(self, x: f32) -> Self::V;
    /// Reads `LANES` elements.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// Reads `LANES` elements and converts them to `f32`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load_f16(self, from: *const f16) -> Self::V;
    /// Writes `LANES` elements.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// `a - b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, rounded once if the instruction set has FMA.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
}

/// Further operations of `f32` kernels.
///
/// # Safety
/// As [`Floats`].
pub(crate) trait Lanes: Floats {
    /// Reads `LANES` elements and converts them to `f32`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load_bf16(self, from: *const bf16) -> Self::V;
    /// Reads `count < LANES` elements; the other lanes are zero.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize) -> Self::V {
        let mut x = [0.0f32; MAX_LANES];
        // SAFETY: the caller entered the features and gives `count < LANES` readable elements.
        unsafe {
            std::ptr::copy_nonoverlapping(from, x.as_mut_ptr(), count);
            self.load(x.as_ptr())
        }
    }
    /// Writes the first `count < LANES` lanes.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, v: Self::V, count: usize) {
        let mut x = [0.0f32; MAX_LANES];
        // SAFETY: the caller entered the features and gives `count < LANES` writable elements.
        unsafe {
            self.store(x.as_mut_ptr(), v);
            std::ptr::copy_nonoverlapping(x.as_ptr(), to, count);
        }
    }
    /// Reads `count` elements, at most `LANES`; the other lanes are zero. Nothing is read for 0.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn load_first(self, from: *const f32, count: usize) -> Self::V {
        // SAFETY: the caller entered the features; `count` elements are readable.
        unsafe {
            match count {
                0 => self.splat(0.0),
                _ if count == Self::LANES => self.load(from),
                _ => self.load_part(from, count),
            }
        }
    }
    /// Writes the first `count` lanes, at most `LANES`. Nothing is written for 0.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn store_first(self, to: *mut f32, v: Self::V, count: usize) {
        // SAFETY: the caller entered the features; `count` elements are writable.
        unsafe {
            match count {
                0 => {}
                _ if count == Self::LANES => self.store(to, v),
                _ => self.store_part(to, v, count),
            }
        }
    }

    /// `a + b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger of `a` and `b`; if either is NaN, `b` on x86, NaN on NEON, the other operand in `Scalar`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of `a` and `b`; if either is NaN, as [`Lanes::max`].
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// The nearest integer, as a float.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn round(self, a: Self::V) -> Self::V;
    /// `2^n` for integral `n` in `-126..=127`; zero for -127, which [`Lanes::exp`] uses.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn exp2_int(self, n: Self::V) -> Self::V;

    /// The sum of the lanes, halves added to halves.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn sum(self, a: Self::V) -> f32;
    /// The sums of four vectors, each with the bits of [`Lanes::sum`].
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn sum4(self, a: [Self::V; 4]) -> [f32; 4] {
        // SAFETY: the caller entered the features.
        unsafe { [self.sum(a[0]), self.sum(a[1]), self.sum(a[2]), self.sum(a[3])] }
    }
    /// The sums of sixteen vectors, each with the bits of [`Lanes::sum`].
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn sum16(self, a: [Self::V; 16]) -> [f32; 16] {
        let mut sums = [0.0; 16];
        // SAFETY: the caller entered the features.
        unsafe {
            for (sums, a) in sums.chunks_exact_mut(4).zip(a.chunks_exact(4)) {
                sums.copy_from_slice(&self.sum4([a[0], a[1], a[2], a[3]]));
            }
        }
        sums
    }
    /// The sum of the lanes, accumulated in `f64`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn sum_f64(self, a: Self::V) -> f64;
    /// The largest lane.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn maximum(self, a: Self::V) -> f32;

    /// `e^x`. The vector form is Cody-Waite reduction and a degree-6 polynomial: within 2 ulp on
    /// [-87, 88], clamped above, zero below -88.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn exp(self, x: Self::V) -> Self::V {
        // SAFETY: the caller entered the features.
        unsafe {
            // x comes second: x86's min and max return the second operand if either is NaN, so NaN stays NaN.
            let x = self.min(self.splat(88.376_26), self.max(self.splat(-88.0), x));
            let n = self.round(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
            // ln 2 in two parts (Cody and Waite), so that x - n ln 2 is exact to the last bit.
            let r = self.fma(n, self.splat(-0.693_359_4), x);
            let r = self.fma(n, self.splat(2.121_944_4e-4), r);
            let mut p = self.splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = self.fma(p, r, self.splat(c));
            }
            let p = self.fma(self.mul(p, r), r, self.add(r, self.splat(1.0)));
            self.mul(p, self.exp2_int(n))
        }
    }

    /// `tanh x`, as `1 - 2 / (e^2x + 1)`; absolute error below 2e-7.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn tanh(self, x: Self::V) -> Self::V {
        // SAFETY: the caller entered the features.
        unsafe {
            let one = self.splat(1.0);
            let e = self.exp(self.add(x, x));
            self.sub(one, self.div(self.splat(2.0), self.add(e, one)))
        }
    }
}

/// An element type that lanes widen to `f32` on load.
///
/// # Safety
/// As [`Lanes`]: the code must run inside a function that has the features; pointers must be valid for the elements
/// stated, `LANES` if none are.
pub(crate) trait Element: Copy {
    /// Reads `LANES` elements and converts them to `f32`.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V;
    fn widen(self) -> f32;

    /// Reads `count < LANES` elements; the other lanes are zero.
    ///
    /// # Safety
    /// As the trait's.
    #[inline(always)]
    unsafe fn load_part<L: Lanes>(lanes: L, from: *const Self, count: usize) -> L::V {
        let mut tail = [0.0f32; MAX_LANES];
        // SAFETY: the caller gives `count` readable elements, and `tail` has `LANES`.
        unsafe {
            for (i, slot) in tail.iter_mut().enumerate().take(count) {
                *slot = (*from.add(i)).widen();
            }
            lanes.load(tail.as_ptr())
        }
    }
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V {
        // SAFETY: the caller entered the features; `LANES` elements are readable.
        unsafe { lanes.load(from) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load_part<L: Lanes>(lanes: L, from: *const Self, count: usize) -> L::V {
        // SAFETY: the caller entered the features; `count` elements are readable.
        unsafe { lanes.load_part(from, count) }
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V {
        // SAFETY: the caller entered the features; `LANES` elements are readable.
        unsafe { lanes.load_f16(from) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(lanes: L, from: *const Self) -> L::V {
        // SAFETY: the caller entered the features; `LANES` elements are readable.
        unsafe { lanes.load_bf16(from) }
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    struct Apply<'a>(&'a [f32], &'a mut [f32], fn(f32) -> f64, f64);

    impl Op for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn eval<L: Lanes>(self, l: L) {
            let Apply(x, y, reference, tolerance) = self;
            for (x, y) in x.chunks_exact(L::LANES).zip(y.chunks_exact_mut(L::LANES)) {
                // SAFETY: `run` entered the features; both chunks are `LANES` long.
                unsafe {
                    let v = l.load(x.as_ptr());
                    let out = if reference(0.0) == 1.0 { l.exp(v) } else { l.tanh(v) };
                    l.store(y.as_mut_ptr(), out);
                }
            }
            for (x, y) in x.iter().zip(y.iter()) {
                let want = reference(*x);
                let error = (f64::from(*y) - want).abs() / if reference(0.0) == 1.0 { want } else { 1.0 };
                assert!(error < tolerance, "f({x}) = {y}, not {want}");
            }
        }
    }

    struct FirstLanes;

    impl Op for FirstLanes {
        type Output = ();
        #[inline(always)]
        fn eval<L: Lanes>(self, l: L) {
            let x: [f32; 16] = std::array::from_fn(|i| i as f32 + 1.0);
            for count in 0..=L::LANES {
                let (mut loaded, mut stored) = ([-1.0f32; 16], [-1.0f32; 16]);
                // SAFETY: `run` entered the features; no lane type has more than 16 lanes.
                unsafe {
                    l.store(loaded.as_mut_ptr(), l.load_first(x.as_ptr(), count));
                    l.store_first(stored.as_mut_ptr(), l.load(x.as_ptr()), count);
                }
                assert_eq!(loaded[..count], x[..count]);
                assert!(loaded[count..L::LANES].iter().all(|x| *x == 0.0), "{count} lanes: {loaded:?}");
                assert_eq!(stored[..count], x[..count]);
                assert!(stored[count..].iter().all(|x| *x == -1.0), "{count} lanes: {stored:?}");
            }
        }
    }

    #[test]
    fn the_first_lanes_are_loaded_and_stored_on_every_isa() {
        for isa in Isa::available() {
            isa.run(FirstLanes);
        }
    }

    #[test]
    fn exp_and_tanh_are_accurate_on_every_isa() {
        let x: Vec<f32> = (0..4096).map(|i| (i as f32 / 4096.0 - 0.5) * 170.0).collect();
        let mut y = vec![0.0; x.len()];
        for isa in Isa::available() {
            isa.run(Apply(&x, &mut y, |x| f64::from(x).exp(), 2.5e-7));
            isa.run(Apply(&x, &mut y, |x| f64::from(x).tanh(), 2.5e-7));
        }
    }
}
