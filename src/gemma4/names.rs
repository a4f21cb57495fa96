//! Tensor names, llama.cpp's and Hugging Face's. Assistants exist in four layouts: `nextn.*`, llama.cpp's; `mtp.*`,
//! `mtp_*` and `assistant.*`, those of forks.

use crate::checkpoint::gguf::names::{GATE_UP, Names};

/// Names outside the layers: in GGUF, at Hugging Face. The first of several GGUF names is llama.cpp's.
const GLOBAL: [(&str, &str); 17] = [
    ("per_layer_token_embd.weight", "embed_tokens_per_layer.weight"),
    ("per_layer_model_proj.weight", "per_layer_model_projection.weight"),
    ("per_layer_proj_norm.weight", "per_layer_projection_norm.weight"),
    ("nextn.pre_projection.weight", "pre_projection.weight"),
    ("mtp.pre_projection.weight", "pre_projection.weight"),
    ("mtp_pre_proj.weight", "pre_projection.weight"),
    ("assistant.pre_projection.weight", "pre_projection.weight"),
    ("nextn.post_projection.weight", "post_projection.weight"),
    ("mtp.post_projection.weight", "post_projection.weight"),
    ("mtp_post_proj.weight", "post_projection.weight"),
    ("assistant.post_projection.weight", "post_projection.weight"),
    ("masked_embd_centroids.weight", "masked_embedding.centroids.weight"),
    ("mtp.centroids.weight", "masked_embedding.centroids.weight"),
    ("mtp_centroids.weight", "masked_embedding.centroids.weight"),
    ("masked_embd_ordering", "masked_embedding.token_ordering"),
    ("mtp.token_ordering.weight", "masked_embedding.token_ordering"),
    ("mtp_token_ordering.weight", "masked_embedding.token_ordering"),
];

/// Names inside layer `i`: after `blk.i.`, and after `layers.i.`.
const LAYER: [(&str, &str); 27] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight"),
    ("post_ffw_norm.weight", "post_feedforward_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("layer_output_scale.weight", "layer_scalar"),
    ("layer_output_scale", "layer_scalar"),
    ("inp_gate.weight", "per_layer_input_gate.weight"),
    ("proj.weight", "per_layer_projection.weight"),
    ("post_norm.weight", "post_per_layer_input_norm.weight"),
    ("ffn_gate_inp.weight", "router.proj.weight"),
    ("ffn_gate_inp.scale", "router.scale"),
    ("ffn_down_exps.scale", "router.per_expert_scale"),
    ("ffn_gate_inp.per_expert_scale", "router.per_expert_scale"),
    (GATE_UP, "experts.gate_up_proj"),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
];

pub(crate) const NAMES: Names = Names { global: &GLOBAL, layer: &LAYER, nextn: None, head: &[] };

/// The possible GGUF names of the tensor `name` of a Gemma 4 at Hugging Face, the likeliest first;
/// empty if it has none.
pub fn gguf_names(name: &str) -> Vec<String> {
    NAMES.gguf(name)
}

/// The Hugging Face name of the tensor `name` of a Gemma 4's GGUF file, or `None`
/// (`rope_freqs.weight` exists only in GGUF).
pub fn hugging_face_name(name: &str) -> Option<String> {
    NAMES.hugging_face(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::gguf::names::OUTER;

    #[test]
    fn names_go_there_and_back() {
        for &(gguf, hf) in OUTER.iter().chain(&GLOBAL) {
            assert_eq!(hugging_face_name(gguf).as_deref(), Some(hf));
            assert!(gguf_names(hf).iter().any(|name| name == gguf));
        }
        for (gguf, hf) in LAYER {
            let (gguf, hf) = (format!("blk.17.{gguf}"), format!("layers.17.{hf}"));
            assert_eq!(hugging_face_name(&gguf).as_ref(), Some(&hf));
            assert!(gguf_names(&hf).contains(&gguf));
        }
        assert_eq!(gguf_names("layers.3.self_attn.q_proj.weight"), ["blk.3.attn_q.weight"]);
        assert_eq!(
            gguf_names("pre_projection.weight"),
            [
                "nextn.pre_projection.weight",
                "mtp.pre_projection.weight",
                "mtp_pre_proj.weight",
                "assistant.pre_projection.weight"
            ]
        );
        for other in ["rope_freqs.weight", "blk.01.attn_q.weight", "blk.+1.attn_q.weight", "blk.1", "blk..x", ""] {
            assert_eq!(hugging_face_name(other), None, "{other}");
        }
        assert!(gguf_names("layers.3.attn_q.weight").is_empty());
        assert_eq!(
            NAMES.split_gate_up("layers.3.experts.gate_up_proj").map(|(gate, _)| gate).as_deref(),
            Some("blk.3.ffn_gate_exps.weight")
        );
        assert_eq!(NAMES.split_gate_up("layers.3.experts.down_proj"), None);
    }
}
