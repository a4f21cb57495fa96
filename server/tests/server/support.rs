//! A server of a test's own, and a client.

use std::borrow::Borrow;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foretoken::chat::ChatTemplate;
use foretoken::{Engine, EngineOptions, GenerateOptions, LogitsProcessor, SessionOptions};
use foretoken_server::{Server, ServerOptions};
use foretoken_tools::demo;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;

/// The routes that generate.
pub const CHAT: &str = "/v1/chat/completions";
pub const TEXT: &str = "/v1/completions";
pub const RESPONSES: &str = "/v1/responses";
pub const MESSAGES: &str = "/v1/messages";
pub const LLAMA: &str = "/completion";

pub const PROMPT: &str = "impl Iterator for Counter {\n";
pub const TEMPLATE: &str = "{% for message in messages %}{{ message.content }}{% endfor %}";

/// The demo pair, loaded once.
pub fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(load)
}

/// The demo pair, with memory of its own.
pub fn load() -> Engine {
    let options = EngineOptions::new(demo("target")).with_assistant(demo("assistant"));
    Engine::load(&options).expect("the demo pair")
}

/// A new directory with some files of a checkpoint.
pub fn copy_of(checkpoint: &Path, files: &[&str]) -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    for file in files {
        std::fs::copy(checkpoint.join(file), directory.path().join(file)).expect("copied");
    }
    directory
}

/// The checkpoint with another tokenizer, and these of its other files.
pub fn with_tokenizer(checkpoint: &Path, files: &[&str], edit: impl FnOnce(&mut Value)) -> Engine {
    let directory = copy_of(checkpoint, files);
    let text = std::fs::read_to_string(checkpoint.join("tokenizer.json")).expect("a tokenizer");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    edit(&mut tokenizer);
    std::fs::write(directory.path().join("tokenizer.json"), tokenizer.to_string()).expect("written");
    // The file is mapped: it may go.
    Engine::load(&EngineOptions::new(directory.path())).expect("an engine")
}

pub fn options() -> ServerOptions {
    let template = ChatTemplate::new(TEMPLATE.into(), "<bos>".into(), "<eos>".into()).expect("a template");
    let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
    ServerOptions { parallel: 8, chat_template: Some(template), ..ServerOptions::new(any_port, "demo") }
}

/// The same without kept prefixes: pages are those of sequences.
pub fn keeping_nothing() -> ServerOptions {
    let mut options = options();
    options.scheduler.prefix_cache = None;
    options
}

/// Has the model write a text, whatever its logits are.
#[derive(Clone, Debug, Default)]
pub struct Script(pub Arc<Mutex<Vec<u32>>>);

impl LogitsProcessor for Script {
    /// Goes on with what the text ends with, or begins.
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> foretoken::Result<()> {
        let script = self.0.lock().expect("the script");
        let written = (0..script.len()).rev().find(|n| tokens.ends_with(&script[..*n])).unwrap_or(0);
        logits.fill(f32::NEG_INFINITY);
        logits[script[written] as usize] = 0.0;
        Ok(())
    }
}

/// A server that runs until it is dropped.
pub struct TestServer {
    pub address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    pub fn start(options: ServerOptions) -> Self {
        Self::start_on(engine().clone(), options)
    }

