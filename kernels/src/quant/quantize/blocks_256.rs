//! Blocks of 256 weights in groups, whose scales (and minima) are integers times the block's.

use super::fit::{Minimum, extreme, fit_affine, fit_symmetric, inverse, nearest, sums};
use super::{put_half, weights};
use half::f16;

/// How often the groups' integers are chosen anew for the block's scale, and it for them.
const ROUNDS: usize = 2;

/// What 16 groups of 16, or 8 of 32, have in common.
struct Groups {
    /// The block's scale, and that of the minima, as they are stored.
    unit: f32,
    minimum_unit: f32,
    scales: [f32; 16], // integers
    minima: [f32; 16], // integers
}

#[inline(always)]
fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// Fits scales `0..=top` and minima `0..=top` for weights of `0..=levels`, in groups of `N`.
#[inline(always)]
fn affine<const N: usize>(x: &[f32], w: &[f32; 256], levels: f32, top: f32) -> Groups {
    let (mut scales, mut minima) = ([0.0; 16], [0.0; 16]);
    for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
        let (scale, low) = fit_affine(x, w, levels, Minimum::NotPositive);
        (scales[g], minima[g]) = (scale, -low);
    }
    let largest = |x: &[f32; 16]| x.iter().copied().fold(0.0, f32::max);
    let (unit, minimum_unit) = (rounded(largest(&scales) / top), rounded(largest(&minima) / top));
    let mut groups = Groups { unit, minimum_unit, scales, minima };
    for g in 0..256 / N {
        groups.scales[g] = nearest(scales[g] * inverse(unit), 0.0, top);
        groups.minima[g] = nearest(minima[g] * inverse(minimum_unit), 0.0, top);
    }
    for round in 0..ROUNDS {
        for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
            let (scale, minimum) = (groups.scales[g], groups.minima[g]);
            let mut best = f32::INFINITY;
            for ds in [0.0, -1.0, 1.0] {
                for dm in [0.0, -1.0, 1.0] {
                    let (s, m) = (nearest(scale + ds, 0.0, top), nearest(minimum + dm, 0.0, top));
                    let (d, low) = (groups.unit * s, groups.minimum_unit * m);
                    let inverse = inverse(d);
                    let [error] = sums(x, w, |x, w| {
                        let off = x - (d * nearest((x + low) * inverse, 0.0, levels) - low);
                        [w * off * off]
                    });
                    if error < best {
                        (best, groups.scales[g], groups.minima[g]) = (error, s, m);
                    }
                }
            }
        }
        if round + 1 == ROUNDS {
            break;
        }
        // x is nearly unit * a - minimum_unit * b, with a = scale * q and b = minimum: least squares for both units.
        let mut total = [0.0f64; 5];
        for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
            let (scale, b) = (groups.scales[g], groups.minima[g]);
            let (inverse, low) = (inverse(groups.unit * scale), groups.minimum_unit * b);
            let parts = sums(x, w, |x, w| {
                let a = scale * nearest((x + low) * inverse, 0.0, levels);
                [w * a * a, w * a * b, w * b * b, w * a * x, w * b * x]
            });
            for (total, part) in total.iter_mut().zip(parts) {
                *total += f64::from(part);
            }
        }
        let [aa, ab, bb, ax, bx] = total;
        let determinant = aa * bb - ab * ab;
        if determinant > 1e-6 * aa * bb {
            let (unit, minimum_unit) = ((ax * bb - bx * ab) / determinant, (ax * ab - bx * aa) / determinant);
            if unit > 0.0 && minimum_unit >= 0.0 {
                (groups.unit, groups.minimum_unit) = (rounded(unit as f32), rounded(minimum_unit as f32));
            }
        } else if bb == 0.0 && aa > 0.0 && ax > 0.0 {
            groups.unit = rounded((ax / aa) as f32);
        }
    }
    groups
}

/// Fits scales `-top..top` for weights of `-levels..levels`, in groups of 16.
#[inline(always)]
fn symmetric(x: &[f32], w: &[f32; 256], levels: f32, top: f32) -> Groups {
    let mut scales = [0.0; 16];
    for (scale, (x, w)) in scales.iter_mut().zip(x.chunks_exact(16).zip(w.chunks_exact(16))) {
        *scale = fit_symmetric(x, w, levels);
    }
    // The extreme scale becomes -top.
    let unit = rounded(-extreme(&scales) / top);
    let mut groups = Groups { unit, minimum_unit: 0.0, scales: [0.0; 16], minima: [0.0; 16] };
    for (stored, scale) in groups.scales.iter_mut().zip(scales) {
        *stored = nearest(scale * inverse(unit), -top, top - 1.0);
    }
    for round in 0..ROUNDS {
        for (g, (x, w)) in x.chunks_exact(16).zip(w.chunks_exact(16)).enumerate() {
            let scale = groups.scales[g];
            let mut best = f32::INFINITY;
            for ds in [0.0, -1.0, 1.0] {
                let s = nearest(scale + ds, -top, top - 1.0);
                let d = groups.unit * s;
                let inverse = inverse(d);
                let [error] = sums(x, w, |x, w| {
                    let off = x - d * nearest(x * inverse, -levels, levels - 1.0);
                    [w * off * off]
                });
                if error < best {
                    (best, groups.scales[g]) = (error, s);
                }
            }
        }
        if round + 1 == ROUNDS {
            break;
        }
        let mut total = [0.0f64; 2];
        for (g, (x, w)) in x.chunks_exact(16).zip(w.chunks_exact(16)).enumerate() {
            let scale = groups.scales[g];
            let inverse = inverse(groups.unit * scale);
            let parts = sums(x, w, |x, w| {
                let a = scale * nearest(x * inverse, -levels, levels - 1.0);
                [w * a * a, w * a * x]
            });
            for (total, part) in total.iter_mut().zip(parts) {
                *total += f64::from(part);
            }
        }
        let [aa, ax] = total;
        if aa > 0.0 {
            groups.unit = rounded((ax / aa) as f32);
        }
    }
    groups
}

