//! The codes and the scale of one group.

use half::f16;

use super::codebook::{CodeFormat, Levels};
use super::side::Side;

/// The longest scale group.
pub(super) const GROUP: usize = 128;

/// The sum of `term(i)` over a multiple of 16 elements, in 16 partial sums: vectorizes, and has one order on every ISA.
#[inline(always)]
fn sum(len: usize, term: impl Fn(usize) -> f64) -> f64 {
    let mut partials = [0.0; 16];
    for i in (0..len).step_by(16) {
        for (s, partial) in partials.iter_mut().enumerate() {
            *partial += term(i + s);
        }
    }
    partials.iter().sum()
}

/// `x` as `f16`, clamped to its finite range.
#[inline(always)]
pub(super) fn half(x: f32) -> f16 {
    f16::from_f32(x.clamp(-65504.0, 65504.0))
}

/// Chooses the codes of a group of finite rotated values, a multiple of 16 and at most [`GROUP`],
/// and returns its scale; zero for all zeros.
#[inline(always)]
pub(super) fn quantize(format: CodeFormat, side: Side, x: &[f32], codes: &mut [u8]) -> f16 {
    let Some(book) = format.codebook() else { return integers(format, x, codes) };
    let norm = sum(x.len(), |i| f64::from(x[i]) * f64::from(x[i])).sqrt();
    // The inverse of a subnormal norm could be infinite.
    let normal = norm >= f64::from(f32::MIN_POSITIVE);
    let to_levels = if normal { (f64::from(book.spread) * (x.len() as f64).sqrt() / norm) as f32 } else { 0.0 };

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
    if !normal {
        return f16::ZERO;
    }
    let squares = sum(x.len(), |i| f64::from(levels[i]) * f64::from(levels[i]));
    let least_squares = side == Side::Values && matches!(book.levels, Levels::Integers(_));
    half(match least_squares {
        true => sum(x.len(), |i| f64::from(x[i]) * f64::from(levels[i])) / squares,
        // Preserves the norm, so that scores are not biased towards zero.
        false => norm / squares.sqrt(),
    } as f32)
}

/// Rounding to 4- and 8-bit integers, as ggml's `q4_0` and `q8_0`.
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

/// A value that cannot be quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NonFinite {
    /// The row of the first infinite or NaN value.
    pub row: usize,
    /// Its channel in the row.
    pub channel: usize,
}

impl NonFinite {
    pub(super) fn check(rows: &[f32], head_dim: usize) -> Result<(), Self> {
        // Vectorizes; the search runs only if it fails.
        if rows.iter().all(|x| x.is_finite()) {
            return Ok(());
        }
        let at = rows.iter().position(|x| !x.is_finite()).unwrap_or(0);
        Err(Self { row: at / head_dim, channel: at % head_dim })
    }
}

impl std::fmt::Display for NonFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "channel {} of row {} is infinite or NaN and cannot be quantized", self.channel, self.row)
    }
}

impl std::error::Error for NonFinite {}
