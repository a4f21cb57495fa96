//! The Hub client: downloads a repository's files into a cache in the layout of Hugging Face's own tools.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use super::gguf_files::{certain, in_directory, likely, parts, tagged};
use super::name::Name;
use super::options::{Download, HubOptions, OnDownload};
use crate::checkpoint::{HEAD, weights};
use crate::error::panic_message;
use crate::{Error, Result};

/// Small files of a checkpoint; only the first is required.
const DESCRIPTIONS: [&str; 8] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
];

const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The repository's directory or GGUF file in the cache, complete.
pub(super) fn download(name: Name<'_>, options: &HubOptions) -> Result<PathBuf> {
    // Paths follow it with a slash of their own.
    let endpoint = options.endpoint.trim_end_matches('/').to_owned();
    let options = &HubOptions { endpoint, ..options.clone() };
    let cache = match &options.cache {
        // The client compares path components, so paths have to be absolute.
        Some(path) => std::path::absolute(path).map_err(Error::io(path))?,
        None => {
            let problem =
                "does not exist, and no cache directory is set; set HubOptions::cache, or download it yourself";
            return Err(Error::file(name.repository, problem));
        }
    };
    let cache = Cache::new(cache);
    let repo = |revision: &str| Repo::with_revision(name.repository.to_owned(), RepoType::Model, revision.to_owned());
    let cached = cache.repo(repo(name.revision()));
    if let Some(path) = complete(&cached, name) {
        return Ok(path);
    }
    if options.offline {
        let problem = "is not complete in the cache, and downloads are disabled; enable them, or use hf download";
        return cached_or(failure(name, None, problem), &cached, name);
    }
    let mut api = ApiBuilder::from_cache(cache).with_endpoint(options.endpoint.clone());
    if options.token.is_some() {
        api = api.with_token(options.token.clone());
    }
    let client = api.build().map_err(|e| failure(name, None, problem(&options.endpoint, &e)))?;
    let api = client.repo(repo(name.revision()));
    let mut download = Downloads { api, client, cache: cached, snapshot: PathBuf::new(), name, options };
    let info = match download.info() {
        Ok(info) => info,
        Err(error @ Error::Download { status: Some(..500), .. }) => return Err(error),
        Err(error) => {
            let problem = error.to_string();
            return cached_or(error, &download.cache, name).inspect(|path| {
                let path = path.display();
                tracing::warn!(error = problem, %path, "the Hub does not answer; using the cached file");
            });
        }
    };
    // All files of one commit, whatever is pushed meanwhile.
    let commit = name.commit().unwrap_or(&info.sha);
    (download.api, download.snapshot) = (download.client.repo(repo(commit)), download.cache.pointer_path(commit));
    let files: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
    let has = |file: &str| files.contains(&file);
    let is_gguf =
        name.tag.is_some() || !has(WEIGHTS) && !has(INDEX) && files.iter().any(|file| file.ends_with(".gguf"));
    let path = if is_gguf { download.gguf(&files) } else { download.safetensors(&files) }?;
    // The cache records the commit of a branch or tag once its files are complete.
    if name.commit().is_none() {
        download.cache.create_ref(commit).map_err(Error::io(&download.snapshot))?;
    }
    Ok(path)
}

/// The directory or the GGUF file of an earlier complete download.
fn complete(cache: &CacheRepo, name: Name<'_>) -> Option<PathBuf> {
    let Some(config) = cached(cache, name, DESCRIPTIONS[0]).filter(|_| name.tag.is_none()) else {
        return cached_gguf(cache, name, certain);
    };
    let directory = directory_of(&config);
    let whole = directory.join(WEIGHTS);
    let files = match cached(cache, name, INDEX) {
        Some(index) => weights(directory, &index, whole.exists()).ok()?,
        None => vec![whole],
    };
    files.iter().all(|file| file.exists()).then(|| directory.to_owned())
}

/// The cached `file` of the name's revision; "" is its directory. A commit's files may have been downloaded by the name
/// of a branch.
fn cached(cache: &CacheRepo, name: Name<'_>, file: &str) -> Option<PathBuf> {
    match name.commit() {
        Some(commit) => Some(cache.pointer_path(commit).join(file)).filter(|path| path.exists()),
        None => cache.get(file),
    }
}

/// Chooses the file that a name means.
type Choose = for<'a> fn(&[&'a str], Name<'_>) -> Option<&'a str>;

