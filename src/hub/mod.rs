//! Checkpoints by name: `google/gemma-4-E2B-it`, or `owner/name:Q4_K_M` for one of a repository's GGUF files, on the Hugging Face
//! Hub (feature `hub`).

#[cfg(feature = "hub")]
mod client;
#[cfg(feature = "hub")]
mod gguf_files;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::Result;

/// The Hub endpoint and the cache directory.
#[derive(Clone)]
pub struct HubOptions {
    /// The Hub, or a mirror of it. Default: `https://huggingface.co`.
    pub endpoint: String,
    /// Download directory, in the layout of Hugging Face's own tools (theirs is `.cache/huggingface/hub` in the home directory;
    /// use that to download nothing twice). Default: none; nothing is downloaded.
    pub cache: Option<PathBuf>,
    /// Access token for private and gated repositories. Default: the one stored by `hf auth login` next to the cache.
    pub token: Option<String>,
    /// How often an interrupted download is resumed before it is an error. Default: 3.
    pub retries: usize,
    /// Called as a file is downloaded. Default: none.
    pub progress: Option<OnDownload>,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self { endpoint: "https://huggingface.co".into(), cache: None, token: None, retries: 3, progress: None }
    }
}

/// A callback for download progress.
pub type OnDownload = Arc<dyn Fn(Download<'_>) + Send + Sync>;

/// Progress of a file's download.
#[derive(Clone, Copy, Debug)]
pub struct Download<'a> {
    /// Name of the file in its repository.
    pub file: &'a str,
    /// Bytes present, including those of an interrupted earlier download.
    pub done: u64,
    /// Bytes of the file.
    pub total: u64,
}

/// The directory or GGUF file of a checkpoint: `path` itself if it exists or cannot be a name on the Hub, else downloaded from
/// the Hub (feature `hub`). `owner/name:TAG` is the GGUF file with that tag in its name (`Q4_K_M`), with all its parts; without a
/// tag, a repository without safetensors must have exactly one GGUF file.
///
/// # Errors
/// If `path` is a name on the Hub and the build cannot download, or the download fails; the error contains a remedy.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    resolve_with(path, &HubOptions::default())
}

/// As [`resolve`], with options.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_with(path: &Path, options: &HubOptions) -> Result<PathBuf> {
    match name(path) {
        Some(name) if !path.exists() => download(name, options),
        _ => Ok(path.to_owned()),
    }
}

/// A repository, and the tag of a GGUF file in it.
#[derive(Clone, Copy)]
struct Name<'a> {
    /// `owner/name`.
    repository: &'a str,
    tag: Option<&'a str>,
}

/// Parses `owner/name` or `owner/name:tag`.
fn name(path: &Path) -> Option<Name<'_>> {
    let whole = path.to_str()?;
    let (repository, tag) = match whole.split_once(':') {
        Some((repository, tag)) => (repository, Some(tag)),
        None => (whole, None),
    };
    let (owner, name) = repository.split_once('/')?;
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    (plain(owner) && plain(name) && tag.is_none_or(plain)).then_some(Name { repository, tag })
}

#[cfg(not(feature = "hub"))]
fn download(Name { repository, tag }: Name<'_>, _: &HubOptions) -> Result<PathBuf> {
    let files = tag.map_or(String::new(), |tag| format!(" --include \"*{tag}*.gguf\""));
    let command = format!("hf download {repository}{files} --local-dir models/{repository}");
    Err(crate::Error::file(repository, format!("does not exist; download it with: {command}")))
}

#[cfg(feature = "hub")]
use client::download;
