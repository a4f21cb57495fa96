//! Where checkpoints are downloaded from and to.

use std::path::PathBuf;
use std::sync::Arc;

/// The Hub endpoint and the cache directory.
#[derive(Clone)]
pub struct HubOptions {
    /// The Hub, or a mirror of it that is trusted: the client makes paths of the ETags and commits in its responses
    /// without checking them, so a hostile one could write files outside the cache. Default: `https://huggingface.co`.
    pub endpoint: String,
    /// Download directory, in the layout of Hugging Face's own tools (theirs is `.cache/huggingface/hub` in the home
    /// directory; use that to download nothing twice). Default: none; nothing is downloaded.
    pub cache: Option<PathBuf>,
    /// Access token for private and gated repositories. Default: the one stored by `hf auth login` next to the cache.
    pub token: Option<String>,
    /// Whether only the cache is used, without any request to the Hub. Default: false.
    pub offline: bool,
    /// How often an interrupted download is resumed before it is an error. Default: 3.
    pub retries: usize,
    /// Called as a file is downloaded. Default: none.
    pub progress: Option<OnDownload>,
}

impl Default for HubOptions {
    fn default() -> Self {
        let endpoint = "https://huggingface.co".into();
        Self { endpoint, cache: None, token: None, offline: false, retries: 3, progress: None }
    }
}

/// A callback for download progress.
pub type OnDownload = Arc<dyn Fn(Download<'_>) + Send + Sync>;

/// Progress of a file's download.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Download<'a> {
    /// Name of the file in its repository.
    pub file: &'a str,
    /// Bytes present, including those of an interrupted earlier download.
    pub done: u64,
    /// Bytes of the file.
    pub total: u64,
}