/// The weights of a block, group by group.
#[inline(always)]
fn all_weights<const N: usize>(importance: Option<&[f32]>) -> [f32; 256] {
    let mut all = [0.0; 256];
    for (g, out) in all.chunks_exact_mut(N).enumerate() {
        out.copy_from_slice(&weights::<N>(importance.map(|all| &all[g * N..(g + 1) * N])));
    }
    all
}

/// Writes planes of 2 bits: weights `i`, `i + 32`, `i + 64` and `i + 96` share a byte.
#[inline(always)]
fn put_two_bits(out: &mut [u8], i: usize, q: u8) {
    out[i / 128 * 32 + i % 32] |= (q & 3) << (i % 128 / 32 * 2);
}

#[inline(always)]
pub(super) fn q2(x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let w = all_weights::<16>(importance);
    let Groups { unit, minimum_unit, scales, minima } = affine::<16>(x, &w, 3.0, 15.0);
    let (unit, minimum_unit) = (put_half(out, 80, unit), put_half(out, 82, minimum_unit));
    for (s, x) in x.chunks_exact(16).enumerate() {
        out[s] = scales[s] as u8 | (minima[s] as u8) << 4;
        let (inverse, minimum) = (inverse(unit * scales[s]), minimum_unit * minima[s]);
        for (i, x) in x.iter().enumerate() {
            put_two_bits(&mut out[16..80], 16 * s + i, nearest((x + minimum) * inverse, 0.0, 3.0) as u8);
        }
    }
}

#[inline(always)]
pub(super) fn q3(x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let w = all_weights::<16>(importance);
    let Groups { unit, scales, .. } = symmetric(x, &w, 4.0, 32.0);
    let unit = put_half(out, 108, unit);
    for (s, x) in x.chunks_exact(16).enumerate() {
        let six = (scales[s] + 32.0) as u8;
        out[96 + s % 8] |= (six & 15) << (s / 8 * 4);
        out[104 + s % 4] |= (six >> 4) << (s / 4 * 2);
        let inverse = inverse(unit * scales[s]);
        for (i, x) in (16 * s..).zip(x) {
            let q = (nearest(x * inverse, -4.0, 3.0) + 4.0) as u8;
            put_two_bits(&mut out[32..96], i, q);
            out[i % 32] |= (q >> 2) << (i / 32);
        }
    }
}

#[inline(always)]
pub(super) fn q4_or_q5(x: &[f32], importance: Option<&[f32]>, out: &mut [u8], levels: f32) {
    let w = all_weights::<32>(importance);
    let Groups { unit, minimum_unit, scales, minima } = affine::<32>(x, &w, levels, 63.0);
    let (unit, minimum_unit) = (put_half(out, 0, unit), put_half(out, 2, minimum_unit));
    let [scale, minimum] = [scales, minima].map(|integers| integers.map(|integer| integer as u8));
    for s in 0..4 {
        let six = |a: u8, b: u8| a | (b >> 4) << 6;
        out[4 + s] = six(scale[s], scale[4 + s]);
        out[8 + s] = six(minimum[s], minimum[4 + s]);
        out[12 + s] = scale[4 + s] & 15 | minimum[4 + s] << 4;
    }
    // Q5_K has a plane of fifth bits before the nibbles.
    let (bits, nibbles) = out[16..].split_at_mut(if levels == 31.0 { 32 } else { 0 });
    for (s, x) in x.chunks_exact(32).enumerate() {
        let (inverse, minimum) = (inverse(unit * scales[s]), minimum_unit * minima[s]);
        for (i, x) in x.iter().enumerate() {
            let q = nearest((x + minimum) * inverse, 0.0, levels) as u8;
            nibbles[s / 2 * 32 + i] |= (q & 15) << (s % 2 * 4);
            if let Some(bits) = bits.get_mut(i) {
                *bits |= (q >> 4) << s;
            }
        }
    }
}

#[inline(always)]
pub(super) fn q6(x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let w = all_weights::<16>(importance);
    let Groups { unit, scales, .. } = symmetric(x, &w, 32.0, 128.0);
    let unit = put_half(out, 208, unit);
    for (s, x) in x.chunks_exact(16).enumerate() {
        out[192 + s] = scales[s] as i8 as u8;
        let inverse = inverse(unit * scales[s]);
        let (half, quarter) = (s / 8, s % 8 / 2);
        for (i, x) in (16 * s..).zip(x) {
            let q = (nearest(x * inverse, -32.0, 31.0) + 32.0) as u8;
            out[half * 64 + i % 64] |= (q & 15) << (quarter / 2 * 4);
            out[128 + half * 32 + i % 32] |= (q >> 4) << (quarter * 2);
        }
    }
}
