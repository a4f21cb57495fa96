//! Converts tensors between types in chunks of a few megabytes on all threads; no tensor is in memory as a whole.

use foretoken_kernels::Isa;
use foretoken_kernels::quant::{dequantize_row, quantize_row, quantize_row_by_importance};
use rayon::prelude::*;

use super::tensor::{RawTensor, TensorType};
use crate::{Error, Result};

/// Bytes per chunk, in the wider of both types.
const CHUNK_BYTES: usize = 16 << 20;
/// Minimum elements per task.
const MIN_TASK_ELEMENTS: usize = 1 << 14;

/// Importance matrix: weights of squared quantization errors.
#[derive(Clone, Copy)]
pub(super) struct Weighted<'a> {
    /// `(matrices, inputs)` of a stack.
    pub importances: &'a [f32],
    /// Rows of one matrix.
    pub rows: usize,
}

impl<'a> Weighted<'a> {
    /// The importances of a row of `inputs`.
    fn of_row(&self, row: usize, inputs: usize) -> &'a [f32] {
        &self.importances[row / self.rows * inputs..][..inputs]
    }
}

/// Passes the elements of `source`, converted to `to`, to `write` in order.
///
/// # Errors
/// `error` of the problem with the tensor and the remedy, or that of `write`.
pub(super) fn recode(
    source: &RawTensor,
    to: TensorType,
    weighted: Option<Weighted<'_>>,
    error: impl Fn(String) -> Error,
    mut write: impl FnMut(&[u8]) -> Result<()>,
) -> Result<()> {
    let bytes = source.bytes.as_slice();
    let inputs = source.shape.last().copied().unwrap_or(1);
    let rows = source.shape.iter().product::<usize>() / inputs.max(1);
    let unreadable = |what: &str| error(format!("{what}; convert the checkpoint again"));
    let from_row = row_bytes(source.dtype, inputs).ok_or_else(|| unreadable("has a type that cannot be converted"))?;
    let to_row = row_bytes(to, inputs).ok_or_else(|| unreadable("has rows that are not whole blocks of that type"))?;
    if bytes.len() != rows * from_row {
        return Err(unreadable("is not as long as its shape and type imply"));
    }
    let chunk_rows = (CHUNK_BYTES / from_row.max(to_row).max(1)).max(1);
    let task_rows = MIN_TASK_ELEMENTS.div_ceil(inputs.max(1));
    let isa = Isa::best();
    let mut out = Vec::new();
    for start in (0..rows).step_by(chunk_rows) {
        let end = (start + chunk_rows).min(rows);
        let from = &bytes[start * from_row..end * from_row];
        if source.dtype == to {
            write(from)?;
        } else {
            out.resize((end - start) * to_row, 0);
            let tasks = out.par_chunks_mut(task_rows * to_row).zip(from.par_chunks(task_rows * from_row)).enumerate();
            let finite = tasks.map(|(i, (out, from))| {
                let mut floats = vec![0.0; inputs];
                let pairs = from.chunks_exact(from_row).zip(out.chunks_exact_mut(to_row));
                (start + i * task_rows..).zip(pairs).fold(true, |finite, (row, (from, out))| {
                    decode(source.dtype, from, &mut floats);
                    let were_finite = are_finite(&floats);
                    encode(isa, to, &floats, weighted.map(|weighted| weighted.of_row(row, inputs)), out);
                    decode(to, out, &mut floats);
                    finite & were_finite & are_finite(&floats)
                })
            });
            if !finite.reduce(|| true, |a, b| a & b) {
                return Err(error("has values that overflow the new type; use one with more range (bf16, f32)".into()));
            }
            write(&out)?;
        }
        source.bytes.release(start * from_row..end * from_row);
    }
    Ok(())
}

/// Properties of a tensor's values.
pub(crate) struct Survey {
    /// All are finite.
    pub(crate) finite: bool,
    /// All are zero.
    pub(crate) zero: bool,
}

