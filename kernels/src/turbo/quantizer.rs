//! Choosing codes and scale of one group: for pages and for interchange blocks alike.

use super::Side;
use super::format::{CodeFormat, Levels};
use half::f16;

/// The longest scale group.
pub(super) const GROUP: usize = 128;

/// Sums of `term(i)` over whole sixteens, in sixteen strands: an order that vectorizes and is the same on every ISA.
#[inline(always)]
fn sum(len: usize, term: impl Fn(usize) -> f64) -> f64 {
    let mut strands = [0.0; 16];
    for i in (0..len).step_by(16) {
        for (s, strand) in strands.iter_mut().enumerate() {
            *strand += term(i + s);
        }
    }
    strands.iter().sum()
}

/// `f16` without infinities.
#[inline(always)]
pub(super) fn half(x: f32) -> f16 {
    f16::from_f32(x.clamp(-65504.0, 65504.0))
}

/// Codes a group of finite rotated values, a multiple of 16 and at most [`GROUP`] of them, and returns its scale. All
/// zeros give scale zero.
#[inline(always)]
pub(super) fn quantize(format: CodeFormat, side: Side, x: &[f32], codes: &mut [u8]) -> f16 {
    let Some(book) = format.codebook() else { return integers(format, x, codes) };
    let norm = sum(x.len(), |i| f64::from(x[i]) * f64::from(x[i])).sqrt();
    // Below the smallest normal number, the inverse could be infinite.
    let some = norm >= f64::from(f32::MIN_POSITIVE);
    let to_levels = if some { (f64::from(book.spread) * (x.len() as f64).sqrt() / norm) as f32 } else { 0.0 };

    let mut scaled = [0.0; GROUP];
    for (scaled, x) in scaled.iter_mut().zip(x) {
        *scaled = x * to_levels;
    }
    let mut counts = [0i32; GROUP];
    for boundary in book.boundaries {
        for (count, x) in counts[..x.len()].iter_mut().zip(&scaled) {
            *count += i32::from(*boundary <= *x);
        }
    }
    let mut levels = [0.0; GROUP];
    for ((code, level), count) in codes.iter_mut().zip(&mut levels).zip(&counts) {
        *code = *count as u8;
        *level = match book.levels {
            Levels::Integers(levels) => f32::from(levels[*count as usize]) * format.unit(),
            Levels::Centroids(levels) => levels[*count as usize],
        };
    }
    if !some {
        return f16::ZERO;
    }
    let squares = sum(x.len(), |i| f64::from(levels[i]) * f64::from(levels[i]));
    let least_squares = side == Side::Values && matches!(book.levels, Levels::Integers(_));
    half(match least_squares {
        true => sum(x.len(), |i| f64::from(x[i]) * f64::from(levels[i])) / squares,
        // Keeps the norm, so that scores are not shrunk.
        false => norm / squares.sqrt(),
    } as f32)
}

/// ggml's plain rounding to 4 and 8 bits.
#[inline(always)]
fn integers(format: CodeFormat, x: &[f32], codes: &mut [u8]) -> f16 {
    let extreme = x.iter().copied().fold(0.0, |a: f32, x| if x.abs() > a.abs() { x } else { a });
    let four_bits = format.bits() == 4;
    let scale = if four_bits { extreme / -8.0 } else { extreme.abs() / 127.0 };
    let inverse = if scale.abs() >= f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
    for (code, x) in codes.iter_mut().zip(x) {
        *code = if four_bits { (x * inverse + 8.5).min(15.0) as u8 } else { (x * inverse).round() as i8 as u8 };
    }
    half(scale)
}
