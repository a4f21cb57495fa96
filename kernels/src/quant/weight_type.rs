//! The block types of weights and activations, and their sizes.

use crate::UnknownName;
use crate::quant::layout::{q8_1, q8k};

/// Declares the types from rows of a number in GGUF files, llama.cpp's name, and the size of a file's block.
macro_rules! weight_types {
    ($($(#[$doc:meta])* $name:ident = $id:literal, $text:literal, $len:literal weights in $bytes:literal bytes;)*) => {
        /// A block-quantized weight type of GGUF files. The names, numbers and block layouts are llama.cpp's.
        ///
        /// A packed matrix ([`pack`](super::pack)) is as large as the file's, except where two sizes are given below.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(non_camel_case_types)]
        #[non_exhaustive]
        pub enum WeightType {
            $($(#[$doc])* $name,)*
        }

        impl WeightType {
            /// Every type, in the order of the enumeration.
            pub const ALL: [Self; 23] = [$(Self::$name),*];

            /// The name that llama.cpp prints.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            /// The type's number in GGUF files.
            pub const fn ggml_id(self) -> u32 {
                match self {
                    $(Self::$name => $id,)*
                }
            }

            /// Weights per block.
            pub const fn block_len(self) -> usize {
                match self {
                    $(Self::$name => $len,)*
                }
            }

            /// Bytes per block of a file.
            pub const fn block_bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }
        }
    };
}

weight_types! {
    /// 4 bits, one scale per 32.
    Q4_0 = 2, "q4_0", 32 weights in 18 bytes;
    /// 4 bits, scale and min per 32.
    Q4_1 = 3, "q4_1", 32 weights in 20 bytes;
    /// 5 bits, one scale per 32.
    Q5_0 = 6, "q5_0", 32 weights in 22 bytes;
    /// 5 bits, scale and min per 32.
    Q5_1 = 7, "q5_1", 32 weights in 24 bytes;
    /// 8 bits, one scale per 32.
    Q8_0 = 8, "q8_0", 32 weights in 34 bytes;
    /// 2 bits, 4-bit scales and mins per 16 in blocks of 256.
    Q2_K = 10, "q2_K", 256 weights in 84 bytes;
    /// 3 bits, 6-bit scales per 16 in blocks of 256.
    Q3_K = 11, "q3_K", 256 weights in 110 bytes;
    /// 4 bits, 6-bit scales and mins per 32 in blocks of 256.
    Q4_K = 12, "q4_K", 256 weights in 144 bytes;
    /// 5 bits, 6-bit scales and mins per 32 in blocks of 256.
    Q5_K = 13, "q5_K", 256 weights in 176 bytes;
    /// 6 bits, 8-bit scales per 16 in blocks of 256.
    Q6_K = 14, "q6_K", 256 weights in 210 bytes;
    /// 4-bit indices into 16 fixed levels, one scale per 32.
    IQ4_NL = 20, "iq4_nl", 32 weights in 18 bytes;
    /// The levels of IQ4_NL, 6-bit scales per 32 in blocks of 256.
    IQ4_XS = 23, "iq4_xs", 256 weights in 136 bytes;
    /// 4-bit floats (E2M1), a power of two (E8M0) per 32.
    MXFP4 = 39, "mxfp4", 32 weights in 17 bytes;
    /// 4-bit floats (E2M1), an unsigned 8-bit float (E4M3) per 16 in blocks of 64.
    NVFP4 = 40, "nvfp4", 64 weights in 36 bytes;
    /// -1, 0 or 1, five to a byte; one scale per 256. 1.69 bits in a file, 2.06 packed.
    TQ1_0 = 34, "tq1_0", 256 weights in 54 bytes;
    /// -1, 0 or 1 (or 2) in 2 bits, one scale per 256.
    TQ2_0 = 35, "tq2_0", 256 weights in 66 bytes;
    /// Eight weights an eighth above or below one of 2048 points of -1, 0 and 1; 3-bit scales per 32 in blocks of 256.
    /// 1.56 bits in a file, 2.38 packed.
    IQ1_S = 19, "iq1_s", 256 weights in 50 bytes;
    /// The points of IQ1_S, 3-bit scales per 16 in blocks of 256. 1.75 bits in a file, 3.38 packed.
    IQ1_M = 29, "iq1_m", 256 weights in 56 bytes;
    /// The magnitudes of eight weights: one of 256 points; 4-bit scales per 32 in blocks of 256.
    /// 2.06 bits in a file, 3.25 packed.
    IQ2_XXS = 16, "iq2_xxs", 256 weights in 66 bytes;
    /// The magnitudes of eight weights: one of 512 points; 4-bit scales per 16 in blocks of 256.
    /// 2.31 bits in a file, 3.38 packed.
    IQ2_XS = 17, "iq2_xs", 256 weights in 74 bytes;
    /// The magnitudes of eight weights: one of 1024 points; 4-bit scales per 16 in blocks of 256.
    /// 2.56 bits in a file, 3.38 packed.
    IQ2_S = 22, "iq2_s", 256 weights in 82 bytes;
    /// The magnitudes of four weights: one of 256 points; 4-bit scales per 32 in blocks of 256.
    /// 3.06 bits in a file, 4.25 packed.
    IQ3_XXS = 18, "iq3_xxs", 256 weights in 98 bytes;
    /// The magnitudes of four weights: one of 512 points; 4-bit scales per 32 in blocks of 256.
    /// 3.44 bits in a file, 4.25 packed.
    IQ3_S = 21, "iq3_s", 256 weights in 110 bytes;
}

impl WeightType {
    /// The type with that [`WeightType::ggml_id`].
    pub fn from_ggml_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| t.ggml_id() == id)
    }

    /// Bytes per block and row when packed: those of the file, except for grids and TQ1_0.
    pub const fn packed_block_bytes(self) -> usize {
        match self {
            Self::TQ1_0 => 66,
            Self::IQ1_S => 76,
            Self::IQ2_XXS => 104,
            Self::IQ1_M | Self::IQ2_XS | Self::IQ2_S => 108,
            Self::IQ3_XXS | Self::IQ3_S => 136,
            _ => self.block_bytes(),
        }
    }

    /// Whether [`quantize_row`](super::quantize_row) writes this type. The others are read only.
    pub const fn is_written(self) -> bool {
        use WeightType::*;
        !matches!(self, NVFP4 | TQ1_0 | TQ2_0 | IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S)
    }

    /// Bytes of one row of `inputs` weights; `None` if they are not whole blocks.
    pub fn row_bytes(self, inputs: usize) -> Option<usize> {
        self.blocks_in_row(inputs)?.checked_mul(self.block_bytes())
    }

    /// Bytes of an `(outputs, inputs)` matrix; `None` if the rows are not whole blocks or the product overflows.
    pub fn bytes_for(self, outputs: usize, inputs: usize) -> Option<usize> {
        self.row_bytes(inputs)?.checked_mul(outputs)
    }

    /// As [`WeightType::row_bytes`], packed.
    pub fn packed_row_bytes(self, inputs: usize) -> Option<usize> {
        self.blocks_in_row(inputs)?.checked_mul(self.packed_block_bytes())
    }

    /// As [`WeightType::bytes_for`], packed.
    pub fn packed_bytes_for(self, outputs: usize, inputs: usize) -> Option<usize> {
        self.packed_row_bytes(inputs)?.checked_mul(outputs)
    }

    /// Blocks of a row of `inputs` weights, if they are whole.
    fn blocks_in_row(self, inputs: usize) -> Option<usize> {
        inputs.is_multiple_of(self.block_len()).then_some(inputs / self.block_len())
    }

    /// The block type of activations that are multiplied by this type.
    pub const fn activation_type(self) -> ActivationType {
        match self.block_len() {
            256 => ActivationType::Q8_K,
            _ => ActivationType::Q8_1,
        }
    }
}

impl std::str::FromStr for WeightType {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|weight_type| weight_type.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let names = Self::ALL.map(|weight_type| weight_type.name().to_ascii_lowercase()).join(", ");
            UnknownName { what: "weight type", problem: format!("{name:?} is unknown; expected one of {names}") }
        })
    }
}

/// A block type of quantized activations: the one that llama.cpp's dot product of a weight type uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types)]
pub enum ActivationType {
    /// Blocks of 32: `f16` scale `max |x| / 127`, and for formats with mins the `f16` product of scale and sum.
    Q8_1,
    /// Blocks of 256: `f32` scale `-max / 127` with the sign of the largest, and the quants' sums.
    Q8_K,
}

impl ActivationType {
    /// Inputs per block.
    pub const fn block_len(self) -> usize {
        match self {
            Self::Q8_1 => 32,
            Self::Q8_K => 256,
        }
    }

    pub(super) const fn block_words(self) -> usize {
        match self {
            Self::Q8_1 => q8_1::WORDS,
            Self::Q8_K => q8k::WORDS,
        }
    }
}