/// Scans all values; `None` if the type is neither floating point nor blocks, or the length does not match the shape.
pub(crate) fn survey(source: &RawTensor) -> Option<Survey> {
    let bytes = source.bytes.as_slice();
    let inputs = source.shape.last().copied().unwrap_or(1);
    let rows = source.shape.iter().product::<usize>() / inputs.max(1);
    let row = row_bytes(source.dtype, inputs).filter(|row| rows * row == bytes.len())?;
    let task_rows = MIN_TASK_ELEMENTS.div_ceil(inputs.max(1));
    let seen = bytes.par_chunks((task_rows * row).max(1)).map(|bytes| {
        let mut floats = vec![0.0; inputs];
        bytes.chunks_exact(row).fold((true, true), |(finite, zero), bytes| {
            decode(source.dtype, bytes, &mut floats);
            (finite & are_finite(&floats), zero & floats.iter().all(|x| *x == 0.0))
        })
    });
    let (finite, zero) = seen.reduce(|| (true, true), |a, b| (a.0 & b.0, a.1 & b.1));
    source.bytes.release_all();
    Some(Survey { finite, zero })
}

/// Bytes of a row, or `None` for integers, unknown types and rows that are not whole blocks.
fn row_bytes(stored: TensorType, inputs: usize) -> Option<usize> {
    match stored {
        TensorType::Float(element) => Some(inputs * element.size()),
        TensorType::Quantized(weight_type) => weight_type.row_bytes(inputs),
        _ => None,
    }
}

fn decode(from: TensorType, bytes: &[u8], out: &mut [f32]) {
    match from {
        TensorType::Float(element) => element.read_to(bytes, out),
        TensorType::Quantized(weight_type) => dequantize_row(weight_type, bytes, out),
        _ => unreachable!("row_bytes has no size for other types"),
    }
}

fn encode(isa: Isa, to: TensorType, x: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    match (to, importance) {
        (TensorType::Float(element), _) => element.write(x, out),
        (TensorType::Quantized(weight_type), None) => quantize_row(isa, weight_type, x, out),
        (TensorType::Quantized(weight_type), Some(importance)) => {
            quantize_row_by_importance(isa, weight_type, x, importance, out);
        }
        _ => unreachable!("row_bytes has no size for other types"),
    }
}

fn are_finite(x: &[f32]) -> bool {
    x.iter().all(|x| x.is_finite())
}

#[cfg(test)]
mod tests {
    use foretoken_kernels::ElementType;
    use foretoken_kernels::quant::WeightType;

    use super::*;

    /// Scales are `f16`: with a larger weight, that of a block is infinite.
    #[test]
    fn values_beyond_the_range_of_a_types_scales_are_refused() {
        let recoded = |x: f32, to: TensorType| {
            let bytes: Vec<u8> = [x; 256].into_iter().flat_map(f32::to_le_bytes).collect();
            let source =
                RawTensor { dtype: TensorType::Float(ElementType::F32), shape: vec![1, 256], bytes: bytes.into() };
            let error = |problem: String| Error::argument("tensor", problem);
            recode(&source, to, None, error, |_| Ok(()))
        };
        for (to, fits, overflows) in [
            (TensorType::Float(ElementType::F16), 65_519.0, 65_520.0),
            (TensorType::Float(ElementType::Bf16), 1e38, f32::NAN),
            (TensorType::Quantized(WeightType::Q8_0), 8e6, 1e7),
            (TensorType::Quantized(WeightType::Q6_K), 1e8, 1e9),
            (TensorType::Quantized(WeightType::Q4_0), 4e5, 1e6),
            (TensorType::Quantized(WeightType::Q4_1), 6e4, 7e4), // the min
        ] {
            let name = to.name();
            assert!(recoded(fits, to).is_ok(), "{fits} in {name}");
            let message = recoded(overflows, to).expect_err(name).to_string();
            assert!(message.contains("overflow the new type"), "{overflows} in {name}: {message}");
        }
    }
}
