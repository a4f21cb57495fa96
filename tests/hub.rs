//! Checkpoints by name, against a small server with the Hub's routes on the loopback interface.
#![cfg(feature = "hub")]

mod cases;
mod refusal;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use foretoken::hub::{HubOptions, resolve};
use foretoken::{Engine, EngineOptions, Error, GenerateOptions, SessionOptions};
use refusal::refused;
use serde_json::json;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const OTHER_COMMIT: &str = "89abcdef0123456789abcdef0123456789abcdef";
const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// Served files, and the log of requests.
#[derive(Default)]
struct State {
    /// Files by `owner/name/file`; those of a commit that is not `main`'s by `owner/name@COMMIT/file`.
    files: BTreeMap<String, Vec<u8>>,
    /// First lines of requests, with the requested range.
    requests: Vec<String>,
    /// Bytes of a body after which the connection breaks; once.
    break_after: Option<usize>,
    /// The token that requests need.
    token: Option<&'static str>,
    /// The commit of `main`. Default: [`COMMIT`].
    commit: Option<&'static str>,
    /// Other revisions, and their commits.
    revisions: Vec<(&'static str, &'static str)>,
    /// The commit that files are sent as. Default: theirs.
    sent_as: Option<&'static str>,
    /// Whether files are sent whole, whatever range is requested.
    ignores_ranges: bool,
    /// Status and headers of every response to paths that contain this.
    refuse: Option<(&'static str, &'static str)>,
}

impl State {
    /// The commit of a revision, and the name of its repository in `files`.
    fn revision(&self, name: &str, revision: &str) -> Option<(&'static str, String)> {
        let (main, revision) = (self.commit.unwrap_or(COMMIT), revision.replace("%2F", "/"));
        let mut all = std::iter::once(("main", main)).chain(self.revisions.iter().copied());
        let (_, commit) = all.find(|(named, commit)| *named == revision || *commit == revision)?;
        Some((commit, if commit == main { name.to_owned() } else { format!("{name}@{commit}") }))
    }
}

struct Server {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    fn new(files: BTreeMap<String, Vec<u8>>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
        let state = Arc::new(Mutex::new(State { files, ..State::default() }));
        let (own, served) = (endpoint.clone(), Arc::clone(&state));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                // Errors of clients that disconnect are ignored.
                let _ = answer(stream.expect("a connection"), &served, &own);
            }
        });
        Self { endpoint, state }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("the server lives")
    }

    fn options(&self, cache: &Path) -> HubOptions {
        let cache = Some(cache.join("hub"));
        HubOptions { endpoint: self.endpoint.clone(), cache, retries: 0, ..HubOptions::default() }
    }
}

