//! The parts of a tokenizer.json that a GGUF file has.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
pub(super) struct TokenizerFile {
    #[serde(default)]
    pub added_tokens: Vec<AddedToken>,
    #[serde(default)]
    pub normalizer: Value,
    #[serde(default)]
    pub pre_tokenizer: Value,
    #[serde(default)]
    pub post_processor: Value,
    pub model: Model,
}

#[derive(Deserialize)]
pub(super) struct AddedToken {
    pub id: u32,
    pub content: String,
    #[serde(default)]
    pub special: bool,
    #[serde(default)]
    pub lstrip: bool,
    #[serde(default)]
    pub rstrip: bool,
    #[serde(default)]
    pub single_word: bool,
    #[serde(default)]
    pub normalized: bool,
}

#[derive(Deserialize)]
pub(super) struct Model {
    #[serde(rename = "type")]
    pub kind: String,
    #[serde(default)]
    pub byte_fallback: bool,
    #[serde(default)]
    pub fuse_unk: bool,
    #[serde(default)]
    pub ignore_merges: bool,
    pub unk_token: Option<String>,
    pub vocab: HashMap<String, u32>,
    pub merges: Vec<Merge>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Merge {
    Joined(String),
    Pair([String; 2]),
}
