//! Supported quantized safetensors: 4-bit integers packed by compressed-tensors (w4a16), and FP8 with scales.
//!
//! The tensors of a matrix are merged at load: `X.weight_packed` with `X.weight_scale` becomes `X.weight` in blocks
//! of Q4_0, with the same integers and the scales in f16; `X.weight` in FP8 with `X.weight_scale` or
//! `X.weight_scale_inv` becomes `X.weight` in bf16.

use std::collections::BTreeMap;
use std::path::Path;

use foretoken_kernels::ElementType;
use foretoken_kernels::quant::WeightType;
use half::{bf16, f16};
use rayon::prelude::*;
use serde_json::Value;

use super::fields::Fields;
use super::tensor::{RawTensor, TensorType};
use super::unsupported::INSTEAD;
use crate::Result;

/// Weights and bytes of a Q4_0 block: the scale in f16, then the halves of the block in low and high nibbles.
const BLOCK: usize = 32;
const BLOCK_BYTES: usize = 2 + BLOCK / 2;
/// The type of FP8 weights in safetensors files.
pub(super) const FP8: &str = "F8_E4M3";

/// The tensors that make up one matrix.
#[derive(Clone)]
pub(super) enum Compressed {
    /// Unsigned 4-bit integers, eight per `I32`, and a scale for every group of a row: `(q - 8) * scale`.
    Int4 { packed: RawTensor, scales: RawTensor, shape: Option<RawTensor> },
    /// E4M3 values and a scale for the matrix, each row or each block; or a stack of such matrices.
    Fp8 { weight: RawTensor, scales: RawTensor, block: Fp8Block },
}

/// Rows and columns of FP8 weights that share a scale.
#[derive(Clone, Copy)]
pub(super) struct Fp8Block([usize; 2]);

impl Fp8Block {
    /// The block of the checkpoint in `directory`: `weight_block_size`, or compressed-tensors'
    /// `block_structure`; 128 x 128 if neither is present.
    ///
    /// # Errors
    /// If config.json is malformed, or the sizes are not two positive integers.
    fn of(directory: &Path) -> Result<Self> {
        let default = Self([128, 128]);
        let path = directory.join("config.json");
        let config = if path.exists() { Fields::read(&path)? } else { return Ok(default) };
        let Some((.., fields)) = descriptions(&config)?.into_iter().next() else { return Ok(default) };
        let of_groups = || {
            let groups = fields.get("config_groups")?.as_object()?;
            groups.values().find_map(|group| group.get("weights")?.get("block_structure"))
        };
        let Some(sizes) = fields.get("weight_block_size").or_else(of_groups).filter(|sizes| !sizes.is_null()) else {
            return Ok(default);
        };
        // Older files have "128x128".
        let sizes: Option<Vec<u64>> = match sizes {
            Value::String(text) => text.split('x').map(|size| size.parse().ok()).collect(),
            other => other.as_array().and_then(|sizes| sizes.iter().map(Value::as_u64).collect()),
        };
        match sizes.as_deref() {
            Some(sizes @ &[rows, columns]) if sizes.iter().all(|size| (1..1 << 31).contains(size)) => {
                Ok(Self([rows as usize, columns as usize]))
            }
            _ => {
                Err(fields.error("weight_block_size", "must be two positive integers: the rows and columns of a block"))
            }
        }
    }
}

/// The descriptions of a quantization in a configuration: the fields around each, its name, and its own fields.
///
/// # Errors
/// If one is not an object.
pub(super) fn descriptions(config: &Fields) -> Result<Vec<(Fields, &'static str, Fields)>> {
    let mut found = Vec::new();
    for fields in [Some(config.clone()), config.optional_object("text_config")?].into_iter().flatten() {
        for name in ["quantization_config", "compression_config", "quantization"] {
            found.extend(fields.optional_object(name)?.map(|own| (fields.clone(), name, own)));
        }
    }
    Ok(found)
}

/// Moves the tensors of quantized matrices of the checkpoint in `directory` out of `tensors`, by the matrix's name.
///
/// # Errors
/// Those of [`Fp8Block::of`], if there are FP8 weights.
pub(super) fn collect(
    directory: &Path,
    tensors: &mut BTreeMap<String, RawTensor>,
) -> Result<BTreeMap<String, Compressed>> {
    let mut found = BTreeMap::new();
    let packed: Vec<_> = tensors.keys().filter_map(|name| name.strip_suffix("_packed").map(str::to_owned)).collect();
    for name in packed {
        let Some(scales) = tensors.remove(&format!("{name}_scale")) else { continue };
        let Some(packed) = tensors.remove(&format!("{name}_packed")) else { continue };
        let shape = tensors.remove(&format!("{name}_shape"));
        found.insert(name, Compressed::Int4 { packed, scales, shape });
    }
    let fp8 = tensors.iter().filter(|(_, tensor)| tensor.dtype == TensorType::Other(FP8));
    let fp8: Vec<String> = fp8.map(|(name, _)| name.clone()).collect();
    let block = if fp8.is_empty() { Fp8Block([1, 1]) } else { Fp8Block::of(directory)? };
    for name in fp8 {
        let scales = tensors.remove(&format!("{name}_scale"));
        let Some(scales) = scales.or_else(|| tensors.remove(&format!("{name}_scale_inv"))) else { continue };
        let Some(weight) = tensors.remove(&name) else { continue };
        // The scale of its inputs, which are not quantized here.
        let module = name.strip_suffix("weight");
        let of_inputs =
            module.map(|module| ["input_scale", "activation_scale"].map(|scale| format!("{module}{scale}")));
        let of_inputs = of_inputs.into_iter().flatten().chain([format!("{name}_activation_scale")]);
        of_inputs.for_each(|scale| drop(tensors.remove(&scale)));
        found.insert(name, Compressed::Fp8 { weight, scales, block });
    }
    Ok(found)
}