    pub fn start_on(engine: Engine, options: ServerOptions) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let (send, address) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
            runtime.expect("a runtime").block_on(async {
                let server = Server::bind(&engine, options).await.expect("a server");
                send.send(server.address()).expect("the test waits for it");
                server.run(async { drop(stopped.await) }).await;
            });
        });
        Self { address: address.recv().expect("an address"), stop: Some(stop), thread: Some(thread) }
    }

    /// Asks it to stop.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Waits until it has.
    pub fn join(&mut self) {
        self.stop();
        self.thread.take().map_or(Ok(()), JoinHandle::join).expect("the server ends without a panic");
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn get(&self, path: &str) -> (u16, String) {
        let mut response = agent().get(self.url(path)).call().expect("an answer");
        (response.status().as_u16(), response.body_mut().read_to_string().expect("a text"))
    }

    /// The status, and the JSON of the answer.
    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        self.post_bytes(path, body.to_string().as_bytes())
    }

    pub fn post_bytes(&self, path: &str, body: &[u8]) -> (u16, Value) {
        let request = agent().post(self.url(path)).header("content-type", "application/json");
        let mut response = request.send(body).expect("an answer");
        let text = response.body_mut().read_to_string().expect("a text");
        let value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{path}: {e}: {text}"));
        (response.status().as_u16(), value)
    }

    /// The answer to a request that is served.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let (status, value) = self.post(path, body);
        assert_eq!(status, 200, "{path}: {value}");
        value
    }

    /// The tokens of a text, after BOS.
    pub fn tokens(&self, text: &str) -> Vec<Value> {
        let answer = self.ask("/tokenize", &json!({"content": text, "add_special": true}));
        answer["tokens"].as_array().expect("a list").clone()
    }

    /// The events of a stream without `[DONE]`: the name, if it has one, and the data.
    pub fn events(&self, path: &str, body: &Value) -> Vec<(String, Value)> {
        let parsed = |(name, data): (String, String)| (name, serde_json::from_str::<Value>(&data).expect("JSON"));
        self.stream(path, body).into_iter().map(parsed).collect()
    }

    fn stream(&self, path: &str, body: &Value) -> Vec<(String, String)> {
        let request = agent().post(self.url(path)).header("content-type", "application/json");
        let mut response = request.send(body.to_string().as_bytes()).expect("an answer");
        let text = response.body_mut().read_to_string().expect("a text");
        assert_eq!(response.status().as_u16(), 200, "{path}: {text}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let event = |event: &str| {
            let field = |name| event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default().to_owned();
            (field("event: "), field("data: "))
        };
        text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':')).map(event).collect()
    }

    /// The data of a stream that ends with `[DONE]`.
    pub fn chunks(&self, path: &str, body: &Value) -> Vec<Value> {
        let mut events = self.stream(path, body);
        assert_eq!(events.pop().expect("an event").1, "[DONE]");
        events.iter().map(|(_, data)| serde_json::from_str(data).expect("JSON")).collect()
    }

    /// The value of a metric, by the beginning of its line.
    pub fn metric(&self, line: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        let found = text.lines().find(|l| l.starts_with(line)).unwrap_or_else(|| panic!("no {line} in {text}"));
        found.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    }

    /// Sequences that are decoded.
    pub fn busy_slots(&self) -> usize {
        let slots: Value = serde_json::from_str(&self.get("/slots").1).expect("JSON");
        slots.as_array().expect("a list").iter().filter(|slot| slot["is_processing"] == true).count()
    }

    /// A connection that receives little before it is read.
    pub fn connect_narrow(&self) -> TcpStream {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
        let stream = runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4()?;
            socket.set_recv_buffer_size(4096)?;
            socket.connect(self.address).await?.into_std()
        });
        let stream = stream.expect("a connection");
        stream.set_nonblocking(false).expect("set");
        stream
    }

    /// A connection with a request on it, of which nothing was read.
    pub fn open(&self, path: &str, body: &Value) -> TcpStream {
        self.send(path, body, TcpStream::connect(self.address).expect("a connection"))
    }

    /// The connection with a request on it.
    pub fn send(&self, path: &str, body: &Value, mut stream: TcpStream) -> TcpStream {
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        let body = body.to_string();
        let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
        write!(stream, "{head}content-length: {}\r\n\r\n{body}", body.len()).expect("written");
        stream
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// An object with more fields.
pub fn with(fields: &Value, more: impl Borrow<Value>) -> Value {
    let (mut all, more): (Value, &Value) = (fields.clone(), more.borrow());
    all.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    all
}

/// Tokens of the prompt of a message's answer: those computed, and those that a kept prefix had.
pub fn anthropic_input(answer: &Value) -> Value {
    let tokens = |name: &str| answer["usage"][name].as_u64().expect("a number");
    (tokens("input_tokens") + tokens("cache_read_input_tokens")).into()
}

/// Statuses are values; no connection is kept.
pub fn agent() -> ureq::Agent {
    let config = ureq::Agent::config_builder().http_status_as_error(false).max_idle_connections(0);
    config.timeout_global(Some(Duration::from_secs(50))).build().into()
}

/// Waits until `holds`, 40 s at most.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(40), "not within 40 s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads the status line and the headers.
pub fn read_head(stream: &TcpStream) -> String {
    let mut reader = BufReader::with_capacity(1, stream.try_clone().expect("a clone"));
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).expect("a line") > 0 {}
    head
}

/// Reads to the end of the connection, which must come before the time that a read may take.
pub fn read_rest(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    // A reset ends it, too.
    if let Err(error) = stream.read_to_end(&mut bytes) {
        let is_open = [ErrorKind::WouldBlock, ErrorKind::TimedOut].contains(&error.kind());
        assert!(!is_open, "not closed after {} bytes: {error}", bytes.len());
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A request for so many tokens, whatever they are.
pub fn long(max_tokens: usize) -> Value {
    json!({"prompt": PROMPT, "max_tokens": max_tokens, "ignore_eos": true, "stream": true})
}

/// The library's own text.
pub fn alone(prompt: &str, options: &GenerateOptions) -> String {
    let mut session = engine().session(&SessionOptions::default()).expect("a session");
    let prompt = engine().tokenizer().and_then(|tokenizer| tokenizer.encode(prompt)).expect("tokens");
    let generation = session.generate(&prompt, options).expect("a generation");
    generation.map(|piece| piece.expect("a piece").text).collect()
}
