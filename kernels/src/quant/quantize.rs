//! Quantization to the GGUF formats, for weights that come in floating point.
//!
//! Per group of weights that share a scale, candidates around the range's own scale are tried; each is followed by the least
//! squares fit of scale (and minimum) to the integers that it gives, and the fit with the smallest weighted error wins.
//! Then the block's scales are rounded to their bits and the integers are chosen again for the scales as stored. The
//! candidates and weights follow llama.cpp's quantizer without an importance matrix; where that one takes the range as
//! it is (Q4_0 to Q5_1), this one searches. Scalar and deterministic.

use super::WeightType;
use super::block::IQ4_NL_LEVELS;
use half::f16;

/// Quantizes one row.
///
/// * `out`: `weight_type.row_bytes(x.len())` bytes.
///
/// # Panics
/// If `x` is not whole blocks or `out` has another length.
pub fn quantize_row(weight_type: WeightType, x: &[f32], out: &mut [u8]) {
    assert_eq!(Some(out.len()), weight_type.row_bytes(x.len()), "quantize: not a row of this length");
    let blocks = x.chunks_exact(weight_type.block_len());
    for (x, out) in blocks.zip(out.chunks_exact_mut(weight_type.block_bytes())) {
        out.fill(0);
        match weight_type {
            WeightType::Q4_0 => symmetric_32(x, out, 8),
            WeightType::Q5_0 => symmetric_32(x, out, 16),
            WeightType::Q4_1 => affine_32(x, out, 15),
            WeightType::Q5_1 => affine_32(x, out, 31),
            WeightType::Q8_0 => q8_0(x, out),
            WeightType::IQ4_NL => iq4_nl(x, out),
            WeightType::Q2_K => q2(x, out),
            WeightType::Q3_K => q3(x, out),
            WeightType::Q4_K => q4_or_q5(x, out, 15),
            WeightType::Q5_K => q4_or_q5(x, out, 31),
            WeightType::Q6_K => q6(x, out),
        }
    }
}

/// Stores an `f16` and returns what it reads back as.
fn put_half(out: &mut [u8], at: usize, value: f32) -> f32 {
    let half = f16::from_f32(value);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}

/// The nearest integer to `x / scale` in `low..=high`; zero, or the nearest to it, for scale zero.
fn nearest(x: f32, scale: f32, low: i32, high: i32) -> i32 {
    let ratio = if scale == 0.0 { 0.0 } else { x / scale };
    (ratio.round_ties_even() as i32).clamp(low, high)
}

/// The element of largest magnitude, with its sign.
fn extreme(x: &[f32]) -> f32 {
    x.iter().copied().fold(0.0, |a: f32, x| if x.abs() > a.abs() { x } else { a })
}

/// The sums of a least squares fit of one scale.
#[derive(Clone, Copy, Default)]
struct Fit {
    xq: f32,
    qq: f32,
}

impl Fit {
    fn of(x: &[f32], weight: impl Fn(f32) -> f32, quant: impl Fn(f32) -> f32) -> Self {
        x.iter().fold(Self::default(), |fit, x| {
            let (w, q) = (weight(*x), quant(*x));
            Self { xq: fit.xq + w * x * q, qq: fit.qq + w * q * q }
        })
    }

    /// What the fit takes off the squared error of zeros.
    fn gain(self) -> f32 {
        if self.qq > 0.0 { self.xq * self.xq / self.qq } else { 0.0 }
    }

    fn scale(self) -> f32 {
        if self.qq > 0.0 { self.xq / self.qq } else { 0.0 }
    }
}

/// The scale for integers `-levels..levels`. The extreme element meets `-levels`, so the scale may be negative.
fn fit_symmetric(x: &[f32], levels: i32, weight: impl Fn(f32) -> f32 + Copy) -> f32 {
    let extreme = extreme(x);
    if extreme == 0.0 {
        return 0.0;
    }
    let candidates = (-9..=9).map(|step| {
        let scale = -extreme / (levels as f32 + 0.1 * step as f32);
        Fit::of(x, weight, |x| nearest(x, scale, -levels, levels - 1) as f32)
    });
    best(candidates).scale()
}

fn best(candidates: impl Iterator<Item = Fit>) -> Fit {
    candidates.fold(Fit::default(), |best, fit| if fit.gain() > best.gain() { fit } else { best })
}

/// Where a fit may put the minimum.
#[derive(Clone, Copy, PartialEq)]
enum Minimum {
    Anywhere,
    /// K-quants store minus the minimum, unsigned.
    NotPositive,
}

