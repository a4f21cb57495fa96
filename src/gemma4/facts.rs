//! Summary of a Gemma 4 checkpoint.

use super::config::AttentionType;
use crate::Result;
use crate::checkpoint::{Checkpoint, OwnDrafter, TargetFacts};

/// Summarizes a target.
///
/// # Errors
/// If the configuration needs something that is not implemented, or there is no embedding under any known prefix.
pub(crate) fn facts(checkpoint: &Checkpoint) -> Result<TargetFacts> {
    let config = checkpoint.target_config()?;
    let of_type = |attention| config.layers.iter().filter(|layer| layer.attention == attention).count();
    let layers = format!(
        "{}: {} full, {} with a window of {}",
        config.layers.len(),
        of_type(AttentionType::Full),
        of_type(AttentionType::Sliding),
        config.sliding_window
    );
    let shared = config.layers.len() - config.num_own_kv_layers();
    let mut parts = Vec::new();
    if let Some(moe) = &config.moe {
        parts.push(format!("{} of {} experts for a token", moe.top_k_experts, moe.num_experts));
    }
    if config.hidden_size_per_layer_input > 0 {
        parts.push(format!("per-layer embeddings of {}", config.hidden_size_per_layer_input));
    }
    if shared > 0 {
        parts.push(format!("{shared} layers read the K and V of earlier ones"));
    }
    Ok(TargetFacts {
        family: "Gemma 4",
        layers,
        parts,
        hidden_size: config.hidden_size,
        vocab_size: config.vocab_size,
        max_position_embeddings: config.max_position_embeddings,
        kv_layout: config.kv_layout(),
        state_bytes: 0,
        weight_bytes: checkpoint.target_bytes(&config)?,
        step_bytes: checkpoint.target_step_bytes(&config)?,
        has_experts: config.moe.is_some(),
        own_drafter: OwnDrafter::Assistant,
    })
}
