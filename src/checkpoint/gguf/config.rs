//! Metadata that files of every family have: each key that affects the computation is implemented or refused by name.

use std::collections::HashSet;

use super::file::Gguf;
use super::keys::{Keys, number};
use crate::checkpoint::other_models::SUPPORTED;
use crate::{Error, Result};

/// Maximum number of end-of-generation or suppressed tokens.
pub(crate) const MAX_IDS: usize = 1 << 16;

/// The key of the file's architecture.
pub(crate) const ARCHITECTURE: &str = "general.architecture";

/// The file's architecture.
///
/// # Errors
/// If it is missing or no short text.
pub(crate) fn architecture(gguf: &Gguf) -> Result<&str> {
    let missing = || gguf.key_error(ARCHITECTURE, "is missing, so this is not a model; use the model's file");
    Keys::new(gguf, "").optional_str(ARCHITECTURE)?.ok_or_else(missing)
}

/// The suppressed tokens of the file.
///
/// # Errors
/// If the key is malformed.
pub fn suppressed_tokens(gguf: &Gguf) -> Result<Vec<u32>> {
    Keys::new(gguf, "").token_ids("tokenizer.ggml.suppress_tokens", MAX_IDS)
}

/// End-of-generation tokens.
pub(crate) fn eos_token_ids(keys: &Keys<'_>) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
        ids.extend(keys.optional_token_id(&format!("tokenizer.ggml.{key}"))?);
    }
    ids.extend(keys.token_ids("tokenizer.ggml.eos_token_ids", MAX_IDS)?);
    let mut seen = HashSet::new();
    ids.retain(|id| seen.insert(*id));
    Ok(ids)
}

/// Refuses unsupported values that change the computation, for every family.
///
/// # Errors
/// If a key has one.
pub(crate) fn refuse_unsupported(keys: &Keys<'_>) -> Result<()> {
    // Weights in a rotated basis, whose inputs are rotated as well.
    if let Some(key) = keys.gguf().keys().find(|key| key.starts_with("prism.hadamard.")) {
        let (path, what) = (Some(keys.gguf().path().to_owned()), key.to_owned());
        let problem = "is of rotated weights, which are not implemented; use a file without it (Q4_K_M, Q6_K, Q8_0)";
        return Err(Error::Unsupported { path, what, problem: problem.into() });
    }
    // Linear scaling by a factor of 1, all that is allowed below, is none.
    if let Some(kind) = keys.optional_str("rope.scaling.type")?.filter(|kind| !matches!(*kind, "none" | "linear")) {
        return Err(
            keys.unsupported("rope.scaling.type", format!("{kind:?} is not implemented; use a file without it"))
        );
    }
    for (key, neutral) in [("attention.causal", true), ("expert_weights_norm", true)] {
        if keys.optional_bool(key)?.is_some_and(|value| value != neutral) {
            return Err(keys.unsupported(key, format!("is {}, which is not implemented", !neutral)));
        }
    }
    only(keys, "attn_logit_softcapping", &[0.0])?;
    for factor in ["rope.scaling.factor", "rope.scale_linear"] {
        only(keys, factor, &[1.0, 0.0])?; // 0 means none, as in llama.cpp
    }
    only(keys, "rope.scaling.attn_factor", &[1.0])?;
    if let Some(kind) = keys.value("pooling_type").filter(|kind| number(*kind) != Some(0.0)) {
        let problem = format!("is {kind:?}: an embedding model, which generates no text; {SUPPORTED}");
        return Err(keys.unsupported("pooling_type", problem));
    }
    only(keys, "expert_gating_func", &[1.0, 0.0])?; // softmax, absent
    only(keys, "expert_weights_scale", &[1.0, 0.0]) // 0 means none, as in llama.cpp
}

/// Refuses a number that is not in `neutral`; the error names the first of them.
///
/// # Errors
/// If the key has one.
pub(crate) fn only(keys: &Keys<'_>, key: &str, neutral: &[f64]) -> Result<()> {
    match keys.value(key).filter(|value| !number(*value).is_some_and(|value| neutral.contains(&value))) {
        None => Ok(()),
        Some(value) => {
            let problem = format!("is {value:?}; anything but {} is not implemented", neutral[0]);
            Err(keys.unsupported(key, problem))
        }
    }
}

/// Rows of a table: the vocabulary size, which has no key.
pub(crate) fn rows(gguf: &Gguf, name: &str) -> Result<usize> {
    let missing = || gguf.error(name, "is missing; the checkpoint is incomplete or of another architecture");
    let table = gguf.info(name).ok_or_else(missing)?;
    match table.shape() {
        [rows, _] if *rows < 1 << 31 => Ok(*rows),
        shape => Err(gguf.error(name, format!("has shape {shape:?}, must be a matrix"))),
    }
}
