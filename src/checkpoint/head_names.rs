//! The names of the output head.

/// Published, and nested in other ways.
pub(super) const HEADS: [&str; 4] =
    ["lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight", "model.language_model.lm_head.weight"];

/// Whether the tensor is the output head.
pub(crate) fn is_head(name: &str) -> bool {
    HEADS.contains(&name)
}