/// The one of the cached files that `choose` returns, if all its parts are there.
fn cached_gguf(cache: &CacheRepo, name: Name<'_>, choose: Choose) -> Option<PathBuf> {
    let snapshot = cached(cache, name, "")?;
    let files = in_directory(&snapshot);
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let file = choose(&files, name)?;
    parts(file, &files).map(|_| snapshot.join(file))
}

/// The only cached file with the tag: the file that the name meant when it was downloaded, as far as the cache shows.
/// Else `error`, with the files that are there.
fn cached_or(mut error: Error, cache: &CacheRepo, name: Name<'_>) -> Result<PathBuf> {
    if let Some(path) = name.tag.and_then(|_| cached_gguf(cache, name, likely)) {
        return Ok(path);
    }
    let files = cached(cache, name, "").map(|snapshot| in_directory(&snapshot)).unwrap_or_default();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let found = tagged(&files, name);
    if let Error::Download { problem, .. } = &mut error
        && !found.is_empty()
    {
        *problem += &format!("; cached GGUF files{}: {}", tagged_as(name.tag), listed(&found));
    }
    Err(error)
}

fn directory_of(file: &Path) -> &Path {
    file.parent().unwrap_or(Path::new("."))
}

struct Downloads<'a> {
    client: Api,
    api: ApiRepo,
    cache: CacheRepo,
    snapshot: PathBuf, // the cache's directory of the commit, once it is known
    name: Name<'a>,
    options: &'a HubOptions,
}

