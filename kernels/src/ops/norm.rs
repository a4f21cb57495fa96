//! RMS norm (Zhang and Sennrich, 2019); the weight is used directly, without the `1 +` of earlier Gemma models.

use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// The operation after the norm.
#[derive(Clone, Copy, Debug)]
pub enum AfterNorm<'a> {
    /// `y = norm(x)`.
    Write,
    /// `y = (residual + norm(x)) * scale`: the norm after a branch of the layer, with the layer's output scale.
    AddTo {
        /// The residual stream, with the shape of `x`.
        residual: &'a [f32],
        /// Multiplies the sum.
        scale: f32,
    },
}

/// `norm(x) = x / sqrt(mean(x^2) + eps) * weight`, for each row of `x`; no multiplication if `weight` is `None`.
///
/// `x` and `y` are `(rows, width)`, `weight` is `(width)`.
///
/// # Panics
/// If a length does not match the shapes.
pub fn rms_norm(
    isa: Isa,
    x: &[f32],
    width: usize,
    weight: Option<&[f32]>,
    eps: f32,
    after: AfterNorm<'_>,
    y: &mut [f32],
) {
    assert!(width > 0 && x.len().is_multiple_of(width) && x.len() == y.len(), "rms_norm: x, y are not (rows, width)");
    assert!(weight.is_none_or(|w| w.len() == width), "rms_norm: the weight is not (width)");
    if let AfterNorm::AddTo { residual, .. } = after {
        assert_eq!(residual.len(), x.len(), "rms_norm: residual and x differ in length");
    }
    isa.run(RmsNorm { x, width, weight, eps, after, y });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    width: usize,
    weight: Option<&'a [f32]>,
    eps: f32,
    after: AfterNorm<'a>,
    y: &'a mut [f32],
}

impl Op for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        for (row, (x, y)) in self.x.chunks_exact(self.width).zip(self.y.chunks_exact_mut(self.width)).enumerate() {
            // SAFETY: `run` entered the features; all rows are `width` long.
            unsafe {
                // Squares accumulate in f32 lanes; the sum over lanes and the inverse square root are f64, because an
                // error of the inverse scales the whole row.
                let mean_square = sum_of_squares(l, x) / self.width as f64;
                let inverse = l.splat((1.0 / (mean_square + f64::from(self.eps)).sqrt()) as f32);
                let whole = self.width - self.width % L::LANES;
                let finish = Finish { inverse, weight: self.weight, after: self.after, row: row * self.width };
                for i in (0..whole).step_by(L::LANES) {
                    let v = finish.apply(l, l.load(x.as_ptr().add(i)), i, L::LANES);
                    l.store(y.as_mut_ptr().add(i), v);
                }
                let tail = self.width - whole;
                if tail > 0 {
                    let v = finish.apply(l, l.load_part(x.as_ptr().add(whole), tail), whole, tail);
                    l.store_part(y.as_mut_ptr().add(whole), v, tail);
                }
            }
        }
    }
}

/// The scale, weight and residual of a row.
struct Finish<'a, V> {
    inverse: V,
    weight: Option<&'a [f32]>,
    after: AfterNorm<'a>,
    row: usize, // the row's offset in the residual
}

impl<V: Copy> Finish<'_, V> {
    /// The results of `count` elements from the row's element `i` on.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; weight and residual have the row's
    /// `count` elements from `i` on, at most `LANES`.
    #[inline(always)]
    unsafe fn apply<L: Lanes<V = V>>(&self, l: L, x: V, i: usize, count: usize) -> V {
        // SAFETY: the caller entered the features; weight and residual have the row's elements.
        unsafe {
            let mut v = l.mul(x, self.inverse);
            if let Some(weight) = self.weight {
                v = l.mul(v, l.load_first(weight.as_ptr().add(i), count));
            }
            match self.after {
                AfterNorm::Write => v,
                AfterNorm::AddTo { residual, scale } => {
                    let residual = l.load_first(residual.as_ptr().add(self.row + i), count);
                    l.mul(l.add(residual, v), l.splat(scale))
                }
            }
        }
    }
}

/// The sum of squares, in four accumulators that are added pairwise.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
unsafe fn sum_of_squares<L: Lanes>(l: L, x: &[f32]) -> f64 {
    // SAFETY: the caller entered the features; loads stay inside `x`.
    unsafe {
        let mut acc = [l.splat(0.0); 4];
        let mut blocks = x.chunks_exact(4 * L::LANES);
        for block in blocks.by_ref() {
            for (i, acc) in acc.iter_mut().enumerate() {
                let v = l.load(block.as_ptr().add(i * L::LANES));
                *acc = l.fma(v, v, *acc);
            }
        }
        let mut lanes = blocks.remainder().chunks_exact(L::LANES);
        for x in lanes.by_ref() {
            let v = l.load(x.as_ptr());
            acc[0] = l.fma(v, v, acc[0]);
        }
        if !lanes.remainder().is_empty() {
            let v = l.load_part(lanes.remainder().as_ptr(), lanes.remainder().len());
            acc[1] = l.fma(v, v, acc[1]);
        }
        l.sum_f64(l.add(l.add(acc[0], acc[1]), l.add(acc[2], acc[3])))
    }
}
