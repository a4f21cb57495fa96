//! Quantization to the GGUF formats, for weights that come in floating point.
//!
//! Per group of weights that share a scale, candidates around the range's own scale are tried; each is followed by the least
//! squares fit of scale (and minimum) to the integers that it gives, and the fit with the smallest weighted error wins.
//! Then the block's scales are rounded to their bits and the integers are chosen again for the scales as stored. The
//! candidates and weights follow llama.cpp's quantizer without an importance matrix; where that one takes the range as
//! it is (Q4_0 to Q5_1), this one searches.

use super::WeightType;
use super::block::IQ4_NL_LEVELS;
use crate::Isa;
use crate::lanes::{Lanes, Op};
use half::f16;

/// Quantizes one row; every ISA gives the same bytes.
///
/// * `out`: `weight_type.row_bytes(x.len())` bytes.
///
/// # Panics
/// If `x` is not whole blocks or `out` has another length.
pub fn quantize_row(isa: Isa, weight_type: WeightType, x: &[f32], out: &mut [u8]) {
    assert_eq!(Some(out.len()), weight_type.row_bytes(x.len()), "quantize: not a row of this length");
    isa.run(QuantizeRow { weight_type, x, out });
}

struct QuantizeRow<'a> {
    weight_type: WeightType,
    x: &'a [f32],
    out: &'a mut [u8],
}

/// Plain Rust, compiled once for each ISA's registers; nothing is contracted or reordered, so the bytes are the same.
impl Op for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, _: L) {
        let Self { weight_type, x, out } = self;
        for (x, out) in x.chunks_exact(weight_type.block_len()).zip(out.chunks_exact_mut(weight_type.block_bytes())) {
            out.fill(0);
            match weight_type {
                WeightType::Q4_0 => symmetric_32(x, out, 8.0),
                WeightType::Q5_0 => symmetric_32(x, out, 16.0),
                WeightType::Q4_1 => affine_32(x, out, 15.0),
                WeightType::Q5_1 => affine_32(x, out, 31.0),
                WeightType::Q8_0 => q8_0(x, out),
                WeightType::IQ4_NL => iq4_nl(x, out),
                WeightType::Q2_K => q2(x, out),
                WeightType::Q3_K => q3(x, out),
                WeightType::Q4_K => q4_or_q5(x, out, 15.0),
                WeightType::Q5_K => q4_or_q5(x, out, 31.0),
                WeightType::Q6_K => q6(x, out),
            }
        }
    }
}

