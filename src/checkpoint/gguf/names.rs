//! Tensor names: llama.cpp's and Hugging Face's, without the latter's prefix (`model.language_model.`, `model.`).
//!
//! Assistants exist in four layouts: `nextn.*`, llama.cpp's; `mtp.*`, `mtp_*` and `assistant.*`, those of forks.

/// Names in GGUF, and the same at Hugging Face.
type Table = &'static [(&'static str, &'static str)];

/// The names of an architecture: in GGUF, at Hugging Face. Several in GGUF may be one there.
pub struct Names {
    global: Table,
    layer: Table,
    gate_up: &'static str,
    /// The block of a NextN head, which Hugging Face has under `mtp.`.
    nextn: Option<u32>,
}

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
const LAYER: [(&str, &str); 26] = [
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
    (GATE_UP, GATE_UP_HF),
    ("ffn_down_exps.weight", "experts.down_proj"),
    ("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight"),
    ("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight"),
    ("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight"),
];

const GATE_UP: &str = "ffn_gate_up_exps.weight";
const GATE_UP_HF: &str = "experts.gate_up_proj";

/// Qwen3.5's names inside layer `i`.
const QWEN35_LAYER: [(&str, &str); 27] = [
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
const NEXTN: [(&str, &str); 4] = [
    ("nextn.eh_proj.weight", "fc.weight"),
    ("nextn.enorm.weight", "pre_fc_norm_embedding.weight"),
    ("nextn.hnorm.weight", "pre_fc_norm_hidden.weight"),
    ("nextn.shared_head_norm.weight", "norm.weight"),
];

const GEMMA4: Names = Names { global: &GLOBAL, layer: &LAYER, gate_up: GATE_UP_HF, nextn: None };

impl Names {
    /// The names in files of an architecture, whose tensors are `tensors`.
    pub(super) fn of<'a>(architecture: &str, mut tensors: impl Iterator<Item = &'a str>) -> Self {
        if !architecture.starts_with("qwen35") {
            return GEMMA4;
        }
        let block = |name: &str| layer(name, "blk.").filter(|(_, rest)| rest.starts_with("nextn.")).map(|(i, _)| i);
        Self::of_qwen35(tensors.find_map(block))
    }

    /// Qwen3.5's, whose NextN head is block `nextn`.
    pub(crate) fn of_qwen35(nextn: Option<u32>) -> Self {
        // Embedding, norm and output head are those of every architecture.
        let (global, gate_up) = (&GLOBAL[..3], "mlp.experts.gate_up_proj");
        Names { global, layer: &QWEN35_LAYER, gate_up, nextn }
    }

    /// Of a single expert's matrix at Hugging Face: the name of the stack in GGUF, its place among the matrices there, and how many
    /// of those an expert has.
    pub(crate) fn of_expert(&self, name: &str) -> Option<(String, usize, usize)> {
        let (block, _, rest) = self.block(name)?;
        let (expert, rest) = layer(rest, "mlp.experts.").map(|(expert, rest)| (expert as usize, rest))?;
        let (stack, index, per_expert) = match rest {
            "gate_proj.weight" => (GATE_UP, 2 * expert, 2),
            "up_proj.weight" => (GATE_UP, 2 * expert + 1, 2),
            "down_proj.weight" => ("ffn_down_exps.weight", expert, 1),
            _ => return None,
        };
        Some((format!("blk.{block}.{stack}"), index, per_expert))
    }

    /// The block of the NextN head, if the file has one.
    pub(crate) fn nextn(&self) -> Option<u32> {
        self.nextn
    }

    /// See [`gguf_names`].
    pub(crate) fn gguf(&self, name: &str) -> Vec<String> {
        match self.block(name) {
            Some((index, table, rest)) => with(table, rest).map(|name| format!("blk.{index}.{name}")).collect(),
            None => with(self.global, name).map(str::to_owned).collect(),
        }
    }

    /// Of a name at Hugging Face inside a layer or a head: the block in GGUF, its table, and the name in there.
    fn block<'a>(&self, name: &'a str) -> Option<(u32, Table, &'a str)> {
        match (name.strip_prefix("mtp."), self.nextn) {
            (Some(own), Some(block)) => match layer(own, "layers.") {
                Some((0, rest)) => Some((block, self.layer, rest)),
                _ => Some((block, &NEXTN, own)),
            },
            _ => layer(name, "layers.").map(|(index, rest)| (index, self.layer, rest)),
        }
    }

    /// See [`hugging_face_name`].
    pub(super) fn hugging_face(&self, name: &str) -> Option<String> {
        let of = |table: &[(&str, &'static str)], name: &str| {
            table.iter().find(|(gguf, _)| *gguf == name).map(|(_, hf)| *hf)
        };
        match layer(name, "blk.") {
            Some((index, rest)) if self.nextn == Some(index) => match of(self.layer, rest) {
                Some(name) => Some(format!("mtp.layers.0.{name}")),
                None => of(&NEXTN, rest).map(|name| format!("mtp.{name}")),
            },
            Some((index, rest)) => of(self.layer, rest).map(|name| format!("layers.{index}.{name}")),
            None => of(self.global, name).map(str::to_owned),
        }
    }

    /// Names of the separate gate and up projections that form `name`.
    pub(super) fn split_gate_up(&self, name: &str) -> Option<(String, String)> {
        let (index, ..) = self.block(name).filter(|(_, _, rest)| *rest == self.gate_up)?;
        Some((format!("blk.{index}.ffn_gate_exps.weight"), format!("blk.{index}.ffn_up_exps.weight")))
    }
}

