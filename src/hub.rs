//! Checkpoints by name: `google/gemma-4-E2B-it` on the Hugging Face Hub (feature `hub`).

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{Error, Result};

/// The Hub endpoint and the cache directory.
#[derive(Clone)]
pub struct HubOptions {
    /// The Hub, or a mirror of it. Default: `https://huggingface.co`.
    pub endpoint: String,
    /// Directory of the downloads, in the layout that Hugging Face's own tools use (theirs is `.cache/huggingface/hub`
    /// in the home directory; give that, and nothing is downloaded twice). Default: none; nothing is downloaded.
    pub cache: Option<PathBuf>,
    /// Access token for repositories that are not public. Default: the one stored by `hf auth login` beside the cache.
    pub token: Option<String>,
    /// Called as a file is downloaded. Default: none.
    pub progress: Option<OnDownload>,
}

impl Default for HubOptions {
    fn default() -> Self {
        Self { endpoint: "https://huggingface.co".into(), cache: None, token: None, progress: None }
    }
}

/// A callback for download progress.
pub type OnDownload = Arc<dyn Fn(Download<'_>) + Send + Sync>;

/// Progress of a file's download.
#[derive(Clone, Copy, Debug)]
pub struct Download<'a> {
    /// Name of the file in its repository.
    pub file: &'a str,
    /// Bytes present, those of an interrupted earlier download included.
    pub done: u64,
    /// Bytes of the file.
    pub total: u64,
}

/// The directory of a checkpoint: `path` itself if it exists or cannot be a name on the Hub, else the Hub's, downloaded
/// (feature `hub`).
///
/// # Errors
/// If `path` is a name on the Hub and the build cannot download, or the download fails; the error says what to do.
pub fn resolve(path: &Path) -> Result<PathBuf> {
    resolve_with(path, &HubOptions::default())
}

/// As [`resolve`], with options.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_with(path: &Path, options: &HubOptions) -> Result<PathBuf> {
    match repository(path) {
        Some(name) if !path.exists() => download(name, options),
        _ => Ok(path.to_owned()),
    }
}

/// `owner/name`, if that is what `path` is.
fn repository(path: &Path) -> Option<&str> {
    let whole = path.to_str()?;
    let (owner, name) = whole.split_once('/')?;
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    (plain(owner) && plain(name)).then_some(whole)
}

#[cfg(not(feature = "hub"))]
fn download(name: &str, _: &HubOptions) -> Result<PathBuf> {
    Err(Error::file(name, format!("is no directory here; download it: hf download {name} --local-dir models/{name}")))
}

#[cfg(feature = "hub")]
use client::download;

#[cfg(feature = "hub")]
mod client {
    use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
    use hf_hub::{Cache, CacheRepo, Repo};

    use super::{Download, Error, HubOptions, OnDownload, Path, PathBuf, Result};
    use crate::checkpoint::shards;

    /// Small files of a checkpoint; only the first is required.
    const DESCRIPTIONS: [&str; 5] =
        ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];

    const WEIGHTS: &str = "model.safetensors";
    const INDEX: &str = "model.safetensors.index.json";

    /// The directory of repository `name` in the cache, complete.
    pub(super) fn download(name: &str, options: &HubOptions) -> Result<PathBuf> {
        let cache = match &options.cache {
            // The client compares path components, so paths have to be absolute.
            Some(path) => std::path::absolute(path).map_err(Error::io(path))?,
            None => {
                let problem =
                    "is no directory here, and none is named for downloads; name one, or download it yourself";
                return Err(Error::file(name, problem));
            }
        };
        let cache = Cache::new(cache);
        let repo = Repo::model(name.to_owned());
        if let Some(directory) = complete(&cache.repo(repo.clone())) {
            return Ok(directory);
        }
        let mut api = ApiBuilder::from_cache(cache.clone()).with_endpoint(options.endpoint.clone());
        if options.token.is_some() {
            api = api.with_token(options.token.clone());
        }
        let failed = |what: &str| {
            let (name, at) = (name.to_owned(), format!("{}{what}", options.endpoint));
            move |e: ApiError| Error::file(&name, problem(&at, &e))
        };
        let download =
            Downloads { api: api.build().map_err(failed(""))?.repo(repo.clone()), cache: cache.repo(repo), options };

        let files = download.api.info().map_err(failed(""))?.siblings;
        let has = |file: &str| files.iter().any(|sibling| sibling.rfilename == file);
        let fetch = |file: &str| download.file(file).map_err(failed(&format!(", {file}")));
        for missing in [DESCRIPTIONS[0], WEIGHTS].into_iter().filter(|file| !has(file)) {
            if missing != WEIGHTS || !has(INDEX) {
                return Err(Error::file(name, format!("has no {missing}; this is no checkpoint in safetensors")));
            }
        }
        // Weights last: if they are present, everything is.
        for file in DESCRIPTIONS.into_iter().filter(|file| has(file)) {
            fetch(file)?;
        }
        if has(INDEX) {
            let index = fetch(INDEX)?;
            for shard in shards(directory_of(&index), &index)? {
                fetch(&shard.file_name().unwrap_or_default().to_string_lossy())?;
            }
        } else {
            fetch(WEIGHTS)?;
        }
        complete(&download.cache)
            .ok_or_else(|| Error::file(name, "was changed on the Hub while it was downloaded; start again"))
    }

    /// The directory of an earlier complete download.
    fn complete(cache: &CacheRepo) -> Option<PathBuf> {
        let config = cache.get(DESCRIPTIONS[0])?;
        let directory = directory_of(&config);
        let weights = match cache.get(INDEX) {
            Some(index) => shards(directory, &index).ok()?,
            None => vec![directory.join(WEIGHTS)],
        };
        weights.iter().all(|file| file.exists()).then(|| directory.to_owned())
    }

    fn directory_of(file: &Path) -> &Path {
        file.parent().unwrap_or(Path::new("."))
    }

    struct Downloads<'a> {
        api: ApiRepo,
        cache: CacheRepo,
        options: &'a HubOptions,
    }

    impl Downloads<'_> {
        fn file(&self, name: &str) -> Result<PathBuf, ApiError> {
            if let Some(path) = self.cache.get(name) {
                return Ok(path);
            }
            let file = name.to_owned();
            let listener = Listener { progress: self.options.progress.clone(), file, done: 0, total: 0 };
            self.api.download_with_progress(name, listener)
        }
    }

    /// Sums the client's increments.
    struct Listener {
        progress: Option<OnDownload>,
        file: String,
        done: u64,
        total: u64,
    }

    impl hf_hub::api::Progress for Listener {
        fn init(&mut self, size: usize, _: &str) {
            (self.done, self.total) = (0, size as u64);
        }

        fn update(&mut self, size: usize) {
            self.done += size as u64;
            if let Some(progress) = &self.progress {
                progress(Download { file: &self.file, done: self.done, total: self.total });
            }
        }

        fn finish(&mut self) {}
    }

    /// One line: the error and the remedy.
    fn problem(at: &str, error: &ApiError) -> String {
        let error = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
        // The Hub also answers 401 for names that do not exist.
        let remedy = match error.as_str() {
            e if e.ends_with("404") || e.ends_with("401") || e.ends_with("403") => {
                "check the name; a repository that is not public needs a token (hf auth login)"
            }
            _ => "try again, it goes on where it stopped; or download it with hf download",
        };
        format!("cannot be downloaded from {at}: {error}; {remedy}")
    }
}