/// Stores an `f16` and returns what it reads back as.
#[inline(always)]
fn put_half(out: &mut [u8], at: usize, value: f32) -> f32 {
    let half = f16::from_f32(value);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// One over a scale, zero for scale zero.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// The nearest integer to `x` in `low..=high`, ties to even. In floating point and by adding 1.5 * 2^23, so that loops over
/// it vectorize on every processor.
#[inline(always)]
fn nearest(x: f32, low: f32, high: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    let x = if x > low { x } else { low };
    let x = if x < high { x } else { high };
    (x + SHIFT) - SHIFT
}

/// Sums of `term(x, w)` over whole eights of elements, in eight strands: an order that vectorizes.
#[inline(always)]
fn sums<const K: usize>(x: &[f32], w: &[f32], term: impl Fn(f32, f32) -> [f32; K]) -> [f32; K] {
    let mut strands = [[0.0f32; 8]; K];
    for (x, w) in x.as_chunks::<8>().0.iter().zip(w.as_chunks::<8>().0) {
        for i in 0..8 {
            let terms = term(x[i], w[i]);
            for (strands, term) in strands.iter_mut().zip(terms) {
                strands[i] += term;
            }
        }
    }
    strands.map(|strands| strands.iter().sum())
}

/// The element of largest magnitude, with its sign.
#[inline(always)]
fn extreme(x: &[f32]) -> f32 {
    x.iter().copied().fold(0.0, |a: f32, x| if x.abs() > a.abs() { x } else { a })
}

/// The scale whose multiples of `quant(x / scale)` are nearest to `x`, where the candidates choose the integers and least
/// squares the scale.
#[inline(always)]
fn fit(x: &[f32], w: &[f32], candidates: impl Iterator<Item = f32>, quant: impl Fn(f32) -> f32) -> f32 {
    let (mut best, mut scale) = (0.0, 0.0);
    for candidate in candidates {
        let inverse = inverse(candidate);
        let [xq, qq] = sums(x, w, |x, w| {
            let q = quant(x * inverse);
            [w * x * q, w * q * q]
        });
        // What the fit takes off the squared error of zeros.
        if qq > 0.0 && xq * xq > best * qq {
            (best, scale) = (xq * xq / qq, xq / qq);
        }
    }
    scale
}

/// The scale for integers `-levels..levels`. The extreme element meets `-levels`, so the scale may be negative.
#[inline(always)]
fn fit_symmetric(x: &[f32], w: &[f32], levels: f32) -> f32 {
    let extreme = extreme(x);
    let candidates = (-9..=9).map(|step| -extreme / (levels + 0.1 * step as f32));
    fit(x, w, candidates, |x| nearest(x, -levels, levels - 1.0))
}

/// Where a fit may put the minimum.
#[derive(Clone, Copy, PartialEq)]
enum Minimum {
    Anywhere,
    /// K-quants store minus the minimum, unsigned.
    NotPositive,
}

/// Scale and minimum for integers `0..=levels`.
#[inline(always)]
fn fit_affine(x: &[f32], w: &[f32], levels: f32, minimum: Minimum) -> (f32, f32) {
    let mut low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if minimum == Minimum::NotPositive {
        low = low.min(0.0);
    }
    if high <= low {
        return (0.0, low);
    }
    let [total, wx] = sums(x, w, |x, w| [w, w * x]);
    // The squared error is that of zeros minus this.
    let gain = |scale: f32, offset: f32, [q1, q2, xq]: [f32; 3]| -> f64 {
        let [s, m, q1, q2, xq, total, wx] = [scale, offset, q1, q2, xq, total, wx].map(f64::from);
        2.0 * (s * xq + m * wx) - s * s * q2 - 2.0 * s * m * q1 - m * m * total
    };
    let quantized = |inverse: f32| {
        sums(x, w, |x, w| {
            let q = nearest((x - low) * inverse, 0.0, levels);
            let wq = w * q;
            [wq, wq * q, wq * x]
        })
    };
    // The range itself stays where there is nothing to fit: equal weights have no determinant.
    let range = (high - low) / levels;
    let mut best = (gain(range, low, quantized(1.0 / range)), range, low);
    for step in -10..=10 {
        let fitted = quantized((levels + 0.1 * step as f32) / (high - low));
        let [q1, q2, xq] = fitted;
        let determinant = total * q2 - q1 * q1;
        if determinant <= 0.0 {
            continue;
        }
        let (mut scale, mut offset) = ((total * xq - wx * q1) / determinant, (q2 * wx - q1 * xq) / determinant);
        if minimum == Minimum::NotPositive && offset > 0.0 {
            (scale, offset) = (xq / q2, 0.0);
        }
        let gain = gain(scale, offset, fitted);
        if gain > best.0 {
            best = (gain, scale, offset);
        }
    }
    (best.1, best.2)
}

/// Q4_0 and Q5_0.
#[inline(always)]
fn symmetric_32(x: &[f32], out: &mut [u8], levels: f32) {
    let inverse = inverse(put_half(out, 0, fit_symmetric(x, &[1.0; 32], levels)));
    put_nibbles(&mut out[2..], x, |x| (nearest(x * inverse, -levels, levels - 1.0) + levels) as u8);
}

/// Q4_1 and Q5_1.
#[inline(always)]
fn affine_32(x: &[f32], out: &mut [u8], levels: f32) {
    let (scale, low) = fit_affine(x, &[1.0; 32], levels, Minimum::Anywhere);
    let (inverse, low) = (inverse(put_half(out, 0, scale)), put_half(out, 2, low));
    put_nibbles(&mut out[4..], x, |x| nearest((x - low) * inverse, 0.0, levels) as u8);
}

/// Writes 16 bytes of nibbles; if there is room for 20, the fifth bits come first.
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
fn q8_0(x: &[f32], out: &mut [u8]) {
    // As llama.cpp: the unrounded scale chooses the integers, ties away from zero.
    let scale = extreme(x).abs() / 127.0;
    let inverse = inverse(scale);
    put_half(out, 0, scale);
    for (q, x) in out[2..].iter_mut().zip(x) {
        *q = (x * inverse).round() as i8 as u8;
    }
}

/// How many of the midpoints between IQ4_NL's sorted levels are not above `x`: the index of the nearest level.
#[inline(always)]
fn iq4_nl_index(x: f32) -> u8 {
    IQ4_NL_LEVELS.windows(2).map(|w| u8::from(x >= 0.5 * (f32::from(w[0]) + f32::from(w[1])))).sum()
}

/// The nearest level itself, by adding up the steps: that vectorizes, looking it up does not.
#[inline(always)]
fn iq4_nl_level(x: f32) -> f32 {
    let mut level = f32::from(IQ4_NL_LEVELS[0]);
    for w in IQ4_NL_LEVELS.windows(2) {
        let (below, above) = (f32::from(w[0]), f32::from(w[1]));
        level += if x >= 0.5 * (below + above) { above - below } else { 0.0 };
    }
    level
}

#[inline(always)]
fn iq4_nl(x: &[f32], out: &mut [u8]) {
    let extreme = extreme(x);
    let weights: [f32; 32] = std::array::from_fn(|i| x[i] * x[i]);
    let candidates = (-7..=7).map(|step| extreme / (f32::from(IQ4_NL_LEVELS[0]) + step as f32));
    let scale = fit(x, &weights, candidates, iq4_nl_level);
    let inverse = inverse(put_half(out, 0, scale));
    put_nibbles(&mut out[2..], x, |x| iq4_nl_index(x * inverse));
}

/// Rounds scales to integers of at most `top`, as parts of the largest. Returns what the integers are multiplied by.
#[inline(always)]
fn round_scales(scales: &[f32], top: f32, rounded: &mut [u8]) -> f32 {
    let unit = scales.iter().copied().fold(0.0, f32::max) / top;
    for (rounded, scale) in rounded.iter_mut().zip(scales) {
        *rounded = nearest(scale * inverse(unit), 0.0, top) as u8;
    }
    unit
}

/// As [`round_scales`] for scales of either sign: the extreme one becomes `-top`.
#[inline(always)]
fn round_signed_scales(scales: &[f32; 16], top: f32) -> (f32, [i8; 16]) {
    let unit = -extreme(scales) / top;
    (unit, scales.map(|scale| nearest(scale * inverse(unit), -top, top - 1.0) as i8))
}

/// Writes planes of 2 bits: weights `i`, `i + 32`, `i + 64` and `i + 96` share a byte.
#[inline(always)]
fn put_two_bits(out: &mut [u8], i: usize, q: u8) {
    out[i / 128 * 32 + i % 32] |= (q & 3) << (i % 128 / 32 * 2);
}

#[inline(always)]
fn q2(x: &[f32], out: &mut [u8]) {
    let (mut scales, mut minima) = ([0.0; 16], [0.0; 16]);
    for (s, x) in x.chunks_exact(16).enumerate() {
        let weights: [f32; 16] = std::array::from_fn(|i| x[i].abs());
        let (scale, low) = fit_affine(x, &weights, 3.0, Minimum::NotPositive);
        (scales[s], minima[s]) = (scale, -low);
    }
    let (mut rounded, mut rounded_minima) = ([0; 16], [0; 16]);
    let unit = round_scales(&scales, 15.0, &mut rounded);
    let minimum_unit = round_scales(&minima, 15.0, &mut rounded_minima);
    let d = put_half(out, 80, unit);
    let dmin = put_half(out, 82, minimum_unit);
    for s in 0..16 {
        out[s] = rounded[s] | rounded_minima[s] << 4;
    }
    for (s, x) in x.chunks_exact(16).enumerate() {
        let (inverse, minimum) = (inverse(d * f32::from(rounded[s])), dmin * f32::from(rounded_minima[s]));
        for (i, x) in x.iter().enumerate() {
            put_two_bits(&mut out[16..80], 16 * s + i, nearest((x + minimum) * inverse, 0.0, 3.0) as u8);
        }
    }
}

#[inline(always)]
fn squares(x: &[f32]) -> [f32; 16] {
    std::array::from_fn(|i| x[i] * x[i])
}

#[inline(always)]
fn q3(x: &[f32], out: &mut [u8]) {
    let mut scales = [0.0; 16];
    for (scale, x) in scales.iter_mut().zip(x.chunks_exact(16)) {
        *scale = fit_symmetric(x, &squares(x), 4.0);
    }
    let (unit, rounded) = round_signed_scales(&scales, 32.0);
    let d = put_half(out, 108, unit);
    for (s, scale) in rounded.into_iter().enumerate() {
        let six = (scale + 32) as u8;
        out[96 + s % 8] |= (six & 15) << (s / 8 * 4);
        out[104 + s % 4] |= (six >> 4) << (s / 4 * 2);
    }
    for (s, x) in x.chunks_exact(16).enumerate() {
        let inverse = inverse(d * f32::from(rounded[s]));
        for (i, x) in (16 * s..).zip(x) {
            let q = (nearest(x * inverse, -4.0, 3.0) + 4.0) as u8;
            put_two_bits(&mut out[32..96], i, q);
            out[i % 32] |= (q >> 2) << (i / 32);
        }
    }
}

#[inline(always)]
fn q4_or_q5(x: &[f32], out: &mut [u8], levels: f32) {
    let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
    for (s, x) in x.chunks_exact(32).enumerate() {
        let root_mean_square = (x.iter().map(|x| x * x).sum::<f32>() / 32.0).sqrt();
        let weights: [f32; 32] = std::array::from_fn(|i| root_mean_square + x[i].abs());
        let (scale, low) = fit_affine(x, &weights, levels, Minimum::NotPositive);
        (scales[s], minima[s]) = (scale, -low);
    }
    let (mut rounded, mut rounded_minima) = ([0; 8], [0; 8]);
    let unit = round_scales(&scales, 63.0, &mut rounded);
    let minimum_unit = round_scales(&minima, 63.0, &mut rounded_minima);
    let d = put_half(out, 0, unit);
    let dmin = put_half(out, 2, minimum_unit);
    for s in 0..4 {
        let six = |a: u8, b: u8| a | (b >> 4) << 6;
        out[4 + s] = six(rounded[s], rounded[4 + s]);
        out[8 + s] = six(rounded_minima[s], rounded_minima[4 + s]);
        out[12 + s] = rounded[4 + s] & 15 | rounded_minima[4 + s] << 4;
    }
    // Q5_K has a plane of fifth bits before the nibbles.
    let (bits, nibbles) = out[16..].split_at_mut(if levels == 31.0 { 32 } else { 0 });
    for (s, x) in x.chunks_exact(32).enumerate() {
        let (inverse, minimum) = (inverse(d * f32::from(rounded[s])), dmin * f32::from(rounded_minima[s]));
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
fn q6(x: &[f32], out: &mut [u8]) {
    let mut scales = [0.0; 16];
    for (scale, x) in scales.iter_mut().zip(x.chunks_exact(16)) {
        *scale = fit_symmetric(x, &squares(x), 32.0);
    }
    let (unit, rounded) = round_signed_scales(&scales, 128.0);
    let d = put_half(out, 208, unit);
    for (s, scale) in rounded.into_iter().enumerate() {
        out[192 + s] = scale as u8;
    }
    for (s, x) in x.chunks_exact(16).enumerate() {
        let inverse = inverse(d * f32::from(rounded[s]));
        let (half, quarter) = (s / 8, s % 8 / 2);
        for (i, x) in (16 * s..).zip(x) {
            let q = (nearest(x * inverse, -32.0, 31.0) + 32.0) as u8;
            out[half * 64 + i % 64] |= (q & 15) << (quarter / 2 * 4);
            out[128 + half * 32 + i % 32] |= (q >> 4) << (quarter * 2);
        }
    }
}
