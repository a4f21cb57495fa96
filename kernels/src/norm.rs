//! Root-mean-square normalisation (Zhang and Sennrich, 2019), with the plain weight that Gemma 4 uses.

use crate::Isa;
use crate::lanes::{Lanes, Op};

/// What is done with a row once it is normalised.
#[derive(Clone, Copy, Debug)]
pub enum AfterNorm<'a> {
    /// `y = norm(x)`.
    Write,
    /// `y = (residual + norm(x)) * scale`: the sandwich norm that closes a branch, with the layer's output scale.
    AddTo {
        /// The residual stream, shaped as `x`.
        residual: &'a [f32],
        /// Multiplies the sum.
        scale: f32,
    },
}

/// `norm(x) = x / sqrt(mean(x^2) + eps) * weight`, for each row of `x`; without a weight, weightless.
///
/// `x` and `y` are `(rows, width)`, `weight` is `(width)`.
///
/// # Panics
/// If `x` is not whole rows, or another length differs.
pub fn rms_norm(
    isa: Isa,
    x: &[f32],
    width: usize,
    weight: Option<&[f32]>,
    eps: f32,
    after: AfterNorm<'_>,
    y: &mut [f32],
) {
    assert!(width > 0 && x.len().is_multiple_of(width) && x.len() == y.len(), "rms_norm: x and y are not whole rows");
    assert!(weight.is_none_or(|w| w.len() == width), "rms_norm: the weight is not (width)");
    if let AfterNorm::AddTo { residual, .. } = after {
        assert_eq!(residual.len(), x.len(), "rms_norm: the residual is not shaped as x");
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
                // In f64 up to here: an error of the inverse is common to the whole row, so nothing averages it out.
                let mean_square = sum_of_squares(l, x) / self.width as f64;
                let inverse = l.splat((1.0 / (mean_square + f64::from(self.eps)).sqrt()) as f32);
                let after = match self.after {
                    AfterNorm::Write => None,
                    AfterNorm::AddTo { residual, scale } => {
                        Some((residual.as_ptr().add(row * self.width), l.splat(scale)))
                    }
                };
                let finish = |i: usize, x: L::V, load: &dyn Fn(*const f32) -> L::V| {
                    let mut v = l.mul(x, inverse);
                    if let Some(weight) = self.weight {
                        v = l.mul(v, load(weight.as_ptr().add(i)));
                    }
                    match after {
                        None => v,
                        Some((residual, scale)) => l.mul(l.add(load(residual.add(i)), v), scale),
                    }
                };
                let whole = self.width - self.width % L::LANES;
                for i in (0..whole).step_by(L::LANES) {
                    let v = finish(i, l.load(x.as_ptr().add(i)), &|p| l.load(p));
                    l.store(y.as_mut_ptr().add(i), v);
                }
                let tail = self.width - whole;
                if tail > 0 {
                    let v = finish(whole, l.load_part(x.as_ptr().add(whole), tail), &|p| l.load_part(p, tail));
                    l.store_part(y.as_mut_ptr().add(whole), v, tail);
                }
            }
        }
    }
}

/// Four accumulators, added pairwise at the end.
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
