//! llama.cpp's quantization mixes: the type of each tensor.

use foretoken_kernels::ElementType;
use foretoken_kernels::quant::WeightType::{self, *};

use crate::checkpoint::TensorType;
use crate::{Error, Result};

/// A llama.cpp quantization mix. Single types are mixes as well: tables and heads get more bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, non_camel_case_types)] // llama.cpp's names
#[non_exhaustive]
pub enum Mix {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    IQ4_NL,
    IQ4_XS,
    /// Experts in MXFP4, the rest in Q8_0.
    MXFP4_MOE,
    Q2_K,
    Q3_K_S,
    Q3_K_M,
    Q3_K_L,
    Q4_K_S,
    Q4_K_M,
    Q5_K_S,
    Q5_K_M,
    Q6_K,
}

/// llama.cpp's mixes of load-only types.
const READ_ONLY: [&str; 13] = [
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s", "iq3_m", "tq1_0", "tq2_0",
    "nvfp4",
];

impl Mix {
    const ALL: [(Self, &'static str, WeightType, u32); 17] = [
        (Self::Q4_0, "q4_0", WeightType::Q4_0, 2),
        (Self::Q4_1, "q4_1", WeightType::Q4_1, 3),
        (Self::Q8_0, "q8_0", WeightType::Q8_0, 7),
        (Self::Q5_0, "q5_0", WeightType::Q5_0, 8),
        (Self::Q5_1, "q5_1", WeightType::Q5_1, 9),
        (Self::Q2_K, "q2_k", WeightType::Q2_K, 10),
        (Self::Q3_K_S, "q3_k_s", WeightType::Q3_K, 11),
        (Self::Q3_K_M, "q3_k_m", WeightType::Q3_K, 12),
        (Self::Q3_K_L, "q3_k_l", WeightType::Q3_K, 13),
        (Self::Q4_K_S, "q4_k_s", WeightType::Q4_K, 14),
        (Self::Q4_K_M, "q4_k_m", WeightType::Q4_K, 15),
        (Self::Q5_K_S, "q5_k_s", WeightType::Q5_K, 16),
        (Self::Q5_K_M, "q5_k_m", WeightType::Q5_K, 17),
        (Self::Q6_K, "q6_k", WeightType::Q6_K, 18),
        (Self::IQ4_NL, "iq4_nl", WeightType::IQ4_NL, 25),
        (Self::IQ4_XS, "iq4_xs", WeightType::IQ4_XS, 30),
        (Self::MXFP4_MOE, "mxfp4_moe", WeightType::MXFP4, 38),
    ];

    fn entry(self) -> (Self, &'static str, WeightType, u32) {
        Self::ALL.into_iter().find(|(mix, ..)| *mix == self).unwrap_or(Self::ALL[0])
    }

    /// Its name, in lowercase.
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// The type of most matrices.
    pub fn weight_type(self) -> WeightType {
        self.entry().2
    }

    /// llama.cpp's file type id (`general.file_type`).
    pub(super) fn file_type(self) -> u32 {
        self.entry().3
    }
}

impl std::str::FromStr for Mix {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let name = name.to_ascii_lowercase();
        // As in llama.cpp, the name without a suffix is the `_m` mix.
        let full = match name.as_str() {
            "q3_k" | "q4_k" | "q5_k" => format!("{name}_m"),
            _ => name.clone(),
        };
        let found = Self::ALL.into_iter().find(|(_, name, ..)| *name == full);
        found.map(|(mix, ..)| mix).ok_or_else(|| {
            let known = Self::ALL.map(|(_, name, ..)| name).join(", ");
            let what = if READ_ONLY.contains(&full.as_str()) { "is load-only" } else { "is unknown" };
            Error::argument("mix", format!("{name:?} {what}; expected one of {known}"))
        })
    }
}

/// Inputs of the rules: properties of the file.
pub(super) struct FileFacts {
    /// Layers.
    pub layers: usize,
    /// Tensors for which [`is_value`] holds.
    pub values: usize,
    /// Query heads per K/V head of the first layer.
    pub group: usize,
    /// Whether the output head is tied to the embedding.
    pub tied: bool,
    /// Whether importances are known.
    pub importance: bool,
}

/// Inputs of the rules: properties of a tensor, besides its name.
pub(super) struct TensorFacts {
    /// Its layer; 0 outside the layers.
    pub layer: usize,
    /// Those for which [`is_value`] holds in earlier layers.
    pub values_before: usize,
    /// Length of its rows.
    pub inputs: usize,
}