/// The names that the tensor `name` of a Gemma 4 at Hugging Face can have in a GGUF file, the likeliest first; none if it
/// has none.
pub fn gguf_names(name: &str) -> Vec<String> {
    GEMMA4.gguf(name)
}

/// The name at Hugging Face of the tensor `name` of a Gemma 4's GGUF file, or `None` (`rope_freqs.weight` is GGUF's own).
pub fn hugging_face_name(name: &str) -> Option<String> {
    GEMMA4.hugging_face(name)
}

fn with<'a>(table: &'a [(&'static str, &'static str)], name: &'a str) -> impl Iterator<Item = &'static str> {
    table.iter().filter(move |(_, hf)| *hf == name).map(|(gguf, _)| *gguf)
}

/// Splits `{prefix}{index}.{rest}`. The index must be canonical, so that no two names denote one tensor.
fn layer<'a>(name: &'a str, prefix: &str) -> Option<(u32, &'a str)> {
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
        for stranger in ["rope_freqs.weight", "blk.01.attn_q.weight", "blk.+1.attn_q.weight", "blk.1", "blk..x", ""] {
            assert_eq!(hugging_face_name(stranger), None, "{stranger}");
        }
        assert!(gguf_names("layers.3.attn_q.weight").is_empty());
        assert_eq!(
            GEMMA4.split_gate_up("layers.3.experts.gate_up_proj").map(|(gate, _)| gate).as_deref(),
            Some("blk.3.ffn_gate_exps.weight")
        );
        assert_eq!(GEMMA4.split_gate_up("layers.3.experts.down_proj"), None);
    }

    #[test]
    fn a_nextn_head_is_a_block() {
        let names = Names::of(
            "qwen35moe",
            ["token_embd.weight", "blk.3.attn_q.weight", "blk.8.nextn.enorm.weight"].into_iter(),
        );
        assert_eq!(names.nextn(), Some(8));
        for (gguf, hf) in QWEN35_LAYER {
            for (gguf, hf) in [("blk.3.", "layers.3."), ("blk.8.", "mtp.layers.0.")]
                .map(|(before, behind)| (format!("{before}{gguf}"), format!("{behind}{hf}")))
            {
                assert_eq!(names.hugging_face(&gguf).as_ref(), Some(&hf));
                assert_eq!(names.gguf(&hf), [gguf]);
            }
        }
        for (gguf, hf) in NEXTN {
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
