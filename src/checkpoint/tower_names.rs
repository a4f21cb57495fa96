//! The names of image and audio towers.

/// Whether the tensor is part of a tower, which text does not use: of any family, and in combined GGUF files (`v.`,
/// `a.`, `mm.`).
pub(crate) fn is_tower(name: &str) -> bool {
    ["visual.", "vision_", "audio_", "embed_vision", "embed_audio", "multi_modal_projector", "v.", "a.", "mm."]
        .iter()
        .any(|tower| name.strip_prefix("model.").unwrap_or(name).starts_with(tower))
}
