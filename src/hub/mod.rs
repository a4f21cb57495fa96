//! Checkpoints by name: `google/gemma-4-E2B-it`, or `owner/name:Q4_K_M` for one of a repository's GGUF
//! files, on the Hugging Face Hub (feature `hub`); with a revision, `owner/name@revision` or
//! `owner/name@revision:Q4_K_M`.

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
/// without a tag, a repository without safetensors must have exactly one GGUF file. If the Hub does not answer, or
/// [`HubOptions::offline`] is set, it is the only cached one with the tag.
///
/// `owner/name@revision` and `owner/name@revision:TAG` name the files of that branch, tag or commit; without a
/// revision, those of the branch `main`. All files are of one commit: the one that is named (40 hexadecimal digits), or
/// that of the branch or tag when the download began. A branch or tag whose files are cached is not compared with the
/// Hub's.
///
/// # Errors
/// For a name on the Hub: [`Error::Download`](crate::Error::Download) if the Hub does not answer or refuses, sends
/// files of another commit, another process downloads them, or the cache lacks some and [`HubOptions::offline`] is set,
/// [`Error::Io`](crate::Error::Io) if the cache cannot be written, and [`Error::File`](crate::Error::File) if the
/// repository is not a checkpoint, there is no cache, or the build cannot download.
pub fn resolve(path: impl AsRef<Path>, options: &HubOptions) -> Result<PathBuf> {
    let path = path.as_ref();
    match name(path) {
        Some(name) if !path.exists() => download(name, options),
        _ => Ok(path.to_owned()),
    }
}

#[cfg(not(feature = "hub"))]
fn download(name::Name { repository, revision, tag }: name::Name<'_>, _: &HubOptions) -> Result<PathBuf> {
    let revision = revision.map_or(String::new(), |revision| format!(" --revision {revision}"));
    let files = tag.map_or(String::new(), |tag| format!(" --include \"*{tag}*.gguf\""));
    let command = format!("hf download {repository}{revision}{files} --local-dir models/{repository}");
    let problem = format!("does not exist; rebuild with --features hub, or download it with: {command}");
    Err(crate::Error::file(repository, problem))
}

#[cfg(feature = "hub")]
use client::download;
