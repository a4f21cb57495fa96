//! Tensors as they are stored.

use foretoken_kernels::ElementType;
use foretoken_kernels::quant::WeightType;

use super::gguf::GgmlType;
use crate::nn::Bytes;

/// The stored type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorType {
    /// Floating point.
    Float(ElementType),
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
    /// Blocks of quantized weights.
    Quantized(WeightType),
    /// A type of the file format that no kernel supports, by the format's name.
    Other(&'static str),
}

impl TensorType {
    /// The type's id in GGUF files; `None` if no kernel supports it.
    pub fn ggml_id(self) -> Option<u32> {
        Some(match self {
            Self::Float(ElementType::F32) => 0,
            Self::Float(ElementType::F16) => 1,
            Self::Float(ElementType::Bf16) => 30,
            Self::I64 => 27,
            Self::I32 => 26,
            Self::Quantized(weight_type) => weight_type.ggml_id(),
            Self::Other(_) => return None,
        })
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(ElementType::F32) => "f32",
            Self::Float(ElementType::F16) => "f16",
            Self::Float(ElementType::Bf16) => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::Quantized(weight_type) => weight_type.name(),
            Self::Other(name) => name,
        }
    }
}

/// A tensor in a file: its type, its shape (outermost dimension first) and its bytes.
#[derive(Clone)]
pub struct RawTensor {
    /// Stored type.
    pub dtype: TensorType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes, little-endian, row-major.
    pub bytes: Bytes,
}

/// The tensor type of a ggml type id.
pub(crate) fn tensor_type(ggml_id: u32) -> TensorType {
    let floats = [ElementType::F32, ElementType::F16, ElementType::Bf16].map(TensorType::Float);
    let simple = floats.into_iter().chain([TensorType::I32, TensorType::I64]);
    let quantized = || WeightType::from_ggml_id(ggml_id).map(TensorType::Quantized);
    let other = || TensorType::Other(GgmlType::name_of(ggml_id));
    simple.into_iter().find(|known| known.ggml_id() == Some(ggml_id)).or_else(quantized).unwrap_or_else(other)
}
