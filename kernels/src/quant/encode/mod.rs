//! Quantization of floating-point weights to the GGUF formats.
//!
//! For each sub-block, candidate scales around that of its range choose integers; scale (and min) are fitted to them by
//! least squares, and the fit with the smallest weighted error is taken. Where a block's scales are integers, their
//! neighbours are also tried; then the block's scale is fitted to the chosen integers, and they are chosen once more.
//!
//! Errors are weighted by the importance of the inputs, if it is known: then the weighted error is the expected squared
//! error of the product. Without it, all errors have weight 1.

mod blocks_256;
mod blocks_32;
mod fit;

use crate::isa::Isa;
use crate::quant::weight_type::WeightType;
use crate::simd::float::{Lanes, Op};

/// Quantizes one row; every ISA gives the same bytes.
///
/// * `out`: `weight_type.row_bytes(x.len())` bytes.
///
/// # Panics
/// If the type is not [written](WeightType::is_written), `x` is not whole blocks or `out` has a different length.
pub fn quantize_row(isa: Isa, weight_type: WeightType, x: &[f32], out: &mut [u8]) {
    run(isa, QuantizeRow { weight_type, x, importance: None, out });
}

/// As [`quantize_row`], with errors weighted by `importance`, non-negative, one per element of `x`: the mean square of
/// the input that the element is multiplied by.
///
/// # Panics
/// As [`quantize_row`], or if `importance` and `x` differ in length.
pub fn quantize_row_by_importance(isa: Isa, weight_type: WeightType, x: &[f32], importance: &[f32], out: &mut [u8]) {
    assert_eq!(x.len(), importance.len(), "quantize: x and importance differ in length");
    run(isa, QuantizeRow { weight_type, x, importance: Some(importance), out });
}

fn run(isa: Isa, row: QuantizeRow<'_>) {
    assert!(row.weight_type.is_written(), "quantize: {} is read only", row.weight_type.name());
    assert_eq!(Some(row.out.len()), row.weight_type.row_bytes(row.x.len()), "quantize: wrong length of out");
    isa.run(row);
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
        // Values, not constants: the fits of four and of five bits, and of three and six, are compiled once.
        let five_bits = matches!(weight_type, WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q5_K);
        let (half, top) = if five_bits { (16.0, 31.0) } else { (8.0, 15.0) };
        for (i, (x, out)) in x.chunks_exact(len).zip(out.chunks_exact_mut(weight_type.block_bytes())).enumerate() {
            out.fill(0);
            let importance = importance.map(|all| &all[i * len..(i + 1) * len]);
            match weight_type {
                WeightType::Q4_0 | WeightType::Q5_0 => blocks_32::symmetric(x, importance, out, half),
                WeightType::Q4_1 | WeightType::Q5_1 => blocks_32::affine(x, importance, out, top),
                WeightType::Q8_0 => blocks_32::q8_0(x, out),
                WeightType::IQ4_NL => blocks_32::iq4_nl(x, importance, out),
                WeightType::Q2_K => blocks_256::q2(x, importance, out),
                WeightType::Q3_K | WeightType::Q6_K => {
                    let (levels, top) = if weight_type == WeightType::Q3_K { (4.0, 32.0) } else { (32.0, 128.0) };
                    blocks_256::q3_or_q6(x, importance, out, levels, top);
                }
                WeightType::Q4_K | WeightType::Q5_K => blocks_256::q4_or_q5(x, importance, out, top),
                WeightType::IQ4_XS => blocks_256::iq4_xs(x, importance, out),
                WeightType::MXFP4 => blocks_32::mxfp4(x, importance, out),
                _ => unreachable!("`is_written` excludes it"),
            }
        }
    }
}