/// Answers one request and closes the connection.
fn answer(mut stream: TcpStream, state: &Mutex<State>, endpoint: &str) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let request = lines.next().transpose()?.unwrap_or_default();
    let mut headers = BTreeMap::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let range = headers.get("range").and_then(|range| range.strip_prefix("bytes="));
    let mut state = state.lock().expect("the server lives");
    state.requests.push(format!("{request} {}", range.unwrap_or("whole")));

    let mut words = request.split(' ');
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    if let Some((_, head)) = state.refuse.filter(|(part, _)| path.contains(part)) {
        return write!(stream, "HTTP/1.1 {head}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    }
    let allowed = state.token.is_none_or(|token| headers.get("authorization") == Some(&format!("Bearer {token}")));
    let info = path.strip_prefix("/api/models/").and_then(|path| path.split_once("/revision/"));
    if let Some((name, revision)) = info.filter(|_| allowed) {
        let Some((sha, own)) = state.revision(name, revision) else { return stream.write_all(NOT_FOUND.as_bytes()) };
        let prefix = format!("{own}/");
        let names = state.files.keys().filter_map(|file| file.strip_prefix(&prefix));
        let siblings: Vec<_> = names.map(|file| json!({ "rfilename": file })).collect();
        if siblings.is_empty() {
            return stream.write_all(NOT_FOUND.as_bytes());
        }
        let body = json!({"siblings": siblings, "sha": sha, "id": name}).to_string();
        let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close";
        return write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
    // Large files are stored elsewhere: the Hub sends their hash, and redirects.
    let stored = path.strip_prefix("/storage/");
    let resolved = path[1..].split_once("/resolve/").and_then(|(name, rest)| {
        let (revision, file) = rest.split_once('/')?;
        let (commit, own) = state.revision(name, revision)?;
        Some((commit, format!("{own}/{file}")))
    });
    let (commit, file) = stored.map(|file| (COMMIT, file.to_owned())).or(resolved).unwrap_or_default();
    let Some(content) = state.files.get(&file).filter(|_| allowed) else {
        let status = if allowed { "404 Not Found" } else { "401 Unauthorized" };
        return write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    };
    let etag =
        format!("{:x}-{:x}", content.len(), content.iter().fold(7_u64, |h, b| h.wrapping_mul(31) + u64::from(*b)));
    let commit = format!("X-Repo-Commit: {}\r\nConnection: close", state.sent_as.unwrap_or(commit));
    if stored.is_none() && file.ends_with(".safetensors") {
        let location = format!("Location: {endpoint}/storage/{file}\r\nX-Linked-Etag: \"{etag}\"");
        return write!(stream, "HTTP/1.1 302 Found\r\n{location}\r\n{commit}\r\nContent-Length: 0\r\n\r\n");
    }
    let all = content.len();
    // Size queries have an end.
    let bounds =
        range.and_then(|range| range.split_once('-')).filter(|(_, last)| !state.ignores_ranges || !last.is_empty());
    if bounds.is_some_and(|(first, last)| last.is_empty() && first.parse::<usize>() == Ok(all)) {
        let head = "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0\r\nConnection: close";
        return write!(stream, "{head}\r\n\r\n");
    }
    let (first, end) = match bounds {
        Some((first, last)) => {
            (first.parse().unwrap_or(0), last.parse().map_or(all, |last: usize| (last + 1).min(all)))
        }
        None => (0, all),
    };
    let status = if bounds.is_some() { "206 Partial Content" } else { "200 OK" };
    let range = format!("Content-Range: bytes {first}-{}/{all}\r\nAccept-Ranges: bytes", end.saturating_sub(1));
    let length = end - first;
    write!(stream, "HTTP/1.1 {status}\r\nETag: \"{etag}\"\r\n{commit}\r\n{range}\r\nContent-Length: {length}\r\n\r\n")?;
    if method == "HEAD" {
        return Ok(());
    }
    let body = content[first..end].to_vec();
    // Size queries request one byte; the connection breaks in a download.
    let sent = if length > 1 { state.break_after.take_if(|after| *after < length).unwrap_or(length) } else { length };
    drop(state);
    stream.write_all(&body[..sent])
}

/// The files of a fixture's part, as `name/file`.
fn files(name: &str, directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let paths = entries.map(|entry| entry.expect("a file").path());
    let file_name = |path: &PathBuf| path.file_name().expect("a name").to_string_lossy().into_owned();
    paths.map(|path| (format!("{name}/{}", file_name(&path)), std::fs::read(&path).expect("a file"))).collect()
}

fn fixture() -> (PathBuf, Vec<u32>) {
    let case = cases::named("edge");
    (case.path.clone(), case.ids("input_ids"))
}

/// The edge fixture, its target as `test/target` and its assistant as `test/assistant`.
fn edge() -> Server {
    let (path, _) = fixture();
    let mut all = files("test/target", &path.join("target"));
    all.extend(files("test/assistant", &path.join("assistant")));
    Server::new(all)
}

fn ids(target: &Path, assistant: &Path, prompt: &[u32]) -> Vec<u32> {
    let engine = Engine::load(&EngineOptions::new(target).with_assistant(assistant)).expect("an engine");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let options = GenerateOptions { max_tokens: 8, ..GenerateOptions::default() };
    let generation = session.generate(prompt, &options).expect("a generation");
    generation.flat_map(|piece| piece.expect("a piece").tokens).collect()
}

/// Nobody answers there: no other test can get the port, as it could one that was free a moment ago.
const NOBODY: &str = "http://127.0.0.1:9";

/// The same options where nobody answers.
fn offline(options: &HubOptions) -> HubOptions {
    HubOptions { endpoint: NOBODY.into(), ..options.clone() }
}

/// A file of the repository `test/edge-GGUF`, whose content is its name.
fn gguf_file(name: &str) -> (String, Vec<u8>) {
    (format!("test/edge-GGUF/{name}"), name.as_bytes().to_vec())
}

/// Checks that the weights in `directory` are those of the fixture's target, to the byte.
#[track_caller]
fn has_the_weights(directory: &Path) {
    let read = |directory: &Path| std::fs::read(directory.join("model.safetensors")).expect("weights");
    assert!(read(directory) == read(&fixture().0.join("target")), "not the file");
}

/// As huggingface_hub reads it, with or without the slash.
#[test]
fn an_endpoint_may_end_with_a_slash() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    let options = HubOptions { endpoint: format!("{}/", server.endpoint), ..options };
    has_the_weights(&resolve("test/target", &options).expect("the target"));
}

#[test]
fn a_pair_loads_by_name() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    let mut options = server.options(cache.path());
    let log = Arc::clone(&seen);
    options.progress = Some(Arc::new(move |download| {
        let mut log = log.lock().expect("a log");
        let known = log.insert(download.file.to_owned(), (download.done, download.total));
        assert!(download.done <= download.total && known.is_none_or(|(before, _)| before <= download.done));
    }));
    let target = resolve("test/target", &options).expect("the target");
    let log = std::mem::take(&mut *seen.lock().expect("a log"));
    assert_eq!(log.keys().collect::<Vec<_>>(), ["config.json", "generation_config.json", "model.safetensors"]);
    let (path, prompt) = fixture();
    for (file, (done, total)) in log {
        let len = std::fs::metadata(path.join("target").join(&file)).expect("a file").len();
        assert_eq!((done, total), (len, len), "{file}");
    }
    let assistant = resolve("test/assistant", &options).expect("the assistant");
    assert_eq!(ids(&target, &assistant, &prompt), ids(&path.join("target"), &path.join("assistant"), &prompt));

    // Existing files are used without a request to the server: it works offline.
    let asked = server.state().requests.len();
    let offline = offline(&options);
    assert_eq!(resolve("test/target", &offline).expect("the target"), target);
    assert_eq!(server.state().requests.len(), asked);
}

