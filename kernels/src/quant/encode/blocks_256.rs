//! Blocks of 256 weights in sub-blocks, whose scales (and mins) are integers times the block's.

use super::blocks_32::{fit_iq4, iq4_index, iq4_level};
use super::fit::{MinRange, error_weights, extreme, fit_affine, fit_symmetric, inverse, nearest, put_half, sums};
use half::f16;

/// Iterations: the sub-blocks' integers for the block's scale, and the scale for the integers.
const ROUNDS: usize = 2;

/// The scales of 16 sub-blocks of 16, or 8 of 32.
struct SubBlocks {
    /// The block's scale `d`, and the scale of the mins `dmin`, as stored.
    d: f32,
    dmin: f32,
    scales: [f32; 16], // integers
    mins: [f32; 16],   // integers
}

#[inline(always)]
fn rounded(x: f32) -> f32 {
    f16::from_f32(x).to_f32()
}

/// Fits scales `0..=top` and mins `0..=top` for weights of `0..=levels`, in sub-blocks of `N`.
#[inline(always)]
fn affine<const N: usize>(x: &[f32], w: &[f32; 256], levels: f32, top: f32) -> SubBlocks {
    let (mut scales, mut mins) = ([0.0; 16], [0.0; 16]);
    for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
        let (scale, low) = fit_affine(x, w, levels, MinRange::NotPositive);
        (scales[g], mins[g]) = (scale, -low);
    }
    let largest = |x: &[f32; 16]| x.iter().copied().fold(0.0, f32::max);
    let (d, dmin) = (rounded(largest(&scales) / top), rounded(largest(&mins) / top));
    let mut blocks = SubBlocks { d, dmin, scales, mins };
    for g in 0..256 / N {
        blocks.scales[g] = nearest(scales[g] * inverse(d), 0.0, top);
        blocks.mins[g] = nearest(mins[g] * inverse(dmin), 0.0, top);
    }
    for round in 0..ROUNDS {
        for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
            let (scale, min) = (blocks.scales[g], blocks.mins[g]);
            let mut best = f32::INFINITY;
            for ds in [0.0, -1.0, 1.0] {
                for dm in [0.0, -1.0, 1.0] {
                    let (s, m) = (nearest(scale + ds, 0.0, top), nearest(min + dm, 0.0, top));
                    let (d, low) = (blocks.d * s, blocks.dmin * m);
                    let inverse = inverse(d);
                    let [error] = sums(x, w, |x, w| {
                        let off = x - (d * nearest((x + low) * inverse, 0.0, levels) - low);
                        [w * off * off]
                    });
                    if error < best {
                        (best, blocks.scales[g], blocks.mins[g]) = (error, s, m);
                    }
                }
            }
        }
        if round + 1 == ROUNDS {
            break;
        }
        // x is about d * a - dmin * b, with a = scale * q and b = min: least squares for d and dmin.
        let mut total = [0.0f64; 5];
        for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
            let (scale, b) = (blocks.scales[g], blocks.mins[g]);
            let (inverse, low) = (inverse(blocks.d * scale), blocks.dmin * b);
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
            let (d, dmin) = ((ax * bb - bx * ab) / determinant, (ax * ab - bx * aa) / determinant);
            if d > 0.0 && dmin >= 0.0 {
                (blocks.d, blocks.dmin) = (rounded(d as f32), rounded(dmin as f32));
            }
        } else if bb == 0.0 && aa > 0.0 && ax > 0.0 {
            blocks.d = rounded((ax / aa) as f32);
        }
    }
    blocks
}

/// Fits scales `-top..top` for weights of `-levels..levels`, in sub-blocks of 16.
#[inline(always)]
fn symmetric(x: &[f32], w: &[f32; 256], levels: f32, top: f32) -> SubBlocks {
    let scale = |x: &[f32], w: &[f32]| fit_symmetric(x, w, levels);
    without_mins::<16>(x, w, top, scale, |x| nearest(x, -levels, levels - 1.0))
}

/// Fits scales `-top..top` in sub-blocks of `N`: `fit(x, w)` is a sub-block's scale, `level(x)` the level nearest to
/// `x`.
#[inline(always)]
fn without_mins<const N: usize>(
    x: &[f32],
    w: &[f32; 256],
    top: f32,
    fit: impl Fn(&[f32], &[f32]) -> f32,
    level: impl Fn(f32) -> f32,
) -> SubBlocks {
    let mut scales = [0.0; 16];
    for (scale, (x, w)) in scales.iter_mut().zip(x.chunks_exact(N).zip(w.chunks_exact(N))) {
        *scale = fit(x, w);
    }
    // The scale of largest magnitude becomes -top.
    let d = rounded(-extreme(&scales) / top);
    let mut blocks = SubBlocks { d, dmin: 0.0, scales: [0.0; 16], mins: [0.0; 16] };
    for (stored, scale) in blocks.scales.iter_mut().zip(scales) {
        *stored = nearest(scale * inverse(d), -top, top - 1.0);
    }
    for round in 0..ROUNDS {
        for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
            let scale = blocks.scales[g];
            let mut best = f32::INFINITY;
            for ds in [0.0, -1.0, 1.0] {
                let s = nearest(scale + ds, -top, top - 1.0);
                let d = blocks.d * s;
                let inverse = inverse(d);
                let [error] = sums(x, w, |x, w| {
                    let off = x - d * level(x * inverse);
                    [w * off * off]
                });
                if error < best {
                    (best, blocks.scales[g]) = (error, s);
                }
            }
        }
        if round + 1 == ROUNDS {
            break;
        }
        let mut total = [0.0f64; 2];
        for (g, (x, w)) in x.chunks_exact(N).zip(w.chunks_exact(N)).enumerate() {
            let scale = blocks.scales[g];
            let inverse = inverse(blocks.d * scale);
            let parts = sums(x, w, |x, w| {
                let a = scale * level(x * inverse);
                [w * a * a, w * a * x]
            });
            for (total, part) in total.iter_mut().zip(parts) {
                *total += f64::from(part);
            }
        }
        let [aa, ax] = total;
        if aa > 0.0 {
            blocks.d = rounded((ax / aa) as f32);
        }
    }
    blocks
}

