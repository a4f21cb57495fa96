//! Checkpoints by name: `google/gemma-4-E2B-it`, or `owner/name:Q4_K_M` for one of a repository's GGUF
//! files, on the Hugging Face Hub (feature `hub`).

#[cfg(feature = "hub")]
mod client;
#[cfg(feature = "hub")]
mod gguf_files;
mod name;
mod options;

use std::path::{Path, PathBuf};

use crate::Result;
use name::name;
pub use options::{Download, HubOptions, OnDownload};

/// The directory or GGUF file of a checkpoint: `path` itself if it exists or cannot be a name on the Hub, else
/// downloaded from the Hub into [`HubOptions::cache`] (feature `hub`). `owner/name:TAG` is the GGUF file `name-TAG.gguf`
/// (without the `-GGUF` of the repository), or the only one with that tag in its name (`Q4_K_M`), with all its parts;
/// without a tag, a repository without safetensors must have exactly one GGUF file. If the Hub does not answer, it is
/// the only cached one with the tag.
///
/// # Errors
/// For a name on the Hub: [`Error::Download`](crate::Error::Download) if the Hub does not answer or refuses, the files
/// change during the download, or another process downloads them, [`Error::Io`](crate::Error::Io) if the cache cannot
/// be written, and [`Error::File`](crate::Error::File) if the repository is not a checkpoint, there is no cache, or the
/// build cannot download.
pub fn resolve(path: impl AsRef<Path>, options: &HubOptions) -> Result<PathBuf> {
    let path = path.as_ref();
    match name(path) {
        Some(name) if !path.exists() => download(name, options),
        _ => Ok(path.to_owned()),
    }
}

#[cfg(not(feature = "hub"))]
fn download(name::Name { repository, tag }: name::Name<'_>, _: &HubOptions) -> Result<PathBuf> {
    let files = tag.map_or(String::new(), |tag| format!(" --include \"*{tag}*.gguf\""));
    let command = format!("hf download {repository}{files} --local-dir models/{repository}");
    let problem = format!("does not exist; rebuild with --features hub, or download it with: {command}");
    Err(crate::Error::file(repository, problem))
}

#[cfg(feature = "hub")]
use client::download;
