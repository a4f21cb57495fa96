//! The types that weights are stored in, and which matrix gets which.

use foretoken::{ElementType, Isa, WeightType};
use foretoken_kernels::quant;
use foretoken_tools::arguments::quantized_type;

/// A type that matrices are stored in.
#[derive(Clone, Copy, PartialEq)]
pub enum Stored {
    Float(ElementType),
    Blocks(WeightType),
}

pub const F32: Stored = Stored::Float(ElementType::F32);
pub const F16: Stored = Stored::Float(ElementType::F16);
pub const Q4_K: Stored = Stored::Blocks(WeightType::Q4_K);
pub const Q6_K: Stored = Stored::Blocks(WeightType::Q6_K);
pub const Q8_0: Stored = Stored::Blocks(WeightType::Q8_0);
/// ggml's number for 32-bit integers.
pub const I32_ID: u32 = 26;

impl Stored {
    pub fn ggml_id(self) -> u32 {
        match self {
            Self::Float(ElementType::F32) => 0,
            Self::Float(ElementType::F16) => 1,
            Self::Float(ElementType::Bf16) => 30,
            Self::Blocks(kind) => kind.ggml_id(),
        }
    }

    /// Bytes of `len` weights; `len` is a multiple of the block length.
    pub fn bytes(self, len: usize) -> usize {
        match self {
            Self::Float(element) => element.size() * len,
            Self::Blocks(kind) => len / kind.block_len() * kind.block_bytes(),
        }
    }

    pub fn encode(self, x: &[f32], out: &mut [u8]) {
        match self {
            Self::Float(element) => element.write(x, out),
            Self::Blocks(kind) => quant::quantize_row(Isa::best(), kind, x, out),
        }
    }
}

/// Which of a mix's types a matrix has.
#[derive(Clone, Copy)]
pub enum Bits {
    Fewer,
    More,
}

/// `--quantize`.
#[derive(Clone, Copy)]
pub enum Quantize {
    /// Q4_K; Q6_K for embeddings and some of attn_v and ffn_down.
    Mix,
    /// One type; Q6_K for embeddings where it is a smaller one.
    All(Stored),
}

impl std::str::FromStr for Quantize {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Ok(match name.to_ascii_lowercase().as_str() {
            "q4_k_m" => Self::Mix,
            "f32" => Self::All(F32),
            "f16" => Self::All(F16),
            "bf16" => Self::All(Stored::Float(ElementType::Bf16)),
            _ => {
                let known = |problem| format!("{problem}, q4_k_m, f16, bf16, f32");
                Self::All(Stored::Blocks(quantized_type(name).map_err(known)?))
            }
        })
    }
}

/// llama.cpp's number for a file of a type that has none.
const GUESSED: u32 = 1024;

impl Quantize {
    /// llama.cpp's number for the whole file's type.
    pub fn file_type(self) -> u32 {
        match self {
            Self::Mix => 15,
            Self::All(Stored::Float(ElementType::F32)) => 0,
            Self::All(Stored::Float(ElementType::F16)) => 1,
            Self::All(Stored::Float(ElementType::Bf16)) => 32,
            Self::All(Stored::Blocks(kind)) => match kind {
                WeightType::Q4_0 => 2,
                WeightType::Q4_1 => 3,
                WeightType::Q8_0 => 7,
                WeightType::Q5_0 => 8,
                WeightType::Q5_1 => 9,
                WeightType::Q2_K => 10,
                WeightType::Q3_K => 11,
                WeightType::Q4_K => 14,
                WeightType::Q5_K => 16,
                WeightType::Q6_K => 18,
                WeightType::IQ4_NL => 25,
                WeightType::IQ4_XS => 30,
                WeightType::MXFP4 => 38,
                // Types that are only read.
                _ => GUESSED,
            },
        }
    }

    /// The type of a matrix with rows of `inputs`.
    pub fn matrix(self, inputs: usize, bits: Bits) -> Stored {
        let preferred = match (self, bits) {
            (Self::Mix, Bits::More) => Q6_K,
            (Self::Mix, Bits::Fewer) => Q4_K,
            (Self::All(stored), _) => stored,
        };
        match preferred {
            Stored::Blocks(kind) if !inputs.is_multiple_of(kind.block_len()) => Q8_0,
            preferred => preferred,
        }
    }

    pub fn embedding(self) -> Stored {
        match self {
            Self::All(stored) if stored.bytes(256) > Q6_K.bytes(256) => stored,
            _ => Q6_K,
        }
    }

    /// The type of matrices too small to be worth quantizing further.
    pub fn small(self) -> Stored {
        match self {
            Self::All(float @ Stored::Float(_)) => float,
            _ => Q8_0,
        }
    }
}