#[test]
fn a_head_in_a_file_of_its_own() {
    let mut all = files("test/target", &fixture().0.join("target"));
    all.insert("test/target/mtp.safetensors".into(), vec![0; 100]);
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    let target = resolve("test/target", &server.options(cache.path())).expect("the target");
    assert!(target.join("mtp.safetensors").exists());
}

/// The edge fixture's target as `test/sharded`: two shards and an index. The whole file is returned separately.
fn sharded() -> (BTreeMap<String, Vec<u8>>, Vec<u8>) {
    let (path, _) = fixture();
    let mut all = files("test/sharded", &path.join("target"));
    let whole = all.remove("test/sharded/model.safetensors").expect("weights");
    let tensors = safetensors::SafeTensors::deserialize(&whole).expect("safetensors").tensors();
    let mut weight_map = serde_json::Map::new();
    for (shard, tensors) in (1..).zip(tensors.chunks(tensors.len().div_ceil(2))) {
        let name = format!("model-0000{shard}-of-00002.safetensors");
        tensors.iter().for_each(|(tensor, _)| drop(weight_map.insert(tensor.clone(), json!(name))));
        let bytes = safetensors::serialize(tensors.iter().map(|(name, view)| (name, view)), None).expect("a shard");
        all.insert(format!("test/sharded/{name}"), bytes);
    }
    let index = json!({ "weight_map": weight_map }).to_string();
    all.insert("test/sharded/model.safetensors.index.json".into(), index.into_bytes());
    (all, whole)
}

#[test]
fn shards_and_everything_beside_them() {
    let (path, prompt) = fixture();
    let (mut all, _) = sharded();
    for template in ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"] {
        all.insert(format!("test/sharded/{template}"), b"{{ messages[0].content }}".to_vec());
    }
    all.insert("test/sharded/README.md".into(), b"not needed".to_vec());
    all.insert("test/sharded/original/weights.pth".into(), vec![0; 100]);
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    let target = resolve("test/sharded", &server.options(cache.path())).expect("the target");
    assert!(target.join("chat_template.jinja").exists());
    assert!(target.join("additional_chat_templates/tool_use.jinja").exists());
    assert!(!target.join("README.md").exists() && !target.join("original").exists(), "more than a checkpoint needs");
    let (one, assistant) = (path.join("target"), path.join("assistant"));
    assert_eq!(ids(&target, &assistant, &prompt), ids(&one, &assistant, &prompt));
}

/// The downloaded files are those that are read: a whole file takes precedence over an index that does not list it.
#[test]
fn a_whole_file_beside_shards() {
    let (path, prompt) = fixture();
    let (mut all, whole) = sharded();
    all.insert("test/sharded/model.safetensors".into(), whole);
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    // A download that broke off after the index is resumed.
    server.state().break_after = Some(100_000);
    refused(resolve("test/sharded", &options), &["model.safetensors", "try again"]);
    let target = resolve("test/sharded", &options).expect("the target");
    let asked_for_shards = |server: &Server| server.state().requests.iter().any(|request| request.contains("-of-"));
    assert!(!asked_for_shards(&server), "{:?}", server.state().requests);
    let (one, assistant) = (path.join("target"), path.join("assistant"));
    assert_eq!(ids(&target, &assistant, &prompt), ids(&one, &assistant, &prompt));
    let offline = offline(&options);
    assert_eq!(resolve("test/sharded", &offline).expect("the same"), target);

    // An index of both.
    let index = json!({"weight_map": {"a": "model.safetensors", "b": "model-00001-of-00002.safetensors"}}).to_string();
    server.state().files.insert("test/sharded/model.safetensors.index.json".into(), index.into_bytes());
    let fresh = tempfile::tempdir().expect("a directory");
    let target = resolve("test/sharded", &server.options(fresh.path())).expect("the target");
    let exist = ["model", "model-00001-of-00002", "model-00002-of-00002"];
    let exist = exist.map(|name| target.join(format!("{name}.safetensors")).exists());
    assert_eq!(exist, [true, true, false]);
}

