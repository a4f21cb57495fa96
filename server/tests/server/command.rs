//! The command: its address, a signal that ends it, and what it refuses.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};

use serde_json::{Value, json};

use crate::support::{PROMPT, agent, wait_until};

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_foretoken-server"));
    command.args(arguments).env_remove("RUST_LOG").env("RUST_BACKTRACE", "1").stdin(Stdio::null());
    command
}

/// Killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server of the demo model, unless there are other arguments; its log until it listens, and what follows.
fn start(arguments: &[&str]) -> (Running, String, BufReader<ChildStderr>) {
    let mut command = command(&[&["--port", "0", "--threads", "1"], arguments].concat());
    let mut server = Running(command.stderr(Stdio::piped()).spawn().expect("a run"));
    let mut rest = BufReader::new(server.0.stderr.take().expect("a pipe"));
    let mut log = String::new();
    while !log.contains("listening") {
        assert!(rest.read_line(&mut log).expect("a line") > 0, "it ended: {log}");
    }
    (server, log, rest)
}

/// A completion by the server whose log this is.
fn complete(log: &str, body: &Value) -> Value {
    let url = log.split_once("url=\"").and_then(|(_, rest)| rest.split_once('"')).expect("an address").0;
    let request = agent().post(format!("{url}/v1/completions")).header("content-type", "application/json");
    let text = request.send(body.to_string()).expect("an answer").body_mut().read_to_string().expect("a text");
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Ends the server by a signal; returns its exit status.
fn terminate(mut server: Running) -> ExitStatus {
    let kill = Command::new("sh").args(["-c", &format!("kill -TERM {}", server.0.id())]).status();
    assert!(kill.expect("a shell").success());
    wait_until("the end of the process", || server.0.try_wait().expect("a state").is_some());
    server.0.wait().expect("a status")
}

/// Ends the server by a signal; returns the rest of its log.
fn stop(server: Running, mut rest: BufReader<ChildStderr>) -> String {
    let status = terminate(server);
    let mut log = String::new();
    rest.read_to_string(&mut log).expect("a text");
    assert!(status.success() && log.contains("stopped"), "{status}: {log}");
    log
}

#[test]
fn it_serves_until_a_signal_ends_it() {
    let (server, log, rest) = start(&["--kv-memory", "1G"]);
    let listening = log.lines().last().expect("a line");
    for part in ["model=\"demo\"", "parallel=4", "max_queue=64", "kv_memory=1073741824"] {
        assert!(listening.contains(part), "{part}: {log}");
    }
    assert!(log.lines().next().is_some_and(|line| line.contains(env!("CARGO_PKG_VERSION"))), "{log}");
    let answer = complete(&log, &json!({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
    let log = stop(server, rest);
    let prompt = format!("prompt_tokens={} cached_tokens=0", answer["usage"]["prompt_tokens"]);
    assert!(log.contains(&prompt), "{prompt}: {log}");
}

/// A signal during a download ends the server, with exit status 0: the Hub does not answer here.
#[cfg(feature = "hub")]
#[test]
fn a_signal_ends_it_while_it_loads() {
    let hub = TcpListener::bind("127.0.0.1:0").expect("a port");
    let endpoint = format!("http://{}", hub.local_addr().expect("an address"));
    let cache = tempfile::tempdir().expect("a directory");
    let cache = cache.path().to_str().expect("a path in UTF-8");
    let mut command = command(&["--port", "0", "--model", "test/target", "--hf-cache", cache]);
    command.env("HF_ENDPOINT", endpoint).env_remove("HF_HUB_OFFLINE").stderr(Stdio::piped());
    let mut server = Running(command.spawn().expect("a run"));
    let rest = BufReader::new(server.0.stderr.take().expect("a pipe"));
    let request = hub.accept().expect("a request");
    let log = stop(server, rest);
    assert!(log.contains("stopped while loading"), "{log}");
    drop(request);
}

/// The server continues if its log cannot be written, because the disk is full or the reader is gone.
#[test]
fn it_serves_without_a_reader_of_its_log() {
    let (server, log, rest) = start(&[]);
    drop(rest);
    for _ in 0..2 {
        let answer = complete(&log, &json!({"prompt": PROMPT, "max_tokens": 4, "ignore_eos": true}));
        assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");
    }
    assert!(terminate(server).success());
}

/// An error at the start has its exit status also if it cannot be written.
#[cfg(target_os = "linux")]
#[test]
fn an_error_on_a_full_disk_has_its_exit_status() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
    let status = command(&["--max-rows", "0"]).stderr(full).status().expect("a run");
    assert_eq!(status.code(), Some(1), "{status}");
}

/// The normalizer of Qwen3.5's tokenizer traces every character.
#[test]
fn the_log_has_no_text_at_any_level() {
    let model = foretoken_tools::repository().join("models/demo-qwen");
    let (server, log, rest) = start(&["--model", model.to_str().expect("a path in UTF-8"), "--log-level", "trace"]);
    let answer = complete(&log, &json!({"prompt": "\u{6f22}", "max_tokens": 1}));
    assert_eq!(answer["usage"]["completion_tokens"], 1, "{answer}");
    let log = stop(server, rest);
    assert!(log.contains("sequence opened") && !log.contains('\u{6f22}'), "{log}");
}

#[test]
fn wrong_arguments_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name).to_str().expect("a path in UTF-8").to_owned();
    let (empty, nowhere) = (at("keys"), at("nowhere"));
    std::fs::write(&empty, "\n  \n").expect("a file");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let port = address.rsplit(':').next().expect("a port");
    for (arguments, part) in [
        (&["--api-key-file", &empty][..], "contains no API key; write one per line"),
        (&["--api-key-file", &nowhere], &*nowhere),
        (&["--api-key", ""], "--api-key is empty"),
        (&["--alias", ""], "--alias is empty"),
        (&["--max-rows", "0"], "--max-rows must be at least 1"),
        (&["--prompt-slowdown", "0.5"], "--prompt-slowdown must be at least 1"),
        (&["--prompt-slowdown", "NaN"], "--prompt-slowdown must be at least 1"),
        (&["--parallel", "0"], "--parallel"),
        (&["--parallel", "1025"], "--parallel"),
        (&["--idle-timeout", "0"], "--idle-timeout"),
        (&["--kv-memory", "0"], "is not a number of bytes"),
        (&["--kv-memory", "2T"], "is not a number of bytes"),
        (&["--kv-memory", "18446744073709551615G"], "is not a number of bytes"),
        (&["--cache-dir", &nowhere], &*nowhere),
        (&["--spec-type", "ngram-cache", "--ngram-dynamic", &nowhere], "--ngram-dynamic: "),
        (&["--cache-dir", ".", "--no-prefix-cache"], "--no-prefix-cache"),
        (&["--chat-template-file", &nowhere], &*nowhere),
        (&["--model", &nowhere], &*nowhere),
        (&["--port", port], "pass another --port or --host"),
        (&["--log-level", "loud"], "--log-level"),
        (&["--ctx-size", "0"], "Error: --context: is 0, must be at least 1"),
        (&["--draft-block-size", "600"], "Error: --draft-block-size: is 600, must be from 1 to 512"),
        (
            &["--spec-type", "draft-model"],
            "Error: --spec-type: draft-model needs a draft model; pass --draft-model, or omit it",
        ),
        (&["--max-connections", "0"], "Error: --max-connections must be at least 1"),
        (&["--max-tokens", "0"], "Error: --max-tokens must be at least 1, or -1 for no limit"),
        (&["--top-p", "2"], "Error: --top-p: must be above 0 and at most 1"),
        (&["--dry-multiplier", "101"], "Error: --dry-multiplier: must be from 0 to 100"),
        (&["--xtc-threshold", "0.6"], "Error: --xtc-threshold: must be from 0 to 0.5"),
        (
            &["--chat-template-kwargs", "[]"],
            "Error: invalid value '[]' for '--chat-template-kwargs <JSON>': is a sequence",
        ),
        (&["model.gguf"], "model.gguf"),
        (&["--no-such-flag"], "--no-such-flag"),
    ] {
        // A free port and no log, unless that is what is wrong.
        let others = [["--port", "0"], ["--log-level", "error"]];
        let others: Vec<_> = others.into_iter().filter(|[name, _]| arguments[0] != *name).flatten().collect();
        let output = command(&[arguments, &others].concat()).output().expect("a run");
        let errors = String::from_utf8_lossy(&output.stderr);
        let what = format!("{arguments:?}: {}: {errors}", output.status);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{what}");
        assert!(errors.starts_with("Error: ") && errors.contains(part) && errors.lines().count() == 1, "{what}");
    }
}
