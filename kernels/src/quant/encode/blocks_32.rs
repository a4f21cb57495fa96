//! Blocks of 32 weights with one scale, or a scale and a min, and the levels that blocks of 256 share with them.

use super::fit::{MinRange, error_weights, extreme, fit, fit_affine, fit_symmetric, inverse, nearest, put_half, sums};
use crate::quant::ggml::{E2M1_LEVELS, IQ4_NL_LEVELS, half_power_of_two};

/// Q4_0 and Q5_0.
#[inline(always)]
pub(super) fn symmetric(x: &[f32], importance: Option<&[f32]>, out: &mut [u8], levels: f32) {
    let weights: [f32; 32] = error_weights(importance);
    let inverse = inverse(put_half(out, 0, fit_symmetric(x, &weights, levels)));
    put_nibbles(&mut out[2..], x, |x| (nearest(x * inverse, -levels, levels - 1.0) + levels) as u8);
}

/// Q4_1 and Q5_1.
#[inline(always)]
pub(super) fn affine(x: &[f32], importance: Option<&[f32]>, out: &mut [u8], levels: f32) {
    let weights: [f32; 32] = error_weights(importance);
    let (scale, low) = fit_affine(x, &weights, levels, MinRange::Anywhere);
    let (inverse, low) = (inverse(put_half(out, 0, scale)), put_half(out, 2, low));
    put_nibbles(&mut out[4..], x, |x| nearest((x - low) * inverse, 0.0, levels) as u8);
}

/// Writes 16 bytes of nibbles; if `out` has 20 bytes, the fifth bits come first.
#[inline(always)]
fn put_nibbles(out: &mut [u8], x: &[f32], quant: impl Fn(f32) -> u8) {
    let (bits, nibbles) = out.split_at_mut(out.len() - 16);
    for (i, x) in x.iter().enumerate() {
        let q = quant(*x);
        nibbles[i % 16] |= (q & 15) << (i / 16 * 4);
        if let Some(bits) = bits.get_mut(i / 8) {
            *bits |= (q >> 4) << (i % 8);
        }
    }
}

#[inline(always)]
pub(super) fn q8_0(x: &[f32], out: &mut [u8]) {
    // As llama.cpp: the unrounded scale chooses the integers, ties away from zero.
    let scale = extreme(x).abs() / 127.0;
    let inverse = inverse(scale);
    put_half(out, 0, scale);
    for (q, x) in out[2..].iter_mut().zip(x) {
        *q = (x * inverse).round() as i8 as u8;
    }
}

/// The index of the nearest level of IQ4_NL: the number of midpoints between sorted levels that are at most `x`.
#[inline(always)]
pub(super) fn iq4_index(x: f32) -> u8 {
    IQ4_NL_LEVELS.windows(2).map(|w| u8::from(x >= 0.5 * (f32::from(w[0]) + f32::from(w[1])))).sum()
}

/// The nearest level, as a sum of steps, which vectorizes; a table lookup does not.
#[inline(always)]
pub(super) fn iq4_level(x: f32) -> f32 {
    let mut level = f32::from(IQ4_NL_LEVELS[0]);
    for w in IQ4_NL_LEVELS.windows(2) {
        let (below, above) = (f32::from(w[0]), f32::from(w[1]));
        level += if x >= 0.5 * (below + above) { above - below } else { 0.0 };
    }
    level
}

/// The scale for the levels of IQ4_NL.
#[inline(always)]
pub(super) fn fit_iq4(x: &[f32], w: &[f32]) -> f32 {
    let extreme = extreme(x);
    // The element of largest magnitude becomes a level near either end of the table, which is not symmetric.
    let (negative, positive) = (f32::from(IQ4_NL_LEVELS[0]), f32::from(IQ4_NL_LEVELS[15]));
    let candidates = (-12..=12).flat_map(|step| [negative, positive].map(|end| extreme / (end + 1.5 * step as f32)));
    fit(x, w, candidates, iq4_level)
}

#[inline(always)]
pub(super) fn iq4_nl(x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let weights: [f32; 32] = error_weights(importance);
    let inverse = inverse(put_half(out, 0, fit_iq4(x, &weights)));
    put_nibbles(&mut out[2..], x, |x| iq4_index(x * inverse));
}

/// The sum over the positive levels of E2M1 that are at most `|x|`, rounded, of `step(below, level)`.
#[inline(always)]
fn e2m1_steps(x: f32, step: impl Fn(f32, f32) -> f32) -> f32 {
    let mut total = 0.0;
    for w in E2M1_LEVELS[..8].windows(2) {
        let (below, above) = (f32::from(w[0]), f32::from(w[1]));
        total += if x.abs() >= 0.5 * (below + above) { step(below, above) } else { 0.0 };
    }
    total
}

/// The exponent with the least error of three: the OCP's rule, with which the largest element is within the levels or
/// rounded down to the largest level, and its two neighbours.
#[inline(always)]
pub(super) fn mxfp4(x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let largest = extreme(x).abs();
    if largest == 0.0 {
        return;
    }
    let weights: [f32; 32] = error_weights(importance);
    let rule = (largest.to_bits() >> 23) as i32 - 2;
    // The rule's if all errors overflow.
    let (mut best, mut chosen) = (f32::INFINITY, rule.clamp(2, 254) as u8);
    for exponent in rule - 1..=rule + 1 {
        // Below 2, the scale is subnormal and its inverse infinite.
        let exponent = exponent.clamp(2, 254) as u8;
        let candidate = half_power_of_two(exponent);
        let inverse = 1.0 / candidate;
        let [error] = sums(x, &weights, |x, w| {
            let off = x.abs() - candidate * e2m1_steps(x * inverse, |below, above| above - below);
            [w * off * off]
        });
        if error < best {
            (best, chosen) = (error, exponent);
        }
    }
    out[0] = chosen;
    let inverse = 1.0 / half_power_of_two(chosen);
    put_nibbles(&mut out[1..], x, |x| {
        let index = e2m1_steps(x * inverse, |_, _| 1.0) as u8;
        if x < 0.0 && index > 0 { index | 8 } else { index }
    });
}
