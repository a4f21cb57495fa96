//! Any bytes at all as config.json, a target's and an assistant's, and as generation_config.json.

#![no_main]

use foretoken::checkpoint::Fields;
use foretoken::gemma4::{AssistantConfig, AttentionType, TextConfig};
use foretoken_fuzz::{checked, file};
use libfuzzer_sys::fuzz_target;

fn look(config: &TextConfig) {
    assert!(config.num_readable_tokens() <= config.vocab_size);
    assert!(config.num_own_kv_layers() <= config.layers.len());
    for attention in [AttentionType::Sliding, AttentionType::Full] {
        let donor = config.kv_donor(attention);
        assert!(donor.is_none_or(|layer| layer < config.num_own_kv_layers()));
    }
}

fuzz_target!(|data: &[u8]| {
    let Some(fields) = checked(Fields::read(file("config.json", data))) else { return };
    if let Some(config) = checked(TextConfig::target(&fields)) {
        look(&config);
    }
    if let Some(config) = checked(AssistantConfig::read(&fields)) {
        look(&config.text);
    }
    checked(fields.token_ids("eos_token_id"));
    checked(fields.token_ids("suppress_tokens"));
});
