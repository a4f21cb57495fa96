//! An assistant merged into its target's directory: its tensors under `mtp.`, its configuration as
//! a field of the target's.

use std::path::Path;
use std::sync::OnceLock;

use super::fields::Fields;
use super::files::{Checkpoint, Files};
use crate::Result;

/// The field of config.json with the assistant's own.
const FIELD: &str = "mtp_assistant_config";
/// Paths of the field.
const PLACES: [&[&str]; 2] = [&["text_config", FIELD], &[FIELD]];
/// Prefix of the assistant's tensor names, which those of the model around it were removed from.
const PREFIX: &str = "mtp.";

impl Checkpoint {
    /// Opens an assistant: a checkpoint, or the assistant inside its target's.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_assistant(path: impl AsRef<Path>) -> Result<Self> {
        let checkpoint = Self::open(path)?;
        Ok(checkpoint.inner_assistant()?.unwrap_or(checkpoint))
    }

    /// The assistant inside the checkpoint of its target, a directory; `None` if there is none, or
    /// it has no configuration.
    ///
    /// # Errors
    /// If config.json is malformed.
    pub fn inner_assistant(&self) -> Result<Option<Self>> {
        let Files::HuggingFace(tensors) = &self.files else { return Ok(None) };
        if !tensors.names().iter().any(|name| name.starts_with(PREFIX)) {
            return Ok(None);
        }
        let config = self.config()?;
        let place = PLACES.into_iter().find(|place| nested(&config, place).is_ok_and(|found| found.is_some()));
        let inner = |place: &'static [&'static str]| Self {
            path: self.path.clone(),
            files: Files::HuggingFace(tensors.under(PREFIX)),
            config: place,
            has_own_head: OnceLock::new(),
        };
        Ok(place.map(inner))
    }
}

/// The object in a nested field; `None` if it is absent.
fn nested(fields: &Fields, place: &[&str]) -> Result<Option<Fields>> {
    let Some((first, rest)) = place.split_first() else { return Ok(Some(fields.clone())) };
    fields.optional_object(first)?.map_or(Ok(None), |inner| nested(&inner, rest))
}

/// Whether a tensor belongs to an assistant inside its target, by the names that converters use.
pub(crate) fn is_inner_assistants(name: &str) -> bool {
    let named = ["pre_projection.", "post_projection.", "masked_embedding.", "assistant.", "mtp_", PREFIX];
    named.iter().any(|part| name.starts_with(part)) || name.contains("nextn.")
}