impl Downloads<'_> {
    /// The names of the repository's files.
    fn info(&self) -> Result<RepoInfo> {
        let failed = |e| self.failed("", &ApiError::RequestError(Box::new(e)));
        // Without the client, whose errors have no headers.
        let response = self.api.info_request().config().http_status_as_error(false).build().call();
        let mut response = response.map_err(failed)?;
        let status = response.status().as_u16();
        if status != 200 {
            let wait = response.headers().get(RETRY_AFTER).and_then(|wait| seconds(wait.to_str().ok()?));
            return Err(self.refused("", status, wait));
        }
        response.body_mut().read_json().map_err(failed)
    }

    /// A checkpoint in safetensors; returns its directory.
    fn safetensors(&self, files: &[&str]) -> Result<PathBuf> {
        let has = |file: &str| files.contains(&file);
        for missing in [DESCRIPTIONS[0], WEIGHTS].into_iter().filter(|file| !has(file)) {
            if missing != WEIGHTS || !has(INDEX) {
                return Err(Error::file(
                    self.name.repository,
                    format!("has no {missing}; it is not a checkpoint in safetensors or GGUF"),
                ));
            }
        }
        // Weights last: their presence means that the download is complete.
        for file in DESCRIPTIONS.into_iter().filter(|file| has(file)) {
            self.file(file)?;
        }
        if has(INDEX) {
            let index = self.file(INDEX)?;
            for file in weights(directory_of(&index), &index, has(WEIGHTS))? {
                self.file(&file.file_name().unwrap_or_default().to_string_lossy())?;
            }
        } else {
            for file in [HEAD, WEIGHTS].into_iter().filter(|file| has(file)) {
                self.file(file)?;
            }
        }
        Ok(self.snapshot.clone())
    }

    /// A GGUF file with all its parts; returns the first.
    fn gguf(&self, files: &[&str]) -> Result<PathBuf> {
        let Name { repository, revision, tag } = self.name;
        let none = || Error::file(repository, format!("has no GGUF file{}; it has {}", tagged_as(tag), listed(files)));
        let found = tagged(files, self.name);
        let file = match found[..] {
            [] => return Err(none()),
            [one] => one,
            _ => {
                let problem = format!("has several GGUF files{}", tagged_as(tag));
                let at = revision.map_or(String::new(), |revision| format!("@{revision}"));
                let remedy =
                    format!("choose one ({repository}{at}:TAG, a part of its name, or the name without .gguf)");
                return Err(Error::file(repository, format!("{problem}: {}; {remedy}", listed(&found))));
            }
        };
        let parts = parts(file, files).ok_or_else(|| Error::file(repository, format!("is missing parts of {file}")))?;
        let paths = parts.into_iter().map(|part| self.file(part)).collect::<Result<Vec<_>>>()?;
        paths.into_iter().next().ok_or_else(none)
    }

    fn file(&self, name: &str) -> Result<PathBuf> {
        if !Path::new(name).components().all(|part| matches!(part, Component::Normal(_))) {
            return Err(Error::file(self.name.repository, format!("lists a file {name:?} outside the repository")));
        }
        let own = self.snapshot.join(name);
        if own.exists() {
            return Ok(own);
        }
        let mut retries = 0;
        loop {
            let (progress, file) = (self.options.progress.clone(), name.to_owned());
            let mut listener = Listener { progress, file, first: None, done: 0, total: 0, calling: false };
            // Not with the client's retries: one that failed before its first byte would append the whole file.
            let result = match caught(|| self.api.download_with_progress(name, &mut listener)) {
                Ok(result) => result,
                Err(panic) if listener.calling => resume_unwind(panic),
                Err(panic) => {
                    let (at, cause) = (&self.options.endpoint, panic_message(&*panic));
                    let problem = format!("the response cannot be used ({cause}); check the endpoint");
                    return Err(failure(self.name, None, format!("cannot be downloaded from {at}, {name}: {problem}")));
                }
            };
            let error = match result {
                Ok(path) => match self.check_length(name, &path, &listener) {
                    Ok(()) if path == own => return Ok(own),
                    Ok(()) => {
                        let (at, problem) = (&self.options.endpoint, "it is of another commit; check the endpoint");
                        let problem = format!("cannot be downloaded from {at}, {name}: {problem}");
                        return Err(failure(self.name, None, problem));
                    }
                    Err(error) => error,
                },
                // Another attempt would not help.
                Err(ApiError::IoError(cause)) if is_of_file(&cause) => {
                    return Err(Error::io(directory_of(&self.cache.blob_path("")))(cause));
                }
                Err(error) if status(&error) == Some(429) => {
                    return Err(self.refused(&format!(", {name}"), 429, self.wait(name)));
                }
                Err(error) if status(&error).is_some_and(|status| status != RANGE_NOT_SATISFIABLE) => {
                    return Err(self.failed(&format!(", {name}"), &error));
                }
                Err(error) => {
                    if matches!(error, ApiError::InvalidResume) || status(&error) == Some(RANGE_NOT_SATISFIABLE) {
                        self.remove_part(name);
                    }
                    self.failed(&format!(", {name}"), &error)
                }
            };
            if retries == self.options.retries {
                return Err(error);
            }
            retries += 1;
            std::thread::sleep(RETRY_WAIT * retries as u32);
        }
    }

    /// Removes the downloaded file `name` if it is incomplete, or longer because it was resumed: a server that ignores
    /// ranges sends the whole file, which is appended to what an interrupted download left. (A file may be longer than
    /// announced if it is compressed in transfer.)
    fn check_length(&self, name: &str, path: &Path, Listener { first, total, .. }: &Listener) -> Result<()> {
        let own = std::fs::metadata(path).map_err(Error::io(path))?.len();
        let is_resumed = first.is_some_and(|bytes| bytes > 0);
        if own == *total || own > *total && !is_resumed {
            return Ok(());
        }
        // The content, then the link to it.
        path.canonicalize().and_then(std::fs::remove_file).map_err(Error::io(path))?;
        let _ = std::fs::remove_file(path); // where there are no links, it is the content
        let what = format!("{}, {name}: received {own} bytes instead of {total}", self.options.endpoint);
        let remedy = "try again, or download it with hf download";
        Err(failure(self.name, None, format!("cannot be downloaded from {what}; {remedy}")))
    }

    /// Removes the partial file that interrupted downloads of `name` left. It is as long as the file, or longer: no
    /// range is left to request.
    fn remove_part(&self, name: &str) {
        // Errors are ignored: if the file cannot be removed, the next attempt fails as this one.
        if let Ok(Ok(metadata)) = caught(|| self.client.metadata(&self.api.url(name))) {
            let _ = std::fs::remove_file(self.cache.blob_path(metadata.etag()).with_extension("part"));
        }
    }

    /// The server's retry delay for the file `name` in seconds, from another request: the client's
    /// errors have no headers.
    fn wait(&self, name: &str) -> Option<u64> {
        let request = self.api.info_request().uri(self.api.url(name)).header("range", "bytes=0-0");
        let response = request.config().http_status_as_error(false).build().call().ok()?;
        seconds(response.headers().get(RETRY_AFTER)?.to_str().ok()?)
    }

    fn failed(&self, what: &str, error: &ApiError) -> Error {
        match status(error) {
            Some(status) => self.refused(what, status, None),
            None => {
                let at = format!("{}{what}", self.options.endpoint);
                failure(self.name, None, problem(&at, error))
            }
        }
    }

    /// The server's refusal, with the retry delay in seconds if it sent one.
    fn refused(&self, what: &str, status: u16, wait: Option<u64>) -> Error {
        let (repository, endpoint) = (self.name.repository, &self.options.endpoint);
        let remedy = match (status, wait) {
            (404, _) if self.name.revision.is_some() => "check the name and the revision".into(),
            (404, _) => "check the name".into(),
            // The Hub also answers 401 for names that do not exist.
            (401 | 403, _) => format!(
                "check the name; a repository that is not public or gated needs a token (hf auth login), and its terms \
                 accepted at {endpoint}/{repository}"
            ),
            (429, Some(wait)) => format!("too many requests: try again in {wait} s, or use a token (hf auth login)"),
            (429, None) => "too many requests: try again in a few minutes, or use a token (hf auth login)".into(),
            _ => "try again to resume, or download it with hf download".into(),
        };
        let problem = format!("cannot be downloaded from {endpoint}{what}: http status {status}; {remedy}");
        failure(self.name, Some(status), problem)
    }
}

