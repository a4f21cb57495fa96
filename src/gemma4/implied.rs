//! The tensors implied by a configuration, listed separately from the modules that load them: a
//! loader stops at its first error, a report must not.

use super::config::{AssistantConfig, LayerConfig, TextConfig};
use crate::Result;
use crate::checkpoint::{Checkpoint, Expected, Implied, Kind, is_head, is_unread};

#[derive(Default)]
struct List(Vec<Expected>);

impl List {
    fn push(&mut self, kind: Kind, name: impl Into<String>, shape: &[usize]) {
        self.0.push(Expected { name: name.into(), shape: shape.to_vec(), kind });
    }

    /// Tensors common to layers of targets and assistants.
    fn layer(&mut self, at: &str, config: &TextConfig, layer: &LayerConfig) {
        let (hidden, ffn) = (config.hidden_size, layer.intermediate_size);
        let queries = config.num_attention_heads * layer.head_dim;
        for norm in ["input", "post_attention", "pre_feedforward", "post_feedforward"] {
            self.push(Kind::Gain, format!("{at}{norm}_layernorm.weight"), &[hidden]);
        }
        self.push(Kind::Gain, format!("{at}layer_scalar"), &[1]);
        self.push(Kind::Matrix, format!("{at}self_attn.q_proj.weight"), &[queries, hidden]);
        self.push(Kind::Gain, format!("{at}self_attn.q_norm.weight"), &[layer.head_dim]);
        self.push(Kind::Matrix, format!("{at}self_attn.o_proj.weight"), &[hidden, queries]);
        self.push(Kind::Matrix, format!("{at}mlp.gate_proj.weight"), &[ffn, hidden]);
        self.push(Kind::Matrix, format!("{at}mlp.up_proj.weight"), &[ffn, hidden]);
        self.push(Kind::Matrix, format!("{at}mlp.down_proj.weight"), &[hidden, ffn]);
    }
}

/// What a target's configuration implies.
///
/// # Errors
/// If there is no embedding under any known prefix, or the configuration needs something that is not implemented.
pub(crate) fn implied(checkpoint: &Checkpoint) -> Result<Implied> {
    let config = checkpoint.target_config()?;
    let prefix = checkpoint.text_prefix()?;
    let mut tensors = target(&config);
    tensors.iter_mut().for_each(|tensor| tensor.name = format!("{prefix}{}", tensor.name));
    if !config.tie_word_embeddings {
        let shape = vec![config.vocab_size, config.hidden_size];
        let name = checkpoint.names().into_iter().find(|name| is_head(name));
        let name = name.unwrap_or_else(|| "lm_head.weight".into());
        tensors.push(Expected { name, shape, kind: Kind::Matrix });
    }
    let tensors = checkpoint.with_separate_experts(tensors);
    let summary = format!("{} layers, hidden size {}", config.layers.len(), config.hidden_size);
    let vocab_size = config.vocab_size;
    let is_known = move |name: &str| is_unread(name, prefix, &config) || is_head(name);
    Ok(Implied { summary, vocab_size, tensors, is_known: Box::new(is_known) })
}

/// Tensors of a target.
fn target(config: &TextConfig) -> Vec<Expected> {
    let mut list = List::default();
    let (hidden, vocab, width) = (config.hidden_size, config.vocab_size, config.hidden_size_per_layer_input);
    let embedding = if config.tie_word_embeddings { Kind::Matrix } else { Kind::Table };
    list.push(embedding, "embed_tokens.weight", &[vocab, hidden]);
    list.push(Kind::Gain, "norm.weight", &[hidden]);
    if width > 0 {
        let all = width * config.layers.len();
        list.push(Kind::Table, "embed_tokens_per_layer.weight", &[config.vocab_size_per_layer_input, all]);
        list.push(Kind::Matrix, "per_layer_model_projection.weight", &[all, hidden]);
        list.push(Kind::Gain, "per_layer_projection_norm.weight", &[width]);
    }
    for (i, layer) in config.layers.iter().enumerate() {
        let at = format!("layers.{i}.");
        list.layer(&at, config, layer);
        if !layer.kv_shared {
            let kv = layer.num_kv_heads * layer.head_dim;
            list.push(Kind::Matrix, format!("{at}self_attn.k_proj.weight"), &[kv, hidden]);
            list.push(Kind::Gain, format!("{at}self_attn.k_norm.weight"), &[layer.head_dim]);
            if !layer.k_eq_v {
                list.push(Kind::Matrix, format!("{at}self_attn.v_proj.weight"), &[kv, hidden]);
            }
        }
        if width > 0 {
            list.push(Kind::Matrix, format!("{at}per_layer_input_gate.weight"), &[width, hidden]);
            list.push(Kind::Matrix, format!("{at}per_layer_projection.weight"), &[hidden, width]);
            list.push(Kind::Gain, format!("{at}post_per_layer_input_norm.weight"), &[hidden]);
        }
        if let Some(moe) = &config.moe {
            let (count, ffn) = (moe.num_experts, moe.intermediate_size);
            list.push(Kind::Matrix, format!("{at}router.proj.weight"), &[count, hidden]);
            list.push(Kind::Gain, format!("{at}router.scale"), &[hidden]);
            list.push(Kind::Gain, format!("{at}router.per_expert_scale"), &[count]);
            list.push(Kind::Matrix, format!("{at}experts.gate_up_proj"), &[count, 2 * ffn, hidden]);
            list.push(Kind::Matrix, format!("{at}experts.down_proj"), &[count, hidden, ffn]);
            for norm in ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
            {
                list.push(Kind::Gain, format!("{at}{norm}.weight"), &[hidden]);
            }
        }
    }
    list.0
}

/// Tensors of an assistant, with the names of its checkpoints. Its tokens are embedded by the target, so that of
/// embedding and output head only the one that scores tokens is required.
pub(crate) fn implied_of_assistant(config: &AssistantConfig) -> Vec<Expected> {
    let mut list = List::default();
    let (text, backbone) = (&config.text, config.backbone_hidden_size);
    let (hidden, vocab) = (text.hidden_size, text.vocab_size);
    list.push(Kind::Matrix, "pre_projection.weight", &[hidden, 2 * backbone]);
    list.push(Kind::Matrix, "post_projection.weight", &[backbone, hidden]);
    let head = if text.tie_word_embeddings { "model.embed_tokens.weight" } else { "lm_head.weight" };
    list.push(Kind::Matrix, head, &[vocab, hidden]);
    list.push(Kind::Gain, "model.norm.weight", &[hidden]);
    for (i, layer) in text.layers.iter().enumerate() {
        list.layer(&format!("model.layers.{i}."), text, layer);
    }
    if let Some(centroids) = &config.centroids {
        list.push(Kind::Matrix, "masked_embedding.centroids.weight", &[centroids.num_centroids, hidden]);
        list.push(Kind::Ordering, "masked_embedding.token_ordering", &[vocab]);
    }
    list.0
}
