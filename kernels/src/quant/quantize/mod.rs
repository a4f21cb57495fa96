//! Quantization to the GGUF formats, for weights that come in floating point.
//!
//! Per group of weights that share a scale, candidates around the range's own scale are tried; each is followed by the least
//! squares fit of scale (and minimum) to the integers that it gives, and the fit with the smallest weighted error wins.
//! Where the scales of a block are themselves rounded, their neighbours are tried too, the block's own scale is fitted to
//! what was chosen, and the choice is made once more.
//!
//! What the error is weighted with is the importance of the inputs where it is known, and nothing else: the expected
//! square of what a row's error does to its product. Without it, all errors count the same.

mod blocks_256;
mod blocks_32;
mod fit;

use super::WeightType;
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
    isa.run(QuantizeRow { weight_type, x, importance: None, out });
}

/// As [`quantize_row`], with errors weighted by `importance`, one number that is not negative for each element of `x`: the
/// mean square of the input that the element meets.
///
/// # Panics
/// As [`quantize_row`], or if `importance` has another length than `x`.
pub fn quantize_row_by_importance(isa: Isa, weight_type: WeightType, x: &[f32], importance: &[f32], out: &mut [u8]) {
    assert_eq!(Some(out.len()), weight_type.row_bytes(x.len()), "quantize: not a row of this length");
    assert_eq!(x.len(), importance.len(), "quantize: not an importance for each element");
    isa.run(QuantizeRow { weight_type, x, importance: Some(importance), out });
}

struct QuantizeRow<'a> {
    weight_type: WeightType,
    x: &'a [f32],
    importance: Option<&'a [f32]>,
    out: &'a mut [u8],
}

/// Plain Rust, compiled once for each ISA's registers; nothing is contracted or reordered, so the bytes are the same.
impl Op for QuantizeRow<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, _: L) {
        let Self { weight_type, x, importance, out } = self;
        let len = weight_type.block_len();
        for (i, (x, out)) in x.chunks_exact(len).zip(out.chunks_exact_mut(weight_type.block_bytes())).enumerate() {
            out.fill(0);
            let importance = importance.map(|all| &all[i * len..(i + 1) * len]);
            match weight_type {
                WeightType::Q4_0 => blocks_32::symmetric(x, importance, out, 8.0),
                WeightType::Q5_0 => blocks_32::symmetric(x, importance, out, 16.0),
                WeightType::Q4_1 => blocks_32::affine(x, importance, out, 15.0),
                WeightType::Q5_1 => blocks_32::affine(x, importance, out, 31.0),
                WeightType::Q8_0 => blocks_32::q8_0(x, out),
                WeightType::IQ4_NL => blocks_32::iq4_nl(x, importance, out),
                WeightType::Q2_K => blocks_256::q2(x, importance, out),
                WeightType::Q3_K => blocks_256::q3(x, importance, out),
                WeightType::Q4_K => blocks_256::q4_or_q5(x, importance, out, 15.0),
                WeightType::Q5_K => blocks_256::q4_or_q5(x, importance, out, 31.0),
                WeightType::Q6_K => blocks_256::q6(x, importance, out),
            }
        }
    }
}

/// What the squared errors of a group's elements count for: their importance where it is known, all the same where not.
#[inline(always)]
fn weights<const N: usize>(importance: Option<&[f32]>) -> [f32; N] {
    let mut weights = [1.0; N];
    // A group that never meets an input has to be something all the same.
    if let Some(importance) = importance.filter(|all| all.iter().any(|weight| *weight > 0.0)) {
        weights.copy_from_slice(importance);
    }
    weights
}

/// Stores an `f16` and returns what it reads back as.
#[inline(always)]
fn put_half(out: &mut [u8], at: usize, value: f32) -> f32 {
    let half = f16::from_f32(value);
    out[at..at + 2].copy_from_slice(&half.to_le_bytes());
    half.to_f32()
}
