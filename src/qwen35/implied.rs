//! The tensors implied by a configuration, listed separately from the modules that load them: a
//! loader stops at its first error, a report must not.

use std::collections::BTreeSet;

use super::config::{LayerType, TensorLayout, TextConfig};
use super::nextn::{EMBED_TOKENS, LM_HEAD, has_nextn, is_unread_nextn};
use crate::Result;
use crate::checkpoint::{Checkpoint, Expected, Implied, Kind, is_head, is_tower};

/// What a target's configuration implies, including the NextN head's tensors if any of them is present.
///
/// # Errors
/// If there is no embedding under any known prefix, or the configuration needs something that is not implemented.
pub(crate) fn implied(checkpoint: &Checkpoint) -> Result<Implied> {
    let config = TextConfig::of(checkpoint)?;
    let (prefix, hidden, vocab) = (checkpoint.text_prefix()?, config.hidden_size, config.vocab_size);
    let mut list = List { config: &config, tensors: Vec::new() };
    let embedding = if config.tie_word_embeddings { Kind::Matrix } else { Kind::Table };
    list.push(embedding, format!("{prefix}embed_tokens.weight"), &[vocab, hidden]);
    list.norm(format!("{prefix}norm.weight"), hidden);
    if !config.tie_word_embeddings {
        list.push(Kind::Matrix, checkpoint.head_name().into(), &[vocab, hidden]);
    }
    for (i, layer) in config.layers.iter().enumerate() {
        list.layer(&format!("{prefix}layers.{i}."), *layer);
    }
    let has_head = has_nextn(checkpoint);
    if has_head {
        for norm in ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"] {
            list.norm(format!("mtp.{norm}.weight"), hidden);
        }
        list.push(Kind::Matrix, "mtp.fc.weight".into(), &[hidden, 2 * hidden]);
        list.layer("mtp.layers.0.", LayerType::Full);
        // Of heads with their own.
        if config.mtp_use_dedicated_embeddings || checkpoint.has(EMBED_TOKENS) {
            list.push(Kind::Table, EMBED_TOKENS.into(), &[vocab, hidden]);
        }
        if checkpoint.has(LM_HEAD) {
            list.push(Kind::Matrix, LM_HEAD.into(), &[vocab, hidden]);
        }
    }
    let tensors = checkpoint.with_separate_experts(list.tensors);
    let head = if has_head { ", a NextN head" } else { "" };
    let summary = format!("{} layers, hidden size {hidden}{head}", config.layers.len());
    let mut unread = checkpoint.names();
    unread.retain(|name| is_unread_nextn(checkpoint, name));
    let unread = BTreeSet::from_iter(unread);
    let is_known = move |name: &str| is_tower(name) || is_head(name) || unread.contains(name);
    Ok(Implied { summary, vocab_size: vocab, tensors, is_known: Box::new(is_known) })
}

struct List<'a> {
    config: &'a TextConfig,
    tensors: Vec<Expected>,
}

impl List<'_> {
    fn push(&mut self, kind: Kind, name: String, shape: &[usize]) {
        self.tensors.push(Expected { name, shape: shape.to_vec(), kind });
    }

    /// Adds a zero-centred norm, which may be all zeros in one of the layouts.
    fn norm(&mut self, name: String, width: usize) {
        let kind = match self.config.tensor_layout {
            TensorLayout::HuggingFace => Kind::Vector,
            TensorLayout::Gguf => Kind::Gain,
        };
        self.push(kind, name, &[width]);
    }

    fn layer(&mut self, at: &str, layer: LayerType) {
        let hidden = self.config.hidden_size;
        self.norm(format!("{at}input_layernorm.weight"), hidden);
        self.norm(format!("{at}post_attention_layernorm.weight"), hidden);
        match layer {
            LayerType::Full => self.attention(&format!("{at}self_attn.")),
            LayerType::Linear => self.delta_net(&format!("{at}linear_attn.")),
        }
        self.feed_forward(&format!("{at}mlp."));
    }

    fn attention(&mut self, at: &str) {
        let (hidden, width) = (self.config.hidden_size, self.config.head_dim);
        let (heads, kv) = (self.config.num_attention_heads * width, self.config.num_key_value_heads * width);
        for (name, rows, columns) in
            [("q", 2 * heads, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, heads)]
        {
            self.push(Kind::Matrix, format!("{at}{name}_proj.weight"), &[rows, columns]);
        }
        self.norm(format!("{at}q_norm.weight"), width);
        self.norm(format!("{at}k_norm.weight"), width);
    }

    fn delta_net(&mut self, at: &str) {
        let (hidden, net) = (self.config.hidden_size, &self.config.delta_net);
        let (channels, values, heads, taps) = (net.channels(), net.values(), net.num_value_heads, net.conv_kernel_dim);
        for (name, rows) in [("qkv", channels), ("z", values), ("b", heads), ("a", heads)] {
            self.push(Kind::Matrix, format!("{at}in_proj_{name}.weight"), &[rows, hidden]);
        }
        let conv: &[usize] = match self.config.tensor_layout {
            TensorLayout::HuggingFace => &[channels, 1, taps],
            TensorLayout::Gguf => &[channels, taps],
        };
        self.push(Kind::Vector, format!("{at}conv1d.weight"), conv);
        self.push(Kind::Vector, format!("{at}dt_bias"), &[heads]);
        self.push(Kind::Vector, format!("{at}A_log"), &[heads]);
        self.push(Kind::Gain, format!("{at}norm.weight"), &[net.value_head_dim]);
        self.push(Kind::Matrix, format!("{at}out_proj.weight"), &[hidden, values]);
    }

    fn feed_forward(&mut self, at: &str) {
        let hidden = self.config.hidden_size;
        let Some(moe) = &self.config.moe else { return self.mlp(at, self.config.intermediate_size) };
        let (count, width) = (moe.num_experts, moe.intermediate_size);
        self.push(Kind::Matrix, format!("{at}gate.weight"), &[count, hidden]);
        let gate: &[usize] = match self.config.tensor_layout {
            TensorLayout::HuggingFace => &[1, hidden],
            TensorLayout::Gguf => &[hidden],
        };
        self.push(Kind::Matrix, format!("{at}shared_expert_gate.weight"), gate);
        self.mlp(&format!("{at}shared_expert."), moe.shared_intermediate_size);
        self.push(Kind::Matrix, format!("{at}experts.gate_up_proj"), &[count, 2 * width, hidden]);
        self.push(Kind::Matrix, format!("{at}experts.down_proj"), &[count, hidden, width]);
    }

    fn mlp(&mut self, at: &str, width: usize) {
        let hidden = self.config.hidden_size;
        for (name, shape) in [("gate", [width, hidden]), ("up", [width, hidden]), ("down", [hidden, width])] {
            self.push(Kind::Matrix, format!("{at}{name}_proj.weight"), &shape);
        }
    }
}