/// A shard is a file next to its index; an index cannot make the client request, or write, anything else.
#[test]
fn an_index_names_files_only() {
    let (path, _) = fixture();
    let mut all = files("test/odd", &path.join("target"));
    let index = json!({"weight_map": {"x": "../../../../elsewhere"}}).to_string();
    all.insert("test/odd/model.safetensors.index.json".into(), index.into_bytes());
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    refused(resolve("test/odd", &server.options(cache.path())), &["weight_map.x", "not a file name"]);
}

#[test]
fn a_missing_repository() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    refused(resolve("test/nothing", &options), &["test/nothing", &server.endpoint, "404", "check the name"]);
    // A repository without a checkpoint.
    server.state().files.insert("test/text/README.md".into(), b"text".to_vec());
    refused(resolve("test/text", &options), &["test/text", "config.json"]);
    server.state().files.insert("test/text/config.json".into(), b"{}".to_vec());
    refused(resolve("test/text", &options), &["test/text", "model.safetensors"]);
    // An existing path is a path, whatever the Hub has; so is anything that cannot be a name.
    let asked = server.state().requests.len();
    for path in ["tests/cases", "no/such/path", "./x"] {
        assert_eq!(resolve(path, &options).expect("a path"), Path::new(path));
    }
    assert_eq!(server.state().requests.len(), asked);
}

#[test]
fn a_repository_that_needs_a_token() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    server.state().token = Some("hf_secret");
    let options = server.options(cache.path());
    refused(resolve("test/target", &options), &["test/target", "401", "token"]);
    let wrong = HubOptions { token: Some("hf_wrong".into()), ..options.clone() };
    let message = resolve("test/target", &wrong).expect_err("an error").to_string();
    assert!(message.contains("401") && !message.contains("hf_wrong"), "{message}");
    let right = HubOptions { token: Some("hf_secret".into()), ..options };
    assert!(resolve("test/target", &right).expect("the target").join("model.safetensors").exists());
}

/// A server that dies midway is an error; nothing incomplete is used as a checkpoint, and the next
/// attempt resumes from there.
#[test]
fn a_server_that_dies_midway() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    server.state().break_after = Some(100_000);
    refused(resolve("test/target", &options), &["test/target", "model.safetensors", &server.endpoint, "try again"]);
    assert_eq!(server.state().break_after, None, "the connection did not break");

    server.state().requests.clear();
    let target = resolve("test/target", &options).expect("the target");
    let resumed = |request: &String| request.contains("model.safetensors") && request.ends_with(" 100000-");
    assert!(server.state().requests.iter().any(resumed), "{:?}", server.state().requests);
    has_the_weights(&target);
}

/// An interrupted download is resumed in the same call.
#[test]
fn a_connection_that_breaks_once() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = HubOptions { retries: 1, ..server.options(cache.path()) };
    server.state().break_after = Some(100_000);
    let target = resolve("test/target", &options).expect("the target");
    let resumed = |request: &String| request.contains("model.safetensors") && request.ends_with(" 100000-");
    assert!(server.state().requests.iter().any(resumed), "{:?}", server.state().requests);
    has_the_weights(&target);
}

/// A server that ignores ranges sends the whole file after the part of an interrupted download.
#[test]
fn a_server_without_ranges() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    server.state().ignores_ranges = true;
    server.state().break_after = Some(100_000);
    refused(resolve("test/target", &options), &["model.safetensors", "try again"]);
    refused(resolve("test/target", &options), &["model.safetensors", "bytes instead of", "try again"]);
    has_the_weights(&resolve("test/target", &options).expect("the target"));

    // Two parts that are more than the file.
    let fresh = tempfile::tempdir().expect("a directory");
    let options = HubOptions { cache: Some(fresh.path().join("hub")), ..options };
    for _ in 0..2 {
        server.state().break_after = Some(2_000_000);
        refused(resolve("test/target", &options), &["model.safetensors", "try again"]);
        assert_eq!(server.state().break_after, None, "the connection did not break");
    }
    refused(resolve("test/target", &options), &["model.safetensors", "try again"]);
    has_the_weights(&resolve("test/target", &options).expect("the target"));
}

/// A process that ends between the last byte of a file and its renaming leaves all of it: there is nothing to resume.
#[test]
fn a_part_that_is_the_whole_file() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    server.state().break_after = Some(100_000);
    refused(resolve("test/target", &options), &["model.safetensors", "try again"]);
    let blobs = std::fs::read_dir(cache.path().join("hub/models--test--target/blobs")).expect("a directory");
    let mut blobs = blobs.map(|entry| entry.expect("a file").path());
    let part = blobs.find(|path| path.extension().is_some_and(|extension| extension == "part")).expect("a part");
    std::fs::copy(fixture().0.join("target/model.safetensors"), part).expect("a copy");
    refused(resolve("test/target", &options), &["model.safetensors", "416", "try again"]);
    has_the_weights(&resolve("test/target", &options).expect("the target"));
}