impl Compressed {
    /// Bytes of the loaded matrix.
    pub(super) fn len_bytes(&self) -> usize {
        match self {
            Self::Int4 { packed, .. } => packed.bytes.as_slice().len() / (BLOCK / 2) * BLOCK_BYTES,
            Self::Fp8 { weight, .. } => weight.bytes.as_slice().len() * 2,
        }
    }

    /// Type and shape of the loaded matrix.
    pub(super) fn type_and_shape(&self) -> (TensorType, Vec<usize>) {
        match self {
            Self::Int4 { packed, .. } => {
                let mut shape = packed.shape.clone();
                shape.last_mut().into_iter().for_each(|words| *words = words.saturating_mul(8));
                (TensorType::Quantized(WeightType::Q4_0), shape)
            }
            Self::Fp8 { weight, .. } => (TensorType::Float(ElementType::Bf16), weight.shape.clone()),
        }
    }

    /// # Errors
    /// If a file has shrunk.
    pub(super) fn check_length(&self) -> Result<()> {
        match self {
            Self::Int4 { packed: weight, scales, .. } | Self::Fp8 { weight, scales, .. } => {
                weight.bytes.check_length()?;
                scales.bytes.check_length()
            }
        }
    }

    /// The matrix, or the problem with its tensors.
    pub(super) fn load(&self) -> Result<RawTensor, String> {
        match self {
            Self::Int4 { packed, scales, shape } => int4(packed, scales, shape.as_ref()),
            Self::Fp8 { weight, scales, block } => fp8(weight, scales, *block),
        }
    }
}

fn int4(packed: &RawTensor, scales: &RawTensor, shape: Option<&RawTensor>) -> Result<RawTensor, String> {
    let wrong = |what: &str| {
        let shapes = format!("weight_packed is {:?}, weight_scale {:?}", packed.shape, scales.shape);
        Err(format!(
            "{what} ({shapes}); only symmetric 4-bit integers in groups of 32, 64, 128, ... are supported, {INSTEAD}"
        ))
    };
    let ([rows, words], [of_rows, groups]) = (&packed.shape[..], &scales.shape[..]) else {
        return wrong("is not a matrix");
    };
    if packed.dtype != TensorType::I32 || rows != of_rows || [rows, words, groups].contains(&&0) {
        return wrong("has an unsupported packing");
    }
    // Not 0, so the file's length bounds all of them.
    let (rows, inputs, groups) = (*rows, words * 8, *groups);
    if !inputs.is_multiple_of(groups * BLOCK) {
        return wrong("has an unsupported packing");
    }
    let says = |shape: &RawTensor| {
        shape.bytes.as_slice().as_chunks().0.iter().map(|x| i64::from_le_bytes(*x)).eq([rows as i64, inputs as i64])
    };
    if shape.is_some_and(|shape| shape.dtype == TensorType::I64 && !says(shape)) {
        return wrong("does not have the shape in weight_shape");
    }
    let values = floats(scales)?;
    if values.iter().any(|scale| !f16::from_f32(*scale).is_finite()) {
        return Err(format!("has scales that are not finite in f16, the type of scales here; {INSTEAD}"));
    }
    let blocks = inputs / BLOCK; // of a row
    let mut bytes = vec![0; rows * blocks * BLOCK_BYTES];
    let source = packed.bytes.as_slice().par_chunks(inputs / 2);
    bytes.par_chunks_mut(blocks * BLOCK_BYTES).zip(source).zip(values.par_chunks(groups)).for_each(
        |((out, row), scales)| {
            let pairs = out.chunks_exact_mut(BLOCK_BYTES).zip(row.chunks_exact(BLOCK / 2));
            for (i, (out, nibbles)) in pairs.enumerate() {
                out[..2].copy_from_slice(&f16::from_f32(scales[i * groups / blocks]).to_le_bytes());
                let weight = |k: usize| nibbles[k / 2] >> (4 * (k % 2)) & 15;
                for (k, out) in out[2..].iter_mut().enumerate() {
                    *out = weight(k) | weight(k + BLOCK / 2) << 4;
                }
            }
        },
    );
    packed.bytes.release_all();
    Ok(RawTensor { dtype: TensorType::Quantized(WeightType::Q4_0), shape: vec![rows, inputs], bytes: bytes.into() })
}