/// Whether a tensor computes V, alone or with Q and K.
pub(super) fn is_value(name: &str) -> bool {
    name.contains("attn_v.weight") || name.contains("attn_qkv.weight")
}

/// Part of the names of experts' matrices.
pub(super) const EXPERTS: &str = "_exps.";

/// Whether `name`, with `dimensions` dimensions, is quantized: vectors, norms, routers, scales, convolutions, token
/// orderings and the projection of per-layer embeddings are not.
pub(super) fn is_quantized(name: &str, dimensions: usize) -> bool {
    let kept = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "per_layer_model_proj",
        "centroids.weight",
        "token_ordering",
        "ssm_conv1d",
    ];
    dimensions > 1 && name.ends_with(".weight") && !kept.iter().any(|kept| name.contains(kept))
}

/// The type of a tensor for which [`is_quantized`] holds.
pub(super) fn type_of(mix: Mix, name: &str, tensor: &TensorFacts, file: &FileFacts) -> TensorType {
    fitting(preferred(mix, name, tensor, file), tensor.inputs)
}

/// `preferred`, or llama.cpp's fallback for rows of `inputs` that are not whole blocks.
pub(crate) fn fitting(preferred: WeightType, inputs: usize) -> TensorType {
    let fits = |weight_type: WeightType| inputs.is_multiple_of(weight_type.block_len());
    let fitting = match (fits(preferred), preferred) {
        (true, preferred) => Some(preferred),
        (false, Q2_K | Q3_K) => Some(WeightType::Q4_0),
        (false, Q4_K) => Some(WeightType::Q5_0),
        (false, Q5_K) => Some(WeightType::Q5_1),
        (false, Q6_K) => Some(WeightType::Q8_0),
        (false, IQ4_XS) => Some(WeightType::IQ4_NL),
        (false, _) => None,
    };
    match fitting.filter(|fitting| fits(*fitting)) {
        Some(fitting) => TensorType::Quantized(fitting),
        None => TensorType::Float(ElementType::F16),
    }
}

fn preferred(mix: Mix, name: &str, tensor: &TensorFacts, file: &FileFacts) -> WeightType {
    let base = mix.weight_type();
    let (layer, layers) = (tensor.layer, file.layers);
    if mix == Mix::MXFP4_MOE {
        return if name.contains(EXPERTS) { MXFP4 } else { WeightType::Q8_0 };
    }
    let is_table = matches!(name, "token_embd.weight" | "per_layer_token_embd.weight");
    if name == "output.weight" || is_table && file.tied {
        return match base {
            _ if !tensor.inputs.is_multiple_of(base.block_len()) => WeightType::Q8_0,
            WeightType::Q8_0 => WeightType::Q8_0,
            _ => Q6_K,
        };
    }
    if is_value(name) {
        let (i, n) = (tensor.values_before, file.values);
        return match mix {
            Mix::Q2_K if file.group >= 4 => Q4_K,
            Mix::Q2_K => Q3_K,
            Mix::Q3_K_M if i < 2 => Q5_K,
            Mix::Q3_K_M => Q4_K,
            Mix::Q3_K_L => Q5_K,
            Mix::Q4_K_M | Mix::Q5_K_M if deserves_more(i, n) => Q6_K,
            Mix::Q4_K_S if i < 4 => Q5_K,
            Mix::IQ4_NL | Mix::IQ4_XS if file.group >= 4 => Q5_K,
            _ => base,
        };
    }
    if name.contains("ffn_down") {
        return match mix {
            Mix::Q2_K => Q3_K,
            Mix::Q3_K_M if layer < layers / 16 => Q5_K,
            Mix::Q3_K_M => Q4_K,
            Mix::Q3_K_L => Q5_K,
            Mix::Q4_K_M | Mix::Q5_K_M if deserves_more(layer, layers) => Q6_K,
            Mix::Q4_K_S if layer < layers / 8 => Q5_K,
            Mix::IQ4_NL | Mix::IQ4_XS if layer < layers / 8 && !file.importance => Q5_K,
            Mix::Q4_0 if layer < layers / 8 && file.importance => WeightType::Q4_1,
            Mix::Q5_0 if layer < layers / 8 && file.importance => WeightType::Q5_1,
            _ => base,
        };
    }
    match mix {
        Mix::Q2_K if name.contains("attn_output.weight") => Q3_K,
        Mix::Q3_K_M if name.contains("attn_output.weight") => Q4_K,
        Mix::Q3_K_L if name.contains("attn_output.weight") => Q5_K,
        _ => base,
    }
}