/// Parts of two commits are not used together: all are of the commit that the list of files was of.
#[test]
fn a_split_file_that_changes() {
    let parts = ["edge-BF16-00001-of-00002.gguf", "edge-BF16-00002-of-00002.gguf"];
    let (server, cache) = (Server::new(parts.map(gguf_file).into()), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    server.state().refuse = Some((parts[1], "503 Service Unavailable"));
    refused(resolve("test/edge-GGUF:BF16", &options), &[parts[1], "503"]);
    server.state().refuse = None;
    server.state().commit = Some(OTHER_COMMIT);
    let path = resolve("test/edge-GGUF:BF16", &options).expect("the first part");
    assert!(path.with_file_name(parts[1]).exists() && path.to_string_lossy().contains(OTHER_COMMIT), "{path:?}");
    let of_main = |request: &String| request.contains("/resolve/main/");
    assert!(!server.state().requests.iter().any(of_main), "{:?}", server.state().requests);
    // A server that sends the files of another commit than it lists.
    server.state().sent_as = Some(COMMIT);
    let fresh = tempfile::tempdir().expect("a directory");
    let mixed = resolve("test/edge-GGUF:BF16", &server.options(fresh.path()));
    refused(mixed, &[&server.endpoint, parts[0], "of another commit", "check the endpoint"]);
}

/// The files of a branch, a tag or a commit, whatever `main` has; a commit is known in the cache by any of its names.
#[test]
fn a_revision_by_name() {
    let mut all = BTreeMap::from([gguf_file("edge-Q8_0.gguf")]);
    for file in ["edge-Q4_0.gguf", "edge-Q8_0.gguf"] {
        all.insert(format!("test/edge-GGUF@{OTHER_COMMIT}/{file}"), b"older".to_vec());
    }
    all.extend(files(&format!("test/target@{OTHER_COMMIT}"), &fixture().0.join("target")));
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    server.state().revisions = vec![("v1.0", OTHER_COMMIT), ("refs/pr/1", OTHER_COMMIT)];
    let options = server.options(cache.path());
    let offline = offline(&options);
    let read = |name: &str, options: &HubOptions| {
        let path = resolve(name, options).unwrap_or_else(|error| panic!("{name}: {error}"));
        String::from_utf8(std::fs::read(path).expect("a file")).expect("text")
    };
    assert_eq!(read("test/edge-GGUF:Q8_0", &options), "edge-Q8_0.gguf");
    refused(resolve("test/edge-GGUF@v1.0", &options), &["several GGUF files", "(test/edge-GGUF@v1.0:TAG, "]);
    let [tag, commit, branch] = ["v1.0", OTHER_COMMIT, "refs/pr/1"].map(|name| format!("test/edge-GGUF@{name}:Q8_0"));
    for name in [&tag, &commit] {
        refused(resolve(name, &offline), &["test/edge-GGUF", "127.0.0.1:9"]);
    }
    assert_eq!(read(&tag, &options), "older");
    assert_eq!(read(&commit, &offline), "older", "downloaded by the tag");
    let downloads = || server.state().requests.iter().filter(|request| request.contains("/resolve/")).count();
    let before = downloads();
    assert_eq!(read(&branch, &options), "older");
    assert_eq!(downloads(), before, "downloaded by the tag");
    for name in [&tag, &branch] {
        assert_eq!(read(name, &offline), "older");
    }
    assert_eq!(read("test/edge-GGUF:Q8_0", &offline), "edge-Q8_0.gguf");
    refused(resolve("test/edge-GGUF@v2:Q8_0", &options), &["test/edge-GGUF", "404", "check the name and the revision"]);

    // A directory, by the commit first.
    let target = resolve(format!("test/target@{OTHER_COMMIT}"), &options).expect("the target");
    assert!(target.ends_with(format!("snapshots/{OTHER_COMMIT}")), "{target:?}");
    has_the_weights(&target);
    assert_eq!(resolve("test/target@v1.0", &options).expect("the same"), target);
    refused(resolve("test/target", &options), &["test/target", "404"]);
}

/// Responses that require an action: each error names it.
#[test]
fn requests_that_are_refused() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = HubOptions { retries: 3, ..server.options(cache.path()) };
    let refuse = |part, head| {
        server.state().refuse = Some((part, head));
        server.state().requests.clear();
        resolve("test/target", &options)
    };
    let wait = refuse("/api/", "429 Too Many Requests\r\nRetry-After: 37");
    refused(wait, &["test/target", "429", "try again in 37 s", "token"]);
    refused(refuse("/api/", "429 Too Many Requests"), &["429", "try again in a few minutes"]);
    refused(refuse("/resolve/", "429 Too Many Requests"), &[", config.json", "429", "try again in a few minutes"]);
    let wait = refuse("/resolve/", "429 Too Many Requests\r\nRetry-After: 41");
    refused(wait, &[", config.json", "429", "try again in 41 s", "token"]);
    let past = refuse("/resolve/", "429 Too Many Requests\r\nRetry-After: Wed, 21 Oct 2015 07:28:00 GMT");
    refused(past, &[", config.json", "429", "try again in 0 s"]);
    let terms = format!("terms accepted at {}/test/target", server.endpoint);
    refused(refuse("/resolve/", "403 Forbidden"), &["403", "gated", "needs a token (hf auth login)", &terms]);
    assert_eq!(server.state().requests.len(), 2, "a refusal is not asked for again");
    refused(refuse("/api/", "503 Service Unavailable"), &["503", "try again"]);
    let nowhere = refuse("/resolve/", "302 Found\r\nETag: \"a\"\r\nX-Repo-Commit: 0123");
    let unusable = "the response cannot be used";
    refused(nowhere, &["test/target", &server.endpoint, ", config.json", unusable, "location header"]);
    assert_eq!(server.state().requests.len(), 2, "an unusable response is not asked for again");
}

