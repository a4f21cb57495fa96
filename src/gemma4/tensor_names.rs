//! Which tensors of a checkpoint belong to no text model.

use super::config::TextConfig;

/// Tensors of image and audio towers, which text does not use.
pub(crate) fn is_tower(name: &str) -> bool {
    ["vision_", "audio_", "embed_vision", "embed_audio", "multi_modal_projector", "v.", "a.", "mm."]
        .iter()
        .any(|tower| name.strip_prefix("model.").unwrap_or(name).starts_with(tower))
}

/// Unused K and V weights of KV-shared layers, which published checkpoints contain.
pub(crate) fn is_dead(name: &str, prefix: &str, config: &TextConfig) -> bool {
    let layer = name.strip_prefix(prefix).and_then(|name| name.strip_prefix("layers."));
    let Some((index, rest)) = layer.and_then(|rest| rest.split_once('.')) else { return false };
    index.parse::<usize>().ok().and_then(|i| config.layers.get(i)).is_some_and(|layer| layer.kv_shared)
        && ["k_proj", "v_proj", "k_norm", "v_norm"].iter().any(|dead| rest.starts_with(&format!("self_attn.{dead}.")))
}