/// Scale and minimum for integers `0..=levels`.
fn fit_affine(x: &[f32], levels: i32, minimum: Minimum, weight: impl Fn(f32) -> f32) -> (f32, f32) {
    let mut low = x.iter().copied().fold(f32::INFINITY, f32::min);
    let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if minimum == Minimum::NotPositive {
        low = low.min(0.0);
    }
    if high <= low {
        return (0.0, low);
    }
    let (w, wx) = x.iter().fold((0.0, 0.0), |(w, wx), x| (w + weight(*x), wx + weight(*x) * x));
    let error = |scale: f32, low: f32, quant: &dyn Fn(f32) -> f32| -> f32 {
        x.iter().map(|x| weight(*x) * (scale * quant(*x) + low - x).powi(2)).sum()
    };
    let quant = |x: f32, scale: f32| nearest(x - low, scale, 0, levels) as f32;
    let first = (high - low) / levels as f32;
    let mut best = (error(first, low, &|x| quant(x, first)), first, low);
    for step in -10..=10 {
        let scale = (high - low) / (levels as f32 + 0.1 * step as f32);
        let (mut q1, mut q2, mut xq) = (0.0, 0.0, 0.0);
        for x in x {
            let (w, q) = (weight(*x), quant(*x, scale));
            q1 += w * q;
            q2 += w * q * q;
            xq += w * x * q;
        }
        let determinant = w * q2 - q1 * q1;
        if determinant <= 0.0 {
            continue;
        }
        let (mut fitted, mut fitted_low) = ((w * xq - wx * q1) / determinant, (q2 * wx - q1 * xq) / determinant);
        if minimum == Minimum::NotPositive && fitted_low > 0.0 {
            (fitted, fitted_low) = (xq / q2, 0.0);
        }
        let error = error(fitted, fitted_low, &|x| quant(x, scale));
        if error < best.0 {
            best = (error, fitted, fitted_low);
        }
    }
    (best.1, best.2)
}

/// Q4_0 and Q5_0.
fn symmetric_32(x: &[f32], out: &mut [u8], levels: i32) {
    let scale = put_half(out, 0, fit_symmetric(x, levels, |_| 1.0));
    put_nibbles(&mut out[2..], x, |x| (nearest(x, scale, -levels, levels - 1) + levels) as u8);
}

/// Q4_1 and Q5_1.
fn affine_32(x: &[f32], out: &mut [u8], levels: i32) {
    let (scale, low) = fit_affine(x, levels, Minimum::Anywhere, |_| 1.0);
    let (scale, low) = (put_half(out, 0, scale), put_half(out, 2, low));
    put_nibbles(&mut out[4..], x, |x| nearest(x - low, scale, 0, levels) as u8);
}

/// Writes 16 bytes of nibbles; if there is room for 20, the fifth bits come first.
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

fn q8_0(x: &[f32], out: &mut [u8]) {
    // As llama.cpp: the unrounded scale chooses the integers, ties away from zero.
    let scale = extreme(x).abs() / 127.0;
    let inverse = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    put_half(out, 0, scale);
    for (q, x) in out[2..].iter_mut().zip(x) {
        *q = (x * inverse).round() as i8 as u8;
    }
}

fn iq4_nl(x: &[f32], out: &mut [u8]) {
    let extreme = extreme(x);
    let weight = |x: f32| x * x;
    let level = |x: f32, scale: f32| -> usize {
        let x = if scale == 0.0 { 0.0 } else { x / scale };
        // The levels are sorted: the index is the number of midpoints not above `x`.
        IQ4_NL_LEVELS.windows(2).filter(|w| x >= 0.5 * (f32::from(w[0]) + f32::from(w[1]))).count()
    };
    let candidates = (-7..=7).map(|step| {
        let scale = extreme / (f32::from(IQ4_NL_LEVELS[0]) + step as f32);
        Fit::of(x, weight, |x| f32::from(IQ4_NL_LEVELS[level(x, scale)]))
    });
    let scale = put_half(out, 0, best(candidates).scale());
    put_nibbles(&mut out[2..], x, |x| level(x, scale) as u8);
}

/// Rounds scales to integers of at most `top`, as parts of the largest. Returns what the integers are multiplied by.
fn round_scales(scales: &[f32], top: i32, rounded: &mut [u8]) -> f32 {
    let unit = scales.iter().copied().fold(0.0, f32::max) / top as f32;
    for (rounded, scale) in rounded.iter_mut().zip(scales) {
        *rounded = nearest(*scale, unit, 0, top) as u8;
    }
    unit
}

/// As [`round_scales`] for scales of either sign: the extreme one becomes `-top`.
fn round_signed_scales(scales: &[f32; 16], top: i32) -> (f32, [i32; 16]) {
    let unit = -extreme(scales) / top as f32;
    (unit, scales.map(|scale| nearest(scale, unit, -top, top - 1)))
}

/// Writes planes of 2 bits: weights `i`, `i + 32`, `i + 64` and `i + 96` share a byte.
fn put_two_bits(out: &mut [u8], i: usize, q: i32) {
    out[i / 128 * 32 + i % 32] |= ((q & 3) as u8) << (i % 128 / 32 * 2);
}