/// A panic of the caller's progress callback reaches the caller.
#[test]
fn a_progress_callback_that_panics() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let mut options = server.options(cache.path());
    options.progress = Some(Arc::new(|_| panic!("the caller's")));
    let panic = catch_unwind(AssertUnwindSafe(|| resolve("test/target", &options))).expect_err("a panic");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"the caller's"));
}

/// A caller can tell a refusal, a failure of the network, a cache that cannot be written and a repository that is no
/// checkpoint from each other.
#[test]
fn failures_by_cause() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    let status = |name: &str, options: &HubOptions| match resolve(name, options) {
        Err(Error::Download { repository, status, .. }) if repository == name => status,
        other => panic!("not a failed download of {name}: {other:?}"),
    };
    for (part, head, expected) in [
        ("/api/", "401 Unauthorized", 401),
        ("/resolve/", "403 Forbidden", 403),
        ("/resolve/", "404 Not Found", 404),
        ("/resolve/", "429 Too Many Requests", 429),
        ("/resolve/", "500 Internal Server Error", 500),
        ("/api/", "503 Service Unavailable", 503),
    ] {
        server.state().refuse = Some((part, head));
        assert_eq!(status("test/target", &options), Some(expected), "{head}");
    }
    server.state().refuse = None;
    assert_eq!(status("test/nothing", &options), Some(404));

    let offline = offline(&options);
    assert_eq!(status("test/target", &offline), None, "nobody answers");
    server.state().break_after = Some(100_000);
    assert_eq!(status("test/target", &options), None, "the connection breaks");
    assert_eq!(server.state().break_after, None, "the connection did not break");

    // A file in the place of the cache.
    let file = cache.path().join("file");
    std::fs::write(&file, "").expect("written");
    server.state().requests.clear();
    let blocked = resolve("test/target", &HubOptions { cache: Some(file.clone()), retries: 3, ..options.clone() });
    assert!(matches!(&blocked, Err(Error::Io { path, .. }) if path.starts_with(&file)), "{blocked:?}");
    assert_eq!(server.state().requests.len(), 2, "a path that cannot be written is not tried again");

    server.state().files.insert("test/text/README.md".into(), b"no checkpoint".to_vec());
    let text = resolve("test/text", &options);
    assert!(matches!(&text, Err(Error::File { path, .. }) if path == Path::new("test/text")), "{text:?}");
}

/// `owner/name:TAG` is one GGUF file of a repository, with all its parts.
#[test]
fn a_gguf_file_by_its_tag() {
    let parts = ["BF16/edge-BF16-00001-of-00002.gguf", "BF16/edge-BF16-00002-of-00002.gguf"];
    let all =
        ["README.md", "config.json", "edge-Q4_K_M.gguf", "edge-UD-Q8_0.gguf", "mmproj-Q8_0.gguf", parts[0], parts[1]];
    let mut all: BTreeMap<_, _> = all.map(gguf_file).into();
    all.insert("test/one-GGUF/edge-Q4_0.gguf".into(), b"one".to_vec());
    all.insert("test/odd-GGUF/../../../edge-Q4_0.gguf".into(), b"outside".to_vec());
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    let read = |path: &Path| String::from_utf8(std::fs::read(path).expect("a file")).expect("text");
    for (tag, name) in [("q4_k_m", "edge-Q4_K_M.gguf"), ("UD-Q8_0", "edge-UD-Q8_0.gguf"), ("edge-BF16", parts[0])] {
        let path = resolve(format!("test/edge-GGUF:{tag}"), &options).expect(name);
        assert!(path.ends_with(name), "{path:?}");
        assert_eq!(read(&path), name);
        if tag == "edge-BF16" {
            assert_eq!(read(&path.with_file_name(&parts[1][5..])), parts[1]);
        }
        // Existing files are used without a request to the server.
        let offline = offline(&options);
        assert_eq!(resolve(format!("test/edge-GGUF:{tag}"), &offline).expect("the same"), path);
    }
    assert!(!server.state().requests.iter().any(|request| request.contains("README") || request.contains("mmproj")));
    let unknown = resolve("test/edge-GGUF:Q5_K_M", &options);
    refused(unknown, &["test/edge-GGUF", "no GGUF file with \"Q5_K_M\"", "edge-Q4_K_M.gguf, edge-UD-Q8_0.gguf"]);
    let several = resolve("test/edge-GGUF", &options);
    refused(several, &["several GGUF files", "edge-Q4_K_M.gguf", "edge-UD-Q8_0.gguf", "test/edge-GGUF:TAG"]);
    assert_eq!(read(&resolve("test/one-GGUF", &options).expect("the only one")), "one");
    refused(resolve("test/odd-GGUF", &options), &["outside the repository"]);
    server.state().files.remove(&format!("test/edge-GGUF/{}", parts[1]));
    let fresh = tempfile::tempdir().expect("a directory");
    refused(resolve("test/edge-GGUF:BF16", &server.options(fresh.path())), &["missing parts", parts[0]]);
}

