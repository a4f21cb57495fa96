//! Least-squares fits of a scale, or a scale and a min, to the weights of a group.

use half::f16;

/// One over a scale, zero for scale zero.
#[inline(always)]
pub(super) fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The nearest integer to `x` in `low..=high`, ties to even. In floating point, by adding 1.5 *
/// 2^23, which vectorizes on every processor.
#[inline(always)]
pub(super) fn nearest(x: f32, low: f32, high: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    let x = if x > low { x } else { low };
    let x = if x < high { x } else { high };
    (x + SHIFT) - SHIFT
}

/// Sums of `term(x, w)` over a multiple of eight elements, in eight partial sums, which vectorize.
#[inline(always)]
pub(super) fn sums<const K: usize>(x: &[f32], w: &[f32], term: impl Fn(f32, f32) -> [f32; K]) -> [f32; K] {
    let mut partials = [[0.0f32; 8]; K];
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        for i in 0..8 {
            let terms = term(x[i], w[i]);
            for (partials, term) in partials.iter_mut().zip(terms) {
                partials[i] += term;
            }
        }
    }
    partials.map(|partials| partials.iter().sum())
}

/// The element of largest magnitude, with its sign.
#[inline(always)]
pub(super) fn extreme(x: &[f32]) -> f32 {
    x.iter().copied().fold(0.0, |a: f32, x| if x.abs() > a.abs() { x } else { a })
}

/// The scale of least weighted squared error `sum w (x - scale * q)^2`: each candidate chooses the integers `q =
/// quant(x / candidate)`, and least squares the scale.
#[inline(always)]
pub(super) fn fit(x: &[f32], w: &[f32], candidates: impl Iterator<Item = f32>, quant: impl Fn(f32) -> f32) -> f32 {
    let (mut best, mut scale) = (0.0, 0.0);
    for candidate in candidates {
        let inverse = inverse(candidate);
        let [xq, qq] = sums(x, w, |x, w| {
            let q = quant(x * inverse);
            [w * x * q, w * q * q]
        });
        // The error is `sum w x^2` minus xq^2 / qq.
        if qq > 0.0 && xq * xq > best * qq {
            (best, scale) = (xq * xq / qq, xq / qq);
        }
    }
    scale
}

/// The scale for integers `-levels..levels`. The element of largest magnitude becomes about `-levels`, so the scale may
/// be negative.
#[inline(always)]
pub(super) fn fit_symmetric(x: &[f32], w: &[f32], levels: f32) -> f32 {
    let extreme = extreme(x);
    let candidates = (-9..=9).map(|step| -extreme / (levels + 0.1 * step as f32));
    fit(x, w, candidates, |x| nearest(x, -levels, levels - 1.0))
}

/// The range of a fitted min.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum MinRange {
    Anywhere,
    /// K-quants store minus the min, unsigned.
    NotPositive,
}

/// Scale and min for integers `0..=levels`.
#[inline(always)]
pub(super) fn fit_affine(x: &[f32], w: &[f32], levels: f32, range_of_min: MinRange) -> (f32, f32) {
    let mut low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if range_of_min == MinRange::NotPositive {
        low = low.min(0.0);
    }
    if high <= low {
        return (0.0, low);
    }
    let [total, wx] = sums(x, w, |x, w| [w, w * x]);
    // The reduction of the squared error, compared with zeros.
    let gain = |scale: f32, offset: f32, [q1, q2, xq]: [f32; 3]| -> f64 {
        let [s, m, q1, q2, xq, total, wx] = [scale, offset, q1, q2, xq, total, wx].map(f64::from);
        2.0 * (s * xq + m * wx) - s * s * q2 - 2.0 * s * m * q1 - m * m * total
    };
    let quantized = |inverse: f32, low: f32| {
        sums(x, w, |x, w| {
            let q = nearest((x - low) * inverse, 0.0, levels);
            let wq = w * q;
            [wq, wq * q, wq * x]
        })
    };
    let fitted = |sums: [f32; 3]| {
        let [q1, q2, xq] = sums;
        let determinant = total * q2 - q1 * q1;
        let (mut scale, mut offset) = ((total * xq - wx * q1) / determinant, (q2 * wx - q1 * xq) / determinant);
        if range_of_min == MinRange::NotPositive && offset > 0.0 {
            (scale, offset) = (xq / q2, 0.0);
        }
        // The determinant is zero if all integers are equal.
        if determinant > 0.0 { (gain(scale, offset, sums), scale, offset) } else { (f64::NEG_INFINITY, 0.0, 0.0) }
    };
    // The scale and min of the range, unless a fit is better.
    let range = (high - low) / levels;
    let mut best = (gain(range, low, quantized(1.0 / range, low)), range, low);
    for step in -10..=10 {
        let candidate = fitted(quantized((levels + 0.1 * step as f32) / (high - low), low));
        if candidate.0 > best.0 {
            best = candidate;
        }
    }
    // Requantizes with the best fit.
    for _ in 0..2 {
        let candidate = fitted(quantized(inverse(best.1), best.2));
        if candidate.0 > best.0 {
            best = candidate;
        }
    }
    (best.1, best.2)
}

/// The weights of a group's squared errors: the importance if it is given, else 1.
#[inline(always)]
pub(super) fn error_weights<const N: usize>(importance: Option<&[f32]>) -> [f32; N] {
    let mut weights = [1.0; N];
    // All zeros would leave the fit undefined, so they also count as 1.
    if let Some(importance) = importance.filter(|all| all.iter().any(|weight| *weight > 0.0)) {
        weights.copy_from_slice(importance);
    }
    weights
}

/// Stores `value` as `f16`; returns the rounded value.
#[inline(always)]
pub(super) fn put_half(out: &mut [u8], at: usize, value: f32) -> f32 {
    let half = f16::from_f32(value);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}
