//! Checkpoints by name: `google/gemma-4-E2B-it` on the Hugging Face Hub.

use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The directory of a checkpoint: `path` itself if it exists or cannot be a name on the Hub, else the Hub's, downloaded
/// (feature `hub`).
///
/// # Errors
/// If `path` is a name on the Hub and the build cannot download; the error says the command that can.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    if path.exists() || repository(path).is_none() {
        return Ok(path.to_owned());
    }
    let name = path.display();
    Err(Error::Input(format!("{name} is no directory here; download it: hf download {name} --local-dir models/{name}")))
}

/// `owner/name`, if that is what `path` is.
fn repository(path: &Path) -> Option<&str> {
    let (owner, name) = path.to_str()?.split_once('/')?;
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    (plain(owner) && plain(name)).then_some(path.to_str()?)
}