/// What is cached of a repository is taken for a tag only if no other file of the repository can have it: the Hub may
/// have a model beside an assistant, or a shorter name.
#[test]
fn a_cached_file_with_the_tag_may_be_another_one() {
    let tagged = |tag: &str| format!("test/edge-GGUF:{tag}");
    for (first, other) in [("mtp-edge-Q8_0", "mtp-edge-Q8_0.gguf"), ("qat-Q8_0", "edge-qat-Q8_0.gguf")] {
        let (server, cache) = (Server::new([gguf_file(other)].into()), tempfile::tempdir().expect("a directory"));
        let options = server.options(cache.path());
        assert!(resolve(tagged(first), &options).expect("the other one").ends_with(other));
        server.state().files = [gguf_file("edge-Q8_0.gguf")].into();
        let path = resolve(tagged("Q8_0"), &options).expect("the model");
        assert!(path.ends_with("edge-Q8_0.gguf"), "{path:?}");
        // The other one by its name, without a request.
        let offline = offline(&options);
        let name = other.strip_suffix(".gguf").expect("its name");
        assert!(resolve(tagged(name), &offline).expect("the other one").ends_with(other));
    }
}

/// The file with the repository's name and the tag is meant, whatever else has the tag, and whatever is cached.
#[test]
fn the_file_of_the_repositorys_name() {
    let server = Server::new([gguf_file("edge-Q8_0.gguf"), gguf_file("edge-qat-Q8_0.gguf")].into());
    for tags in [["Q8_0", "qat-Q8_0"], ["qat-Q8_0", "Q8_0"]] {
        let cache = tempfile::tempdir().expect("a directory");
        let online = server.options(cache.path());
        let offline = offline(&online);
        for options in [online, offline] {
            for tag in tags {
                let path = resolve(format!("test/edge-GGUF:{tag}"), &options).expect(tag);
                assert!(path.ends_with(format!("edge-{tag}.gguf")), "{path:?}");
            }
        }
    }
}

/// A cached file whose name has more than the repository's and the tag is used if nobody answers, and is the only one
/// with the tag.
#[test]
fn a_cached_file_with_the_tag_if_nobody_answers() {
    let xl = "edge-UD-Q4_K_XL.gguf";
    let parts = ["BF16/edge-qat-BF16-00001-of-00002.gguf", "BF16/edge-qat-BF16-00002-of-00002.gguf"];
    let all = [xl, "edge-qat-Q8_0.gguf", "edge-it-Q8_0.gguf", "mtp-edge-Q5_0.gguf", parts[0], parts[1]].map(gguf_file);
    let (server, cache) = (Server::new(all.into()), tempfile::tempdir().expect("a directory"));
    let online = server.options(cache.path());
    let offline = offline(&online);
    refused(resolve("test/edge-GGUF:Q4_K_XL", &offline), &["127.0.0.1:9", "try again"]);
    for (tag, name) in [("Q4_K_XL", xl), ("BF16", parts[0])] {
        let tagged = format!("test/edge-GGUF:{tag}");
        let path = resolve(&tagged, &online).expect(name);
        assert!(path.ends_with(name), "{path:?}");
        assert_eq!(resolve(&tagged, &offline).expect("the same"), path);
    }
    // Whoever answers is asked.
    let asked = server.state().requests.len();
    resolve("test/edge-GGUF:Q4_K_XL", &online).expect("the same");
    assert!(server.state().requests.len() > asked);
    server.state().refuse = Some(("/api/", "503 Service Unavailable"));
    assert!(resolve("test/edge-GGUF:Q4_K_XL", &online).expect("the same").ends_with(xl));
    server.state().refuse = Some(("/api/", "429 Too Many Requests"));
    refused(resolve("test/edge-GGUF:Q4_K_XL", &online), &["429"]);
    server.state().refuse = None;

    // Not one of several, an assistant for a model, or one without all its parts.
    for name in ["edge-qat-Q8_0", "edge-it-Q8_0", "mtp-edge-Q5_0"] {
        resolve(format!("test/edge-GGUF:{name}"), &online).expect(name);
    }
    let several = resolve("test/edge-GGUF:Q8_0", &offline);
    refused(several, &["127.0.0.1:9", "cached GGUF files with \"Q8_0\"", "edge-it-Q8_0.gguf, edge-qat-Q8_0.gguf"]);
    refused(resolve("test/edge-GGUF:Q5_0", &offline), &["127.0.0.1:9"]);
    let second = resolve("test/edge-GGUF:BF16", &online).expect("the first part").with_file_name(&parts[1][5..]);
    std::fs::remove_file(second).expect("removed");
    refused(resolve("test/edge-GGUF:BF16", &offline), &["127.0.0.1:9"]);
}

