//! Tensor names: llama.cpp's and Hugging Face's, without the latter's prefix (`model.language_model.`, `model.`).
//!
//! Assistants exist in four layouts: `nextn.*`, llama.cpp's; `mtp.*`, `mtp_*` and `assistant.*`, those of forks.

/// GGUF names, and their Hugging Face equivalents.
type Table = &'static [(&'static str, &'static str)];

/// The tensor names of a family, in GGUF and at Hugging Face. Several in GGUF may map to one there.
pub struct Names {
    pub(crate) global: Table,
    /// Inside layer `i`: after `blk.i.`, and after `layers.i.`.
    pub(crate) layer: Table,
    /// The block of a NextN head, which is under `mtp.` at Hugging Face.
    pub(crate) nextn: Option<u32>,
    /// That head's names outside its layer: after `blk.i.`, and after `mtp.`.
    pub(crate) head: Table,
}

/// Embedding, norm and output head, the first of [`GLOBAL`]: common to all families.
pub(crate) const OUTER: Table = GLOBAL.split_at(3).0;

/// Names outside the layers: in GGUF, at Hugging Face. The first of several GGUF names is llama.cpp's.
const GLOBAL: [(&str, &str); 20] = [
    ("token_embd.weight", "embed_tokens.weight"),
    ("output_norm.weight", "norm.weight"),
    ("output.weight", "lm_head.weight"),
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

/// The gate and up projections of all experts of a layer, which a file may have apart.
pub(crate) const GATE_UP: &str = "ffn_gate_up_exps.weight";

pub(crate) const GEMMA4: Names = Names { global: &GLOBAL, layer: &LAYER, nextn: None, head: &[] };

impl Names {
    /// See [`gguf_names`].
    pub(crate) fn gguf(&self, name: &str) -> Vec<String> {
        match self.block(name) {
            Some((index, table, rest)) => with(table, rest).map(|name| format!("blk.{index}.{name}")).collect(),
            None => with(self.global, name).map(str::to_owned).collect(),
        }
    }

    /// For a Hugging Face name inside a layer or a head: the block in GGUF, its table, and the name in the table.
    pub(crate) fn block<'a>(&self, name: &'a str) -> Option<(u32, Table, &'a str)> {
        match (name.strip_prefix("mtp."), self.nextn) {
            (Some(own), Some(block)) => match layer(own, "layers.") {
                Some((0, rest)) => Some((block, self.layer, rest)),
                _ => Some((block, self.head, own)),
            },
            _ => layer(name, "layers.").map(|(index, rest)| (index, self.layer, rest)),
        }
    }

    /// See [`hugging_face_name`].
    pub(crate) fn hugging_face(&self, name: &str) -> Option<String> {
        let of = |table: &[(&str, &'static str)], name: &str| {
            table.iter().find(|(gguf, _)| *gguf == name).map(|(_, hf)| *hf)
        };
        match layer(name, "blk.") {
            Some((index, rest)) if self.nextn == Some(index) => match of(self.layer, rest) {
                Some(name) => Some(format!("mtp.layers.0.{name}")),
                None => of(self.head, rest).map(|name| format!("mtp.{name}")),
            },
            Some((index, rest)) => of(self.layer, rest).map(|name| format!("layers.{index}.{name}")),
            None => of(self.global, name).map(str::to_owned),
        }
    }

    /// Names of the separate gate and up projections that form `name`.
    pub(crate) fn split_gate_up(&self, name: &str) -> Option<(String, String)> {
        let (index, ..) = self.block(name).filter(|(_, table, rest)| with(table, rest).any(|own| own == GATE_UP))?;
        Some((format!("blk.{index}.ffn_gate_exps.weight"), format!("blk.{index}.ffn_up_exps.weight")))
    }
}

/// The possible GGUF names of the tensor `name` of a Gemma 4 at Hugging Face, the likeliest first;
/// empty if it has none.
pub fn gguf_names(name: &str) -> Vec<String> {
    GEMMA4.gguf(name)
}

/// The Hugging Face name of the tensor `name` of a Gemma 4's GGUF file, or `None`
/// (`rope_freqs.weight` exists only in GGUF).
pub fn hugging_face_name(name: &str) -> Option<String> {
    GEMMA4.hugging_face(name)
}

fn with<'a>(table: &'a [(&'static str, &'static str)], name: &'a str) -> impl Iterator<Item = &'static str> {
    table.iter().filter(move |(_, hf)| *hf == name).map(|(gguf, _)| *gguf)
}

/// The block of a NextN head among the tensors of a GGUF file, if it has one.
pub(super) fn nextn_block<'a>(mut tensors: impl Iterator<Item = &'a str>) -> Option<u32> {
    tensors.find_map(|name| layer(name, "blk.").filter(|(_, rest)| rest.starts_with("nextn.")).map(|(index, _)| index))
}

/// Splits `{prefix}{index}.{rest}`. The index must be canonical, so that no two names denote one tensor.
pub(crate) fn layer<'a>(name: &'a str, prefix: &str) -> Option<(u32, &'a str)> {
    let (digits, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    let index: u32 = digits.parse().ok()?;
    (index.to_string() == digits).then_some((index, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for (gguf, hf) in GLOBAL {
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
            GEMMA4.split_gate_up("layers.3.experts.gate_up_proj").map(|(gate, _)| gate).as_deref(),
            Some("blk.3.ffn_gate_exps.weight")
        );
        assert_eq!(GEMMA4.split_gate_up("layers.3.experts.down_proj"), None);
        let tensors = ["token_embd.weight", "nextn.pre_projection.weight", "blk.8.nextn.enorm.weight"];
        assert_eq!(nextn_block(tensors.into_iter()), Some(8));
    }
}
