//! What a GGUF file cannot represent of a tokenizer.json: its readers derive all steps but the merges from the names of
//! the model and the pre-tokenizer, so another step would give other ids.

use std::path::Path;

use serde_json::{Value, json};

use super::tokenizer_file::{AddedToken, TokenizerFile};
use crate::{Error, Result};

/// Checks that readers give the ids of `source`, for byte-level BPE with a pre-tokenizer that splits at
/// `pattern`; `None` if the family has none.
///
/// # Errors
/// If a step or a flag differs.
pub(super) fn check(path: &Path, source: &TokenizerFile, pattern: Option<&str>) -> Result<()> {
    let refused = |field: String, problem: String| {
        let problem = format!("{problem}, which a GGUF file cannot represent; use the directory");
        Err(Error::Config { path: path.to_owned(), field, problem })
    };
    let step = |field: &str, value: &Value| refused(field.into(), format!("is {}", shown(value)));
    if source.model.ignore_merges {
        return refused("model.ignore_merges".into(), "is true".into());
    }
    let normalizers = steps(&source.normalizer, "normalizers");
    let splits = steps(&source.pre_tokenizer, "pretokenizers");
    let (normalizes, splits) = if source.model.byte_fallback {
        if !source.model.fuse_unk {
            return refused("model.fuse_unk".into(), "is false".into());
        }
        (is_spaces(&normalizers), splits.iter().all(|split| is_split(split, &json!({ "String": " " }))))
    } else {
        let splits = pattern.is_some_and(|pattern| is_byte_level(&splits, pattern));
        (matches!(normalizers[..], [only] if only["type"] == "NFC"), splits)
    };
    if !normalizes {
        return step("normalizer", &source.normalizer);
    }
    if !splits {
        return step("pre_tokenizer", &source.pre_tokenizer);
    }
    // With byte fallback every text gets one <bos> whatever the step says.
    let adds = |step: &&Value| step["type"] != "ByteLevel" && step["single"].to_string().contains("SpecialToken");
    if !source.model.byte_fallback && steps(&source.post_processor, "processors").iter().any(adds) {
        return step("post_processor", &source.post_processor);
    }
    for token in &source.added_tokens {
        if let Some(flag) = flag(token) {
            return refused(format!("added_tokens.{flag}"), format!("is true for {:?}", token.content));
        }
    }
    Ok(())
}

/// The steps of a sequence, or the step itself.
fn steps<'a>(step: &'a Value, nested: &str) -> Vec<&'a Value> {
    match step[nested].as_array() {
        Some(all) => all.iter().flat_map(|step| steps(step, nested)).collect(),
        None if step.is_null() => Vec::new(),
        None => vec![step],
    }
}

/// Whether spaces become `▁`, and nothing else changes.
fn is_spaces(normalizers: &[&Value]) -> bool {
    matches!(normalizers, [only] if only["type"] == "Replace"
        && only["pattern"] == json!({ "String": " " }) && only["content"] == "\u{2581}")
}

/// Whether texts are split at `pattern`. (No spaces are left for Gemma's own split.)
fn is_split(step: &Value, pattern: &Value) -> bool {
    step["type"] == "Split" && step["pattern"] == *pattern && step["invert"] != true
}

/// Whether texts are split into the matches of `pattern`, and then are bytes.
fn is_byte_level(splits: &[&Value], pattern: &str) -> bool {
    let [split, bytes] = splits else { return false };
    is_split(split, &json!({ "Regex": pattern }))
        && split["behavior"] == "Isolated"
        && bytes["type"] == "ByteLevel"
        && bytes["add_prefix_space"] == false
        && bytes["use_regex"] == false
}

/// A flag of a token that is matched in another way than by its name in the text.
fn flag(token: &AddedToken) -> Option<&'static str> {
    // Normalizers leave ASCII without spaces unchanged.
    let changes = !token.content.is_ascii() || token.content.contains(' ');
    let flags = [
        ("lstrip", token.lstrip),
        ("rstrip", token.rstrip),
        ("single_word", token.single_word),
        ("normalized", token.normalized && changes),
    ];
    flags.into_iter().find(|(_, is_set)| *is_set).map(|(name, _)| name)
}

fn shown(value: &Value) -> String {
    const MAX: usize = 120;
    let text = value.to_string();
    match text.char_indices().nth(MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