/// Without a tag, the only model that is cached.
#[test]
fn the_only_cached_gguf_file() {
    let (server, cache) =
        (Server::new([gguf_file("edge-Q4_0.gguf")].into()), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    let path = resolve("test/edge-GGUF", &options).expect("the only one");
    let offline = offline(&options);
    assert_eq!(resolve("test/edge-GGUF", &offline).expect("the same"), path);
    server.state().files.extend([gguf_file("edge-Q8_0.gguf")]);
    resolve("test/edge-GGUF:Q8_0", &options).expect("another one");
    refused(resolve("test/edge-GGUF", &options), &["several GGUF files", "edge-Q4_0.gguf", "edge-Q8_0.gguf"]);
}

/// The events of the download on this thread.
#[derive(Default)]
struct Events(Mutex<Vec<String>>);

impl tracing::Subscriber for Events {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().starts_with("foretoken::hub")
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        let mut fields = Vec::new();
        event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
            fields.push(format!("{}={value:?}", field.name()));
        });
        fields.sort();
        self.0.lock().expect("the lines").push(format!("{} {}", event.metadata().level(), fields.join(" ")));
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Every file is logged when its download begins, with what there is of it.
#[test]
fn downloads_are_logged() {
    let (server, cache) = (edge(), tempfile::tempdir().expect("a directory"));
    let options = server.options(cache.path());
    // The first download of the process registers the event. If another thread did while the only subscriber is this
    // one's, the event would be disabled.
    resolve("test/assistant", &options).expect("the assistant");
    let logged = || {
        let events = Arc::new(Events::default());
        let resolved = tracing::subscriber::with_default(events.clone(), || resolve("test/target", &options));
        (resolved, std::mem::take(&mut *events.0.lock().expect("the lines")))
    };
    let line = |file: &str, present: u64| {
        let bytes = std::fs::metadata(fixture().0.join("target").join(file)).expect("a file").len();
        format!("INFO bytes={bytes} file={file:?} message=downloading present={present}")
    };
    server.state().break_after = Some(100_000);
    let (broken, lines) = logged();
    refused(broken, &["model.safetensors", "try again"]);
    let small = ["config.json", "generation_config.json"].map(|file| line(file, 0));
    assert_eq!(lines, [&small[..], &[line("model.safetensors", 0)]].concat());
    let (resolved, lines) = logged();
    resolved.expect("the target");
    assert_eq!(lines, [line("model.safetensors", 100_000)]);
}

/// Cached files are used, and nothing is requested for the others.
#[test]
fn offline_resolution_sends_no_requests() {
    let mut all: BTreeMap<_, _> = [gguf_file("edge-UD-Q4_0.gguf"), gguf_file("edge-Q8_0.gguf")].into();
    all.extend(files("test/target", &fixture().0.join("target")));
    let (server, cache) = (Server::new(all), tempfile::tempdir().expect("a directory"));
    let online = server.options(cache.path());
    let offline = HubOptions { offline: true, ..online.clone() };
    let disabled = "is not complete in the cache, and downloads are disabled";
    for name in ["test/target", "test/edge-GGUF", "test/edge-GGUF:Q4_0"] {
        refused(resolve(name, &offline), &[name.split(':').next().expect("a name"), disabled]);
    }
    assert_eq!(server.state().requests, [""; 0]);
    for name in ["test/target", "test/edge-GGUF:Q4_0"] {
        let path = resolve(name, &online).expect(name);
        server.state().requests.clear();
        assert_eq!(resolve(name, &offline).expect("the same"), path);
        assert_eq!(server.state().requests, [""; 0]);
    }
    let other = resolve("test/edge-GGUF:Q8_0", &offline);
    refused(other, &["test/edge-GGUF", disabled]);
    assert_eq!(server.state().requests, [""; 0]);
}

#[test]
fn nobody_answers() {
    let cache = tempfile::tempdir().expect("a directory");
    let cache = Some(cache.path().join("hub"));
    let options = HubOptions { endpoint: NOBODY.into(), cache, retries: 0, ..HubOptions::default() };
    refused(resolve("test/target", &options), &["test/target", NOBODY, "try again"]);
    let nonsense = HubOptions { endpoint: "no endpoint".into(), ..options };
    refused(resolve("test/target", &nonsense), &["test/target", "no endpoint"]);
}
