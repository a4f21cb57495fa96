//! Summary of a Qwen3.5 checkpoint.

use super::config::{LayerType, TextConfig};
use super::nextn::{LM_HEAD, has_nextn, is_unread_nextn};
use crate::Result;
use crate::checkpoint::{Checkpoint, OwnDrafter, TargetFacts, is_head, is_tower};

/// Summarizes a target.
///
/// # Errors
/// If the configuration needs something that is not implemented.
pub(crate) fn facts(checkpoint: &Checkpoint) -> Result<TargetFacts> {
    let config = TextConfig::of(checkpoint)?;
    let linear = config.layers.iter().filter(|layer| **layer == LayerType::Linear).count();
    let (net, head) = (&config.delta_net, checkpoint.head_name());
    let moe =
        |moe: &super::MoeConfig| format!("{} of {} experts for a token", moe.num_experts_per_tok, moe.num_experts);
    let is_unread =
        |name: &str| is_tower(name) || config.tie_word_embeddings && is_head(name) || is_unread_nextn(checkpoint, name);
    let state: usize = net.state_len().into_iter().sum();
    let of = |name: &str, dimensions: usize, bytes: u64| {
        let is_gathered = name.ends_with("embed_tokens.weight")
            && (!config.tie_word_embeddings || name.starts_with("mtp."))
            || name == head && config.tie_word_embeddings;
        if dimensions < 2 || is_gathered || is_tower(name) {
            return 0;
        }
        match config.moe.as_ref().filter(|_| name.contains(".experts.") || name.contains("_exps.")) {
            Some(moe) => bytes / moe.num_experts as u64 * moe.num_experts_per_tok as u64,
            None => bytes,
        }
    };
    // Drafts are scored by the trunk's output head, or by their own, which is under `mtp.`.
    let has_own_table = checkpoint.has(LM_HEAD);
    let is_table = |name: &str| {
        !has_own_table && (name == head || config.tie_word_embeddings && name.ends_with("embed_tokens.weight"))
    };
    let step_bytes =
        checkpoint.sum_of_tensors(|name, n, bytes| if name.starts_with("mtp.") { 0 } else { of(name, n, bytes) });
    let draft_bytes =
        checkpoint.sum_of_tensors(
            |name, n, bytes| if name.starts_with("mtp.") || is_table(name) { of(name, n, bytes) } else { 0 },
        );
    Ok(TargetFacts {
        family: "Qwen3.5",
        layers: format!("{}: {linear} delta nets, {} full", config.layers.len(), config.layers.len() - linear),
        parts: config.moe.iter().map(moe).collect(),
        hidden_size: config.hidden_size,
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        kv_layout: config.kv_layout(),
        state_bytes: 4 * (linear * state) as u64,
        weight_bytes: checkpoint.sum_of_tensors(|name, _, bytes| if is_unread(name) { 0 } else { bytes }),
        step_bytes,
        has_experts: config.moe.is_some(),
        own_drafter: if has_nextn(checkpoint) { OwnDrafter::NextnHead(draft_bytes) } else { OwnDrafter::NoHead },
    })
}