fn q2(x: &[f32], out: &mut [u8]) {
    let (mut scales, mut minima) = ([0.0; 16], [0.0; 16]);
    for (s, x) in x.chunks_exact(16).enumerate() {
        let (scale, low) = fit_affine(x, 3, Minimum::NotPositive, f32::abs);
        (scales[s], minima[s]) = (scale, -low);
    }
    let (mut rounded, mut rounded_minima) = ([0; 16], [0; 16]);
    let unit = round_scales(&scales, 15, &mut rounded);
    let minimum_unit = round_scales(&minima, 15, &mut rounded_minima);
    let d = put_half(out, 80, unit);
    let dmin = put_half(out, 82, minimum_unit);
    for s in 0..16 {
        out[s] = rounded[s] | rounded_minima[s] << 4;
    }
    for (i, x) in x.iter().enumerate() {
        let s = i / 16;
        let (scale, minimum) = (d * f32::from(rounded[s]), dmin * f32::from(rounded_minima[s]));
        put_two_bits(&mut out[16..80], i, nearest(x + minimum, scale, 0, 3));
    }
}

fn q3(x: &[f32], out: &mut [u8]) {
    let mut scales = [0.0; 16];
    for (scale, x) in scales.iter_mut().zip(x.chunks_exact(16)) {
        *scale = fit_symmetric(x, 4, |x| x * x);
    }
    let (unit, rounded) = round_signed_scales(&scales, 32);
    let d = put_half(out, 108, unit);
    for (s, scale) in rounded.into_iter().enumerate() {
        let six = (scale + 32) as u8;
        out[96 + s % 8] |= (six & 15) << (s / 8 * 4);
        out[104 + s % 4] |= (six >> 4) << (s / 4 * 2);
    }
    for (i, x) in x.iter().enumerate() {
        let q = nearest(*x, d * rounded[i / 16] as f32, -4, 3) + 4;
        put_two_bits(&mut out[32..96], i, q);
        out[i % 32] |= ((q >> 2) as u8) << (i / 32);
    }
}

fn q4_or_q5(x: &[f32], out: &mut [u8], levels: i32) {
    let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
    for (s, x) in x.chunks_exact(32).enumerate() {
        let root_mean_square = (x.iter().map(|x| x * x).sum::<f32>() / 32.0).sqrt();
        let (scale, low) = fit_affine(x, levels, Minimum::NotPositive, |x| root_mean_square + x.abs());
        (scales[s], minima[s]) = (scale, -low);
    }
    let (mut rounded, mut rounded_minima) = ([0; 8], [0; 8]);
    let unit = round_scales(&scales, 63, &mut rounded);
    let minimum_unit = round_scales(&minima, 63, &mut rounded_minima);
    let d = put_half(out, 0, unit);
    let dmin = put_half(out, 2, minimum_unit);
    for s in 0..4 {
        let six = |a: u8, b: u8| a | (b >> 4) << 6;
        out[4 + s] = six(rounded[s], rounded[4 + s]);
        out[8 + s] = six(rounded_minima[s], rounded_minima[4 + s]);
        out[12 + s] = rounded[4 + s] & 15 | rounded_minima[4 + s] << 4;
    }
    // Q5_K has a plane of fifth bits before the nibbles.
    let (bits, nibbles) = out[16..].split_at_mut(if levels == 31 { 32 } else { 0 });
    for (i, x) in x.iter().enumerate() {
        let s = i / 32;
        let (scale, minimum) = (d * f32::from(rounded[s]), dmin * f32::from(rounded_minima[s]));
        let q = nearest(x + minimum, scale, 0, levels) as u8;
        nibbles[i / 64 * 32 + i % 32] |= (q & 15) << (i % 64 / 32 * 4);
        if let Some(bits) = bits.get_mut(i % 32) {
            *bits |= (q >> 4) << s;
        }
    }
}

fn q6(x: &[f32], out: &mut [u8]) {
    let mut scales = [0.0; 16];
    for (scale, x) in scales.iter_mut().zip(x.chunks_exact(16)) {
        *scale = fit_symmetric(x, 32, |x| x * x);
    }
    let (unit, rounded) = round_signed_scales(&scales, 128);
    let d = put_half(out, 208, unit);
    for (s, scale) in rounded.into_iter().enumerate() {
        out[192 + s] = scale as i8 as u8;
    }
    for (i, x) in x.iter().enumerate() {
        let q = (nearest(*x, d * rounded[i / 16] as f32, -32, 31) + 32) as u8;
        let (half, quarter) = (i / 128, i % 128 / 32);
        out[half * 64 + i % 64] |= (q & 15) << (quarter / 2 * 4);
        out[128 + half * 32 + i % 32] |= (q >> 4) << (quarter * 2);
    }
}