/// The error weights of a block, sub-block by sub-block.
#[inline(always)]
fn all_weights<const N: usize>(importance: Option<&[f32]>) -> [f32; 256] {
    let mut all = [0.0; 256];
    for (g, out) in all.chunks_exact_mut(N).enumerate() {
        out.copy_from_slice(&error_weights::<N>(importance.map(|all| &all[g * N..(g + 1) * N])));
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
    let SubBlocks { d, dmin, scales, mins } = affine::<16>(x, &w, 3.0, 15.0);
    let (d, dmin) = (put_half(out, 80, d), put_half(out, 82, dmin));
    for (s, x) in x.chunks_exact(16).enumerate() {
        out[s] = scales[s] as u8 | (mins[s] as u8) << 4;
        let (inverse, min) = (inverse(d * scales[s]), dmin * mins[s]);
        for (i, x) in x.iter().enumerate() {
            put_two_bits(&mut out[16..80], 16 * s + i, nearest((x + min) * inverse, 0.0, 3.0) as u8);
        }
    }
}

/// Q3_K with `levels` 4 and `top` 32, Q6_K with 32 and 128: see [`symmetric`].
#[inline(always)]
pub(super) fn q3_or_q6(x: &[f32], importance: Option<&[f32]>, out: &mut [u8], levels: f32, top: f32) {
    let w = all_weights::<16>(importance);
    let SubBlocks { d, scales, .. } = symmetric(x, &w, levels, top);
    if levels == 4.0 { put_q3(x, d, &scales, out) } else { put_q6(x, d, &scales, out) }
}

#[inline(always)]
fn put_q3(x: &[f32], d: f32, scales: &[f32; 16], out: &mut [u8]) {
    let d = put_half(out, 108, d);
    for (s, x) in x.chunks_exact(16).enumerate() {
        let six = (scales[s] + 32.0) as u8;
        out[96 + s % 8] |= (six & 15) << (s / 8 * 4);
        out[104 + s % 4] |= (six >> 4) << (s / 4 * 2);
        let inverse = inverse(d * scales[s]);
        for (i, x) in (16 * s..).zip(x) {
            let q = (nearest(x * inverse, -4.0, 3.0) + 4.0) as u8;
            put_two_bits(&mut out[32..96], i, q);
            out[i % 32] |= (q >> 2) << (i / 32);
        }
    }
}

#[inline(always)]
fn put_q6(x: &[f32], d: f32, scales: &[f32; 16], out: &mut [u8]) {
    let d = put_half(out, 208, d);
    for (s, x) in x.chunks_exact(16).enumerate() {
        out[192 + s] = scales[s] as i8 as u8;
        let inverse = inverse(d * scales[s]);
        let (half, quarter) = (s / 8, s % 8 / 2);
        for (i, x) in (16 * s..).zip(x) {
            let q = (nearest(x * inverse, -32.0, 31.0) + 32.0) as u8;
            out[half * 64 + i % 64] |= (q & 15) << (quarter / 2 * 4);
            out[128 + half * 32 + i % 32] |= (q >> 4) << (quarter * 2);
        }
    }
}

#[inline(always)]
pub(super) fn q4_or_q5(x: &[f32], importance: Option<&[f32]>, out: &mut [u8], levels: f32) {
    let w = all_weights::<32>(importance);
    let SubBlocks { d, dmin, scales, mins } = affine::<32>(x, &w, levels, 63.0);
    let (d, dmin) = (put_half(out, 0, d), put_half(out, 2, dmin));
    let [scale, min] = [scales, mins].map(|integers| integers.map(|integer| integer as u8));
    for s in 0..4 {
        let six = |a: u8, b: u8| a | (b >> 4) << 6;
        out[4 + s] = six(scale[s], scale[4 + s]);
        out[8 + s] = six(min[s], min[4 + s]);
        out[12 + s] = scale[4 + s] & 15 | min[4 + s] << 4;
    }
    // Q5_K has a plane of fifth bits before the nibbles.
    let (bits, nibbles) = out[16..].split_at_mut(if levels == 31.0 { 32 } else { 0 });
    for (s, x) in x.chunks_exact(32).enumerate() {
        let (inverse, min) = (inverse(d * scales[s]), dmin * mins[s]);
        for (i, x) in x.iter().enumerate() {
            let q = nearest((x + min) * inverse, 0.0, levels) as u8;
            nibbles[s / 2 * 32 + i] |= (q & 15) << (s % 2 * 4);
            if let Some(bits) = bits.get_mut(i) {
                *bits |= (q >> 4) << s;
            }
        }
    }
}

#[inline(always)]
pub(super) fn iq4_xs(x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    let w = all_weights::<32>(importance);
    let SubBlocks { d, scales, .. } = without_mins::<32>(x, &w, 32.0, fit_iq4, iq4_level);
    let d = put_half(out, 0, d);
    for (s, x) in x.chunks_exact(32).enumerate() {
        let six = (scales[s] + 32.0) as u8;
        out[2 + s / 4] |= (six >> 4) << (s % 4 * 2);
        out[4 + s / 2] |= (six & 15) << (s % 2 * 4);
        let inverse = inverse(d * scales[s]);
        for (i, x) in x.iter().enumerate() {
            out[8 + 16 * s + i % 16] |= iq4_index(x * inverse) << (i / 16 * 4);
        }
    }
}
