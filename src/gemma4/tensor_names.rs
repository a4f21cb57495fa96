//! Tensors of a checkpoint that its model may leave unused.

use super::config::TextConfig;

/// Tables that an assistant may leave unused: the target's embedding, which embeds its tokens, and the one of its own
/// embedding and output head that does not score them.
pub(crate) fn is_assistants_table(name: &str) -> bool {
    ["lm_head.weight", "embed_tokens.weight", "model.embed_tokens.weight", "mtp_input_embd.weight"].contains(&name)
}

/// Unused K and V weights of KV-shared layers, which published checkpoints contain, and their
/// scales, which are under their names in GGUF.
pub(crate) fn is_unused_kv(name: &str, prefix: &str, config: &TextConfig) -> bool {
    let of_gguf = name.strip_prefix("blk.");
    let layer = of_gguf.or_else(|| name.strip_prefix(prefix)?.strip_prefix("layers."));
    let Some((index, rest)) = layer.and_then(|rest| rest.split_once('.')) else { return false };
    let unused: &[&str] = match of_gguf {
        Some(_) => &["attn_k.", "attn_v."],
        None => &["self_attn.k_proj.", "self_attn.v_proj.", "self_attn.k_norm.", "self_attn.v_norm."],
    };
    index.parse::<usize>().ok().and_then(|i| config.layers.get(i)).is_some_and(|layer| layer.kv_shared)
        && unused.iter().any(|unused| rest.starts_with(unused))
}
