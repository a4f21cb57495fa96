//! Any bytes at all as config.json, a target's and an assistant's, and as generation_config.json.

use super::{checked, file};
use foretoken::checkpoint::Fields;
use foretoken::gemma4::{AssistantConfig, AttentionType, TextConfig};

const TARGET: &str = "config";

fn look(config: &TextConfig) {
    assert!(config.num_readable_tokens() <= config.vocab_size);
    assert!(config.num_own_kv_layers() <= config.layers.len());
    for attention in [AttentionType::Sliding, AttentionType::Full] {
        let donor = config.kv_donor(attention);
        assert!(donor.is_none_or(|layer| layer < config.num_own_kv_layers()));
    }
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
    checked(fields.token_ids("eos_token_id"));
    checked(fields.token_ids("suppress_tokens"));
}