fn fp8(weight: &RawTensor, scales: &RawTensor, Fp8Block(block): Fp8Block) -> Result<RawTensor, String> {
    let (rows, inputs) = match weight.shape[..] {
        [rows, inputs] | [_, rows, inputs] if !weight.shape.contains(&0) => (rows, inputs),
        _ => return Err(format!("is of shape {:?}, but only matrices are supported in FP8; {INSTEAD}", weight.shape)),
    };
    // Of one matrix of a stack.
    let scale_shape = match weight.shape[..] {
        [count, _, _] => scales.shape.strip_prefix(&[count]).ok_or_else(|| {
            format!("has scales of shape {:?} for a stack of {count} matrices; {INSTEAD}", scales.shape)
        })?,
        _ => &scales.shape,
    };
    let values = floats(scales)?;
    let by_blocks = [rows.div_ceil(block[0]), inputs.div_ceil(block[1])];
    // The scales per row, and the inputs of each.
    let (rows_of, inputs_of) = match *scale_shape {
        [] | [1] | [1, 1] => (rows, inputs),
        // Gate and up.
        [2, 1] if weight.shape.len() == 3 && rows % 2 == 0 => (rows / 2, inputs),
        [count] | [count, 1] if count == rows => (1, inputs),
        [a, b] if [a, b] == by_blocks => (block[0], block[1]),
        _ => {
            let shapes = format!("has scales of shape {:?} for {rows} x {inputs} weights", scales.shape);
            let [high, wide] = block;
            return Err(format!(
                "{shapes}; only one for the matrix, for each row or for blocks of {high} x {wide} is supported, {INSTEAD}"
            ));
        }
    };
    let (in_row, in_matrix) = (inputs.div_ceil(inputs_of), scale_shape.iter().product::<usize>());
    let numbers = e4m3();
    let mut bytes = vec![0; weight.shape.iter().product::<usize>() * 2];
    let source = weight.bytes.as_slice().par_chunks(inputs);
    bytes.par_chunks_mut(inputs * 2).zip(source).enumerate().for_each(|(row, (out, weights))| {
        let scales = &values[row / rows * in_matrix + row % rows / rows_of * in_row..][..in_row];
        for ((i, weight), out) in weights.iter().enumerate().zip(out.as_chunks_mut().0) {
            *out = bf16::from_f32(numbers[usize::from(*weight)] * scales[i / inputs_of]).to_le_bytes();
        }
    });
    weight.bytes.release_all();
    Ok(RawTensor { dtype: TensorType::Float(ElementType::Bf16), shape: weight.shape.clone(), bytes: bytes.into() })
}

/// The values of all E4M3 bytes: sign, four exponent bits (bias 7), three mantissa bits; no infinities.
fn e4m3() -> [f32; 256] {
    std::array::from_fn(|byte| {
        let (exponent, mantissa) = (byte as i32 >> 3 & 15, (byte & 7) as f32);
        let size = match (exponent, byte & 7) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa / 8.0 * 2f32.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
        };
        if byte & 0x80 != 0 { -size } else { size }
    })
}

/// The values of scales, which must be floating point.
fn floats(scales: &RawTensor) -> Result<Vec<f32>, String> {
    let TensorType::Float(element) = scales.dtype else {
        return Err(format!("has scales of {}, which are not supported; {INSTEAD}", scales.dtype.name()));
    };
    let values = element.read(scales.bytes.as_slice());
    scales.bytes.release_all();
    Ok(values)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::nn::Recorded;

    fn tensor(dtype: TensorType, shape: &[usize], len: usize) -> (Arc<Recorded>, RawTensor) {
        let (file, bytes) = Recorded::new(vec![0; len], 0..len);
        (file, RawTensor { dtype, shape: shape.to_vec(), bytes })
    }

    #[test]
    fn pages_of_converted_tensors_are_released() {
        let float = |element, shape: &[usize], len| tensor(TensorType::Float(element), shape, len);
        let (packed, words) = tensor(TensorType::I32, &[2, 8], 64);
        let (of_packed, scales) = float(ElementType::Bf16, &[2, 2], 8);
        int4(&words, &scales, None).expect("a matrix");
        let (fp8_file, weight) = tensor(TensorType::Other(FP8), &[2, 4], 8);
        let (of_fp8, scale) = float(ElementType::F32, &[1], 4);
        fp8(&weight, &scale, Fp8Block([128, 128])).expect("a matrix");
        for (file, len) in [(packed, 64), (of_packed, 8), (fp8_file, 8), (of_fp8, 4)] {
            let whole = 0..len;
            assert_eq!(file.released(), [whole]);
        }
    }
}
