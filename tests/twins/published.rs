//! Twins of published GGUF files: all tensors of all layers under their names, scaled down to rows
//! of whole blocks, in the types of the file.

use std::collections::BTreeMap;
use std::path::Path;

use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::checkpoint::gguf::Gguf;
use foretoken::gemma4::{AttentionType, LayerConfig, TextConfig};
use foretoken::{Isa, WeightType};
use foretoken_kernels::quant::{dequantize_row, quantize_row};

use crate::gguf_writer::*;
use crate::twins::{Change, written};

/// ggml's number for bf16.
pub const BF16: u32 = 30;

const HIDDEN: usize = 256;
const PER_LAYER: usize = 256;
const EXPERTS: usize = 4;

/// A published file.
pub struct Published {
    /// The variant; its configuration is in tests/shapes.
    pub variant: &'static str,
    /// Layers; those of tests/shapes are repeated.
    pub layers: usize,
    /// Width of MLPs and of experts: a multiple of 256 if the original's is.
    pub widths: [usize; 2],
    /// The type of a matrix, by its name and place; norms and routers are F32.
    pub type_of: fn(&str, Place) -> u32,
}

/// The place of a matrix.
#[derive(Clone, Copy)]
pub struct Place {
    /// Layer, and number of layers.
    pub layer: (usize, usize),
    /// Index among the V projections, and their number: layers with K = V have none.
    pub value: (usize, usize),
}

impl Place {
    /// Whether llama.cpp's mixes use more bits at this place: in the first and last eighth, and every third between.
    pub fn has_more_bits((i, n): (usize, usize)) -> bool {
        i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
    }
}

impl Published {
    /// The file in its types, and the file of the same weights in floats.
    pub fn files(&self) -> [GgufFile; 2] {
        let directory = tempfile::tempdir().expect("a directory");
        let shape = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/shapes").join(self.variant).join("target");
        let (source, path) = (Checkpoint::open(shape).expect("the variant"), directory.path().join("converted.gguf"));
        to_gguf(&source, &path, &ToGgufOptions { outtype: Outtype::F32, ..ToGgufOptions::default() })
            .expect("a GGUF file");
        let config = source.target_config().expect("a configuration");
        let layers: Vec<_> = (0..self.layers).map(|i| &config.layers[i % config.layers.len()]).collect();
        // Inputs of attn_output are whole blocks.
        let wider = if config.num_attention_heads * narrowest(&config) < HIDDEN { 2 } else { 1 };
        let mut small = written(&Gguf::open(&path).expect("the file"));
        let frequencies = small.tensors.iter().find(|tensor| tensor.name == b"rope_freqs.weight");
        let frequencies: Vec<u8> =
            (frequencies.expect("frequencies").bytes.chunks(4)).flat_map(|one| one.repeat(wider)).collect();
        small.tensors.clear();
        let keys = self.keys(small, &config, &layers, wider);
        let [mut file, mut plain] = [keys.clone(), keys];
        let values = layers.iter().filter(|layer| !layer.k_eq_v).count();
        for (name, layer, shape) in self.tensors(&config, &layers, wider) {
            let before = layers[..layer].iter().filter(|layer| !layer.k_eq_v).count();
            let place = Place { layer: (layer, self.layers), value: (before, values) };
            let is_matrix = shape.len() > 1 && name.ends_with(".weight") && !name.contains("ffn_gate_inp");
            let kind = if is_matrix { (self.type_of)(&name, place) } else { F32 };
            let (bytes, exact) = match &name[..] {
                "rope_freqs.weight" => (frequencies.clone(), frequencies.clone()),
                _ => weights(&name, &shape, kind),
            };
            file = file.tensor(&name, &shape, kind, bytes);
            plain = plain.tensor(&name, &shape, F32, exact);
        }
        [file, plain]
    }

    fn keys(&self, file: GgufFile, config: &TextConfig, layers: &[&LayerConfig], wider: usize) -> GgufFile {
        let of_layers = |size: &dyn Fn(&LayerConfig) -> Raw| array(&layers.iter().map(|l| size(l)).collect::<Vec<_>>());
        let signed = |size: usize| Raw(5, (size as i32).to_le_bytes().to_vec());
        let mut file = file
            .with("gemma4.block_count", u32_value(self.layers))
            .with("gemma4.embedding_length", u32_value(HIDDEN))
            .with("gemma4.feed_forward_length", of_layers(&|layer| signed(self.mlp(config, layer))))
            .with("gemma4.attention.head_count_kv", of_layers(&|layer| signed(layer.num_kv_heads)))
            .with(
                "gemma4.attention.sliding_window_pattern",
                of_layers(&|layer| bool_value(layer.attention == AttentionType::Sliding)),
            );
        if config.hidden_size_per_layer_input > 0 {
            file = file.with("gemma4.embedding_length_per_layer_input", u32_value(PER_LAYER));
        }
        if config.moe.is_some() {
            file = file
                .with("gemma4.expert_count", u32_value(EXPERTS))
                .with("gemma4.expert_used_count", u32_value(2))
                .with("gemma4.expert_feed_forward_length", u32_value(self.widths[1]));
        }
        for (key, Raw(_, bytes)) in &mut file.keys {
            let key = String::from_utf8_lossy(key);
            if ["key_length", "value_length", "dimension_count"].iter().any(|part| key.contains(part)) {
                let width = u32::from_le_bytes(bytes[..].try_into().expect("four bytes"));
                *bytes = (width * wider as u32).to_le_bytes().to_vec();
            }
        }
        file
    }