/// Delay before the first retry; it grows by this with each one.
const RETRY_WAIT: Duration = Duration::from_millis(500);

/// The HTTP status of a request for bytes after the end of a file.
const RANGE_NOT_SATISFIABLE: u16 = 416;

/// The header with the retry delay.
const RETRY_AFTER: &str = "retry-after";

/// The seconds to wait in the header, a number or a date.
fn seconds(header: &str) -> Option<u64> {
    header.trim().parse().ok().or_else(|| {
        let date = jiff::fmt::rfc2822::DateTimeParser::new().parse_timestamp(header).ok()?;
        Some(u64::try_from(date.as_second() - jiff::Timestamp::now().as_second()).unwrap_or(0))
    })
}

fn tagged_as(tag: Option<&str>) -> String {
    tag.map_or(String::new(), |tag| format!(" with {tag:?} in its name"))
}

/// File names, for a one-line error.
fn listed(files: &[&str]) -> String {
    const SHOWN: usize = 24;
    let files: Vec<&str> = files.iter().copied().filter(|file| file.ends_with(".gguf")).collect();
    match files.len() {
        0 => "none".into(),
        len if len > SHOWN => format!("{} and {} more", files[..SHOWN].join(", "), len - SHOWN),
        _ => files.join(", "),
    }
}

fn failure(name: Name<'_>, status: Option<u16>, problem: impl Into<String>) -> Error {
    Error::Download { repository: name.repository.to_owned(), status, problem: problem.into() }
}

/// Catches a panic of the client: it panics at some malformed responses, such as a redirect to nowhere.
fn caught<T>(request: impl FnOnce() -> T) -> std::thread::Result<T> {
    catch_unwind(AssertUnwindSafe(request))
}

/// Whether a failed copy from the network to a file failed at the file.
fn is_of_file(cause: &std::io::Error) -> bool {
    use std::io::ErrorKind as E;
    let full = matches!(cause.kind(), E::StorageFull | E::QuotaExceeded | E::FileTooLarge | E::ReadOnlyFilesystem);
    let path = [E::PermissionDenied, E::NotFound, E::AlreadyExists, E::NotADirectory, E::IsADirectory];
    full || path.contains(&cause.kind())
}

/// The HTTP status of an error.
fn status(error: &ApiError) -> Option<u16> {
    let text = error.to_string();
    text.rsplit_once("http status: ").and_then(|(_, status)| status.trim().parse().ok())
}

/// Sums the client's increments.
struct Listener {
    progress: Option<OnDownload>,
    file: String,
    first: Option<u64>, // the first increment: what an interrupted download left
    done: u64,
    total: u64,
    calling: bool, // whether `progress` runs, or panicked
}

impl hf_hub::api::Progress for &mut Listener {
    fn init(&mut self, size: usize, _: &str) {
        (self.first, self.done, self.total) = (None, 0, size as u64);
    }

    fn update(&mut self, size: usize) {
        if self.first.is_none() {
            self.first = Some(size as u64);
            tracing::info!(file = self.file, present = size, bytes = self.total, "downloading");
        }
        self.done += size as u64;
        if let Some(progress) = &self.progress {
            self.calling = true;
            progress(Download { file: &self.file, done: self.done, total: self.total });
            self.calling = false;
        }
    }

    fn finish(&mut self) {}
}

/// One line: the error and the remedy.
fn problem(at: &str, error: &ApiError) -> String {
    let error = error.to_string().split_whitespace().collect::<Vec<_>>().join(" ");
    format!("cannot be downloaded from {at}: {error}; try again to resume, or download it with hf download")
}
