//! Any bytes at all as config.json, a target's of either family and an assistant's, and as generation_config.json.

use super::{checked, file};
use foretoken::checkpoint::Fields;
use foretoken::gemma4::{AssistantConfig, AttentionType, TextConfig};
use foretoken::qwen35;

const TARGET: &str = "config";

fn look(config: &TextConfig) {
    assert!(config.num_readable_tokens() <= config.vocab_size);
    assert!(config.num_own_kv_layers() <= config.layers.len());
    for attention in [AttentionType::Sliding, AttentionType::Full] {
        let donor = config.kv_donor(attention);
        assert!(donor.is_none_or(|layer| layer < config.num_own_kv_layers()));
    }
}

fn look_at_qwen(config: &qwen35::TextConfig) {
    let net = &config.delta_net;
    assert!(config.num_attention_heads.is_multiple_of(config.num_key_value_heads));
    assert!(net.num_value_heads.is_multiple_of(net.num_key_heads));
    assert!(config.rotary_dim <= config.head_dim && config.rotary_dim.is_multiple_of(2));
    assert!(config.moe.as_ref().is_none_or(|moe| moe.num_experts_per_tok <= moe.num_experts));
}

/// Reads `data`.
pub fn read(data: &[u8]) {
    let Some(fields) = checked(Fields::read(file(TARGET, "config.json", data))) else { return };
    if let Some(config) = checked(TextConfig::target(&fields)) {
        look(&config);
    }
    if let Some(config) = checked(AssistantConfig::read(&fields)) {
        look(&config.text);
    }
    if let Some(config) = checked(qwen35::TextConfig::target(&fields)) {
        look_at_qwen(&config);
    }
    checked(fields.token_ids("eos_token_id"));
    checked(fields.token_ids("suppress_tokens"));
}
