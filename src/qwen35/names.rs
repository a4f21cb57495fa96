//! Tensor names, llama.cpp's and Hugging Face's, and the pre-tokenizer's.

use crate::checkpoint::gguf::names::{GATE_UP, Names};

/// Names inside layer `i`: after `blk.i.`, and after `layers.i.`. The first of several GGUF names is llama.cpp's.
const LAYER: [(&str, &str); 28] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("post_attention_norm.weight", "post_attention_layernorm.weight"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("attn_q_norm.weight", "self_attn.q_norm.weight"),
    ("attn_k_norm.weight", "self_attn.k_norm.weight"),
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight"),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight"),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt.bias", "linear_attn.dt_bias"),
    ("ssm_dt", "linear_attn.dt_bias"),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight"),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight"),
    ("ssm_norm.weight", "linear_attn.norm.weight"),
    ("ssm_out.weight", "linear_attn.out_proj.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    (GATE_UP, "mlp.experts.gate_up_proj"),
    ("ffn_down_exps.weight", "mlp.experts.down_proj"),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight"),
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight"),
];

/// Names of a NextN head outside its layer: after `blk.i.`, and after `mtp.`.
const HEAD: [(&str, &str); 6] = [
    ("nextn.eh_proj.weight", "fc.weight"),
    ("nextn.enorm.weight", "pre_fc_norm_embedding.weight"),
    ("nextn.hnorm.weight", "pre_fc_norm_hidden.weight"),
    ("nextn.shared_head_norm.weight", "norm.weight"),
    ("nextn.embed_tokens.weight", "embed_tokens.weight"),
    ("nextn.shared_head_head.weight", "shared_head.head.weight"),
];

/// The pre-tokenizer before byte-level merges, by its name in GGUF files: words with combining marks,
/// single digits, runs of symbols, line ends, spaces.
pub(crate) const SPLIT: (&str, &str) = (
    "qwen35",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// The tensor names of a checkpoint whose NextN head is block `nextn`.
pub(crate) fn names(nextn: Option<u32>) -> Names {
    Names { global: &[], layer: &LAYER, nextn, head: &HEAD }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nextn_head_is_a_block() {
        let names = names(Some(8));
        for (gguf, hf) in LAYER {
            for (gguf, hf) in [("blk.3.", "layers.3."), ("blk.8.", "mtp.layers.0.")]
                .map(|(before, after)| (format!("{before}{gguf}"), format!("{after}{hf}")))
            {
                assert_eq!(names.hugging_face(&gguf).as_ref(), Some(&hf));
                assert!(names.gguf(&hf).contains(&gguf));
            }
        }
        for (gguf, hf) in HEAD {
            let (gguf, hf) = (format!("blk.8.{gguf}"), format!("mtp.{hf}"));
            assert_eq!(names.hugging_face(&gguf).as_ref(), Some(&hf));
            assert_eq!(names.gguf(&hf), [gguf]);
        }
        assert_eq!(
            names.split_gate_up("mtp.layers.0.mlp.experts.gate_up_proj").map(|(_, up)| up).as_deref(),
            Some("blk.8.ffn_up_exps.weight")
        );
        assert!(names.gguf("mtp.layers.1.mlp.gate.weight").is_empty());
    }
}