/// Whether the `_M` mixes use more bits for the `i`-th of `n`: at both ends, and for every third between.
fn deserves_more(i: usize, n: usize) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_llama_cpps() {
        for (name, mix) in [("Q4_K_M", Mix::Q4_K_M), ("q4_k", Mix::Q4_K_M), ("q2_k", Mix::Q2_K)] {
            assert_eq!(name.parse::<Mix>().expect(name), mix);
        }
        assert!("q7".parse::<Mix>().is_err_and(|error| error.to_string().contains("q4_k_s, q4_k_m")));
        let refused = "IQ3_XXS".parse::<Mix>().expect_err("read only").to_string();
        assert!(refused.contains("\"iq3_xxs\" is load-only") && refused.contains("iq4_xs"), "{refused}");
    }

    #[test]
    fn rows_that_are_no_whole_blocks_fall_back() {
        let file = FileFacts { layers: 30, values: 25, group: 2, tied: true, importance: false };
        let of =
            |mix, name: &str, inputs| type_of(mix, name, &TensorFacts { layer: 12, values_before: 10, inputs }, &file);
        let blocks = TensorType::Quantized;
        assert_eq!(of(Mix::Q4_K_M, "blk.12.attn_q.weight", 2816), blocks(Q4_K));
        assert_eq!(of(Mix::Q4_K_M, "blk.12.ffn_down_exps.weight", 704), blocks(WeightType::Q5_0));
        assert_eq!(of(Mix::Q2_K, "blk.12.ffn_gate.weight", 704), blocks(WeightType::Q4_0));
        assert_eq!(of(Mix::Q5_K_M, "blk.12.ffn_gate.weight", 704), blocks(WeightType::Q5_1));
        assert_eq!(of(Mix::Q6_K, "blk.12.ffn_gate.weight", 704), blocks(WeightType::Q8_0));
        assert_eq!(of(Mix::IQ4_XS, "blk.12.ffn_gate.weight", 704), blocks(WeightType::IQ4_NL));
        assert_eq!(of(Mix::MXFP4_MOE, "blk.12.ffn_gate_up_exps.weight", 704), blocks(MXFP4));
        assert_eq!(of(Mix::MXFP4_MOE, "blk.12.ffn_gate.weight", 704), blocks(WeightType::Q8_0));
        assert_eq!(of(Mix::Q4_K_M, "blk.12.proj.weight", 16), TensorType::Float(ElementType::F16));
        assert_eq!(of(Mix::Q4_0, "token_embd.weight", 2816), blocks(Q6_K));
        assert_eq!(of(Mix::Q4_0, "per_layer_token_embd.weight", 160), blocks(WeightType::Q8_0));
    }

    /// 64 layers of Qwen3.5, every fourth with its own `attn_v`, and a NextN head with one.
    #[test]
    fn fused_projections_count_as_values() {
        let file = FileFacts { layers: 65, values: 65, group: 6, tied: false, importance: false };
        let types = |mix| {
            let mut counts = [[0; 2]; 4];
            for layer in 0..65 {
                let own = layer % 4 == 3 || layer == 64;
                let name = if own { "attn_v" } else { "attn_qkv" };
                let tensor = TensorFacts { layer, values_before: layer, inputs: 5120 };
                let TensorType::Quantized(found) = type_of(mix, &format!("blk.{layer}.{name}.weight"), &tensor, &file)
                else {
                    panic!("layer {layer} of {mix:?} is not quantized")
                };
                counts[[Q3_K, Q4_K, Q5_K, Q6_K].iter().position(|known| *known == found).expect("a K quant")]
                    [usize::from(own)] += 1;
            }
            counts
        };
        // Fused and own: Q3_K, Q4_K, Q5_K, Q6_K.
        assert_eq!(types(Mix::Q4_K_M), [[0, 0], [24, 8], [0, 0], [24, 9]]);
        assert_eq!(types(Mix::Q4_K_S), [[0, 0], [45, 16], [3, 1], [0, 0]]);
        assert_eq!(types(Mix::Q2_K), [[0, 0], [48, 17], [0, 0], [0, 0]]);
        assert_eq!(types(Mix::Q3_K_L), [[0, 0], [0, 0], [48, 17], [0, 0]]);
        assert_eq!(types(Mix::IQ4_XS), [[0, 0], [0, 0], [48, 17], [0, 0]]);
    }
}
