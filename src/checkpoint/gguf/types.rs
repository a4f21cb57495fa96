//! The types of tensors in GGUF files and their sizes.

/// A ggml type: rows are whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    /// llama.cpp's name.
    pub name: &'static str,
    /// Elements per block; the innermost dimension is a multiple of it.
    pub block_len: usize,
    /// Bytes per block.
    pub block_bytes: usize,
}

/// 32-bit floating point.
pub const F32: u32 = 0;
/// 32-bit integers.
pub const I32: u32 = 26;

impl GgmlType {
    /// The type with `id` in files.
    ///
    /// Unknown: ids that llama.cpp removed (4, 5, 31..33, 36..38), and 42 (`Q2_0`), whose block has
    /// 64 elements in some files and 128 in others.
    pub fn from_id(id: u32) -> Option<Self> {
        let of = |name, block_len, block_bytes| Some(Self { name, block_len, block_bytes });
        match id {
            F32 => of("F32", 1, 4),
            1 => of("F16", 1, 2),
            2 => of("Q4_0", 32, 18),
            3 => of("Q4_1", 32, 20),
            6 => of("Q5_0", 32, 22),
            7 => of("Q5_1", 32, 24),
            8 => of("Q8_0", 32, 34),
            9 => of("Q8_1", 32, 36),
            10 => of("Q2_K", 256, 84),
            11 => of("Q3_K", 256, 110),
            12 => of("Q4_K", 256, 144),
            13 => of("Q5_K", 256, 176),
            14 => of("Q6_K", 256, 210),
            15 => of("Q8_K", 256, 292),
            16 => of("IQ2_XXS", 256, 66),
            17 => of("IQ2_XS", 256, 74),
            18 => of("IQ3_XXS", 256, 98),
            19 => of("IQ1_S", 256, 50),
            20 => of("IQ4_NL", 32, 18),
            21 => of("IQ3_S", 256, 110),
            22 => of("IQ2_S", 256, 82),
            23 => of("IQ4_XS", 256, 136),
            24 => of("I8", 1, 1),
            25 => of("I16", 1, 2),
            I32 => of("I32", 1, 4),
            27 => of("I64", 1, 8),
            28 => of("F64", 1, 8),
            29 => of("IQ1_M", 256, 56),
            30 => of("BF16", 1, 2),
            34 => of("TQ1_0", 256, 54),
            35 => of("TQ2_0", 256, 66),
            39 => of("MXFP4", 32, 17),
            40 => of("NVFP4", 64, 36),
            41 => of("Q1_0", 128, 18),
            _ => None,
        }
    }

    /// The name of the type with `id`, for messages.
    pub(crate) fn name_of(id: u32) -> &'static str {
        match Self::from_id(id) {
            Some(known) => known.name,
            // PQ2_0, PTQ1_0.
            None if [142, 143].contains(&id) => "a type of PrismML's llama.cpp",
            // Q8_0_X4 to Q8_K_R8.
            None if (97..400).contains(&id) => "a type of ik_llama.cpp",
            None => "an unknown type",
        }
    }

    /// Bytes of a tensor of `elements` elements in rows of `inner`, or the problem.
    pub(super) fn bytes(self, inner: usize, elements: usize) -> Result<usize, String> {
        if !inner.is_multiple_of(self.block_len) {
            let problem = format!("has rows of {inner} elements, {} needs a multiple of {}", self.name, self.block_len);
            return Err(format!("{problem}; download or convert the file again"));
        }
        let bytes = (elements / self.block_len).checked_mul(self.block_bytes);
        bytes.ok_or_else(|| "has a size that overflows; download the file again".into())
    }
}