    /// Twice as wide in the layers that are wider than the first.
    fn mlp(&self, config: &TextConfig, layer: &LayerConfig) -> usize {
        self.widths[0] * (layer.intermediate_size / config.layers[0].intermediate_size)
    }

    /// Names, layers and shapes; layer 0 for those outside the layers.
    fn tensors(&self, config: &TextConfig, layers: &[&LayerConfig], wider: usize) -> Vec<(String, usize, Vec<usize>)> {
        let mut tensors = Vec::new();
        let mut global = |name: &str, shape: &[usize]| tensors.push((name.to_owned(), 0, shape.to_vec()));
        let per_layer = config.hidden_size_per_layer_input > 0;
        let full = config.layers.iter().find(|layer| layer.attention == AttentionType::Full).expect("a full layer");
        global("token_embd.weight", &[config.vocab_size, HIDDEN]);
        global("output_norm.weight", &[HIDDEN]);
        global("rope_freqs.weight", &[full.head_dim * wider / 2]);
        if per_layer {
            global("per_layer_token_embd.weight", &[config.vocab_size, PER_LAYER * self.layers]);
            global("per_layer_model_proj.weight", &[PER_LAYER * self.layers, HIDDEN]);
            global("per_layer_proj_norm.weight", &[PER_LAYER]);
        }
        for (i, layer) in layers.iter().enumerate() {
            let mut own = |name: &str, shape: &[usize]| tensors.push((format!("blk.{i}.{name}"), i, shape.to_vec()));
            let (head, mlp) = (layer.head_dim * wider, self.mlp(config, layer));
            let (heads, kv_heads) = (config.num_attention_heads * head, layer.num_kv_heads * head);
            for norm in ["attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"] {
                own(&format!("{norm}.weight"), &[HIDDEN]);
            }
            own("layer_output_scale.weight", &[1]);
            own("attn_q.weight", &[heads, HIDDEN]);
            own("attn_k.weight", &[kv_heads, HIDDEN]);
            if !layer.k_eq_v {
                own("attn_v.weight", &[kv_heads, HIDDEN]);
            }
            own("attn_output.weight", &[HIDDEN, heads]);
            own("attn_q_norm.weight", &[head]);
            own("attn_k_norm.weight", &[head]);
            own("ffn_gate.weight", &[mlp, HIDDEN]);
            own("ffn_up.weight", &[mlp, HIDDEN]);
            own("ffn_down.weight", &[HIDDEN, mlp]);
            if per_layer {
                own("inp_gate.weight", &[PER_LAYER, HIDDEN]);
                own("proj.weight", &[HIDDEN, PER_LAYER]);
                own("post_norm.weight", &[HIDDEN]);
            }
            if config.moe.is_some() {
                let expert = self.widths[1];
                own("ffn_gate_inp.weight", &[EXPERTS, HIDDEN]);
                own("ffn_gate_inp.scale", &[HIDDEN]);
                own("ffn_gate_up_exps.weight", &[EXPERTS, 2 * expert, HIDDEN]);
                own("ffn_down_exps.weight", &[EXPERTS, HIDDEN, expert]);
                own("ffn_down_exps.scale", &[EXPERTS]);
                for norm in ["pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"] {
                    own(&format!("{norm}.weight"), &[HIDDEN]);
                }
            }
        }
        tensors
    }
}

fn narrowest(config: &TextConfig) -> usize {
    config.layers.iter().map(|layer| layer.head_dim).min().expect("layers")
}

/// Random weights that preserve the magnitude of their inputs, as blocks and dequantized.
fn weights(name: &str, shape: &[usize], kind: u32) -> (Vec<u8>, Vec<u8>) {
    let (inputs, len) = (shape[shape.len() - 1], shape.iter().product::<usize>());
    let mut state = u64::from(crc32fast::hash(name.as_bytes()));
    let mut random = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let floats: Vec<f32> = match shape.len() {
        // Scores of random heads with weight 1 would be dominated by one position.
        1 if name.contains("_q_norm") => vec![0.25; len],
        1 => (0..len).map(|_| 1.0 + 0.1 * random()).collect(),
        _ => (0..len).map(|_| random() * (3.0 / inputs as f32).sqrt()).collect(),
    };
    let bytes_of = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    if kind == BF16 {
        let halves: Vec<_> = floats.into_iter().map(half::bf16::from_f32).collect();
        let exact: Vec<f32> = halves.iter().map(|x| x.to_f32()).collect();
        return (halves.iter().flat_map(|x| x.to_le_bytes()).collect(), bytes_of(&exact));
    }
    let Some(of) = WeightType::from_ggml_id(kind) else { return (bytes_of(&floats), bytes_of(&floats)) };
    let row = of.row_bytes(inputs).expect("whole blocks");
    let (mut blocks, mut exact) = (vec![0; len / inputs * row], vec![0.0; len]);
    for ((floats, blocks), exact) in floats.chunks(inputs).zip(blocks.chunks_mut(row)).zip(exact.chunks_mut(inputs)) {
        quantize_row(Isa::best(), of, floats, blocks);
        dequantize_row(of, blocks, exact);
    }
    (blocks, bytes_of(&exact))
}

/// Tensors of each type.
pub fn census(file: &GgufFile) -> BTreeMap<&'static str, usize> {
    let mut counts = BTreeMap::new();
    for tensor in &file.tensors {
        let name = match tensor.type_id {
            F32 => "f32",
            BF16 => "bf16",
            id => WeightType::from_ggml_id(id).expect("a type that is read").name(),
        };
        *counts.entry(name).or_default() += 1;
    }
    counts
}
