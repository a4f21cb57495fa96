//! Clients that leave, do not read, or are too many; and the end.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use foretoken::{Constraint, GenerateOptions, LogitsProcessor, PrefixCacheOptions};
use foretoken_server::{GenerateDefaults, Server, ServerOptions};
use serde_json::json;

use crate::support::{
    LLAMA, PROMPT, TEXT, TestServer, agent, alone, engine, keeping_nothing, load, long, options, read_head, read_rest,
    wait_until, with,
};

const ABORTED: &str = "vllm:request_success_total{model_name=\"demo\",finished_reason=\"abort\"}";

/// Reads until the first event.
fn first_event(stream: &mut std::net::TcpStream) {
    assert!(read_head(stream).starts_with("HTTP/1.1 200"));
    let mut some = [0; 16];
    assert!(stream.read(&mut some).expect("an event") > 0);
}

#[test]
fn clients_that_leave_free_their_sequences() {
    let server = TestServer::start_on(load(), keeping_nothing());
    let want = alone(PROMPT, &GenerateOptions { max_tokens: 60, ..GenerateOptions::default() });
    // A stream, and responses that are not streamed: alone, or with bytes of a next request behind them.
    let mut streamed = server.open(TEXT, &long(8000));
    first_event(&mut streamed);
    let whole = ["", "\r\n", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"].map(|next| {
        let body = json!({"prompt": PROMPT, "max_tokens": 8000, "ignore_eos": true});
        let mut stream = server.open(TEXT, &body);
        stream.write_all(next.as_bytes()).expect("written");
        stream
    });
    wait_until("four sequences", || server.busy_slots() == 4);
    drop((streamed, whole));
    // Another one is not disturbed.
    let got = server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 60}));
    assert_eq!(got["choices"][0]["text"], want);
    wait_until("sequences freed", || server.busy_slots() == 0 && server.metric(ABORTED) == 4.0);
    assert_eq!(server.metric("foretoken:kv_cache_bytes"), 0.0);
    assert!(server.metric("vllm:generation_tokens_total") < 32_000.0, "they were written to the end");
}

#[test]
fn a_full_queue_is_429() {
    let server = TestServer::start(ServerOptions { parallel: 1, max_queue: 1, ..options() });
    let mut running = server.open(TEXT, &long(8000));
    first_event(&mut running);
    let waiting = server.open(TEXT, &long(8));
    wait_until("one that waits", || server.metric("vllm:num_requests_waiting") == 1.0);
    let slots = || ["", "?fail_on_no_slot=", "?fail_on_no_slot=1"].map(|query| server.get(&format!("/slots{query}")).0);
    assert_eq!(slots(), [200, 200, 503]);
    let post = || {
        let request = agent().post(server.url(TEXT)).header("content-type", "application/json");
        request.send(long(8).to_string()).expect("an answer")
    };
    let refused = post();
    assert_eq!((refused.status().as_u16(), &refused.headers()["retry-after"]), (429, &"1".parse().expect("a value")));
    assert_eq!(server.metric("foretoken:requests_refused_total"), 1.0);
    // One that waits leaves its place at once, and one that runs its sequence.
    drop(waiting);
    wait_until("the place of the one that waited", || server.metric("vllm:num_requests_waiting") == 0.0);
    let waiting = server.open(TEXT, &long(8));
    wait_until("another that waits", || server.metric("vllm:num_requests_waiting") == 1.0);
    drop(running);
    assert!(read_head(&waiting).starts_with("HTTP/1.1 200"));
    // Slots are published after a turn: the one that begins may not be counted yet.
    wait_until("a free slot", || slots() == [200; 3]);
    assert_eq!(post().status().as_u16(), 200);
}

/// All choices of a request that waits are counted when its client leaves.
#[test]
fn choices_that_wait_are_aborted_together() {
    let server = TestServer::start(ServerOptions { parallel: 2, ..options() });
    let mut running = server.open(TEXT, &long(8000));
    first_event(&mut running);
    let mut two = long(8);
    two["n"] = json!(2);
    let waiting = server.open(TEXT, &two);
    wait_until("two that wait", || server.metric("vllm:num_requests_waiting") == 2.0);
    drop(waiting);
    wait_until("an empty queue", || server.metric("vllm:num_requests_waiting") == 0.0);
    assert_eq!(server.metric(ABORTED), 2.0);
}

#[tokio::test]
async fn a_missing_cache_directory_is_said_at_the_start() {
    let directory = tempfile::tempdir().expect("a directory").path().join("nowhere");
    let mut options = options();
    let cache = PrefixCacheOptions { directory: Some(directory.clone()), ..PrefixCacheOptions::default() };
    options.scheduler.prefix_cache = Some(cache);
    let error = Server::bind(engine(), options).await.err().expect("an error").to_string();
    assert!(error.starts_with(&format!("{}: is not a directory", directory.display())), "{error}");
}

#[tokio::test]
async fn more_parallel_requests_than_can_be_held_are_refused() {
    for parallel in [0, 1025, usize::MAX] {
        let error = Server::bind(engine(), ServerOptions { parallel, ..options() }).await.err().expect("an error");
        assert_eq!(error.to_string(), format!("parallel is {parallel}, must be from 1 to 1024"));
    }
}

/// With these, every request would be refused, or no connection would live to have one.
#[tokio::test]
async fn options_that_serve_nothing_are_refused() {
    let mut without_interval = options();
    let cache = PrefixCacheOptions { interval: 0, ..PrefixCacheOptions::default() };
    without_interval.scheduler.prefix_cache = Some(cache);
    for (options, problem) in [
        (without_interval, "interval: of the prefix cache is 0, must be at least 1"),
        (ServerOptions { idle_timeout: Duration::ZERO, ..options() }, "idle_timeout is 0, must be above 0"),
        (ServerOptions { max_connections: 0, ..options() }, "max_connections is 0, must be at least 1"),
    ] {
        let error = Server::bind(engine(), options).await.err().expect("an error");
        assert_eq!(error.to_string(), problem);
    }
}

/// The largest limits are as none, not more than deadlines and permits can count.
#[test]
fn the_largest_limits_serve() {
    let (max_connections, idle_timeout, drain_timeout) = (usize::MAX, Duration::MAX, Duration::MAX);
    let mut server = TestServer::start(ServerOptions { max_connections, idle_timeout, drain_timeout, ..options() });
    server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 2}));
    server.join();
}

/// A client that reads nothing does not delay others, and its connection is closed in the middle of the text.
#[test]
fn slow_readers_hold_nobody() {
    let server = TestServer::start(ServerOptions { idle_timeout: Duration::from_secs(1), ..options() });
    // More than ten megabytes of events: more than the sockets' buffers.
    let mut body = long(8000);
    body["n_predict"] = body["max_tokens"].take();
    body["n_probs"] = json!(20);
    let unread = server.send(LLAMA, &body, server.connect_narrow());
    wait_until("a sequence", || server.busy_slots() == 1);
    server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": true}));
    let length = "vllm:request_success_total{model_name=\"demo\",finished_reason=\"length\"}";
    assert_eq!(server.metric(length), 1.0);
    wait_until("the connection closed for want of a reader", || server.metric(ABORTED) == 1.0);
    wait_until("its sequence freed", || server.busy_slots() == 0);
    let rest = read_rest(unread);
    assert!(rest.starts_with("HTTP/1.1 200") && !rest.contains("\"stop\":true"), "{rest}");
}

/// With room for one connection, a second one is served when the first is closed.
#[test]
fn further_connections_wait() {
    let server = TestServer::start(ServerOptions { max_connections: 1, ..options() });
    let mut first = server.open(TEXT, &long(200));
    first_event(&mut first);
    let second = server.open(TEXT, &long(1));
    let mut text = Vec::new();
    while !text.windows(6).any(|part| part == b"[DONE]") {
        let mut some = [0; 4096];
        let read = first.read(&mut some).expect("an event");
        assert!(read > 0, "the connection is closed: {}", String::from_utf8_lossy(&text));
        text.extend(&some[..read]);
    }
    // The answer to the second would have come before the end of the first's.
    second.set_nonblocking(true).expect("set");
    let error = second.peek(&mut [0]).expect_err("nothing to read");
    assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
    second.set_nonblocking(false).expect("set");
    drop(first);
    assert!(read_head(&second).starts_with("HTTP/1.1 200"));
}

#[test]
fn what_is_under_way_ends_before_the_server() {
    let mut server = TestServer::start(options());
    let mut running = server.open(TEXT, &long(600));
    first_event(&mut running);
    server.stop();
    let rest = read_rest(running);
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "{rest}");
    server.join();
    assert!(std::net::TcpStream::connect(server.address).is_err());
}

#[test]
fn what_takes_longer_than_the_drain_gets_an_error() {
    let mut server = TestServer::start(ServerOptions { drain_timeout: Duration::from_millis(50), ..options() });
    let mut running = server.open(TEXT, &long(8000));
    first_event(&mut running);
    server.stop();
    let rest = read_rest(running);
    assert!(rest.contains("\"code\":\"stopping\"") && !rest.contains("[DONE]"), "{rest}");
    server.join();
}

/// A request without a sequence: its body is not complete when the drain ends.
#[test]
fn what_is_still_sent_when_the_drain_ends_gets_an_error() {
    let mut server = TestServer::start(ServerOptions { drain_timeout: Duration::from_millis(50), ..options() });
    let mut sending = std::net::TcpStream::connect(server.address).expect("a connection");
    sending.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    let head = format!("POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
    write!(sending, "{head}content-length: 100\r\nexpect: 100-continue\r\n\r\n").expect("written");
    assert!(read_head(&sending).starts_with("HTTP/1.1 100"));
    server.stop();
    let rest = read_rest(sending);
    assert!(rest.starts_with("HTTP/1.1 503") && rest.contains("\"code\":\"stopping\""), "{rest}");
    server.join();
}

/// Fails as a device does, from so many tokens of prompt and text on.
#[derive(Debug)]
struct FailingDevice(Arc<AtomicUsize>);

impl LogitsProcessor for FailingDevice {
    fn process(&self, tokens: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        match tokens.len() >= self.0.load(Ordering::SeqCst) {
            true => Err(foretoken::Error::Device { device: "GPU".into(), problem: "is lost".into() }),
            false => Ok(()),
        }
    }
}

/// A device that fails every request is told to health checks, until a request succeeds: also if only its passes after
/// the prompt's fail.
#[test]
fn a_device_that_fails_all_requests_is_not_healthy() {
    let fails_from = Arc::<AtomicUsize>::default();
    let logits_processor: Option<Arc<dyn LogitsProcessor>> = Some(Arc::new(FailingDevice(fails_from.clone())));
    let defaults = GenerateDefaults { logits_processor, ..GenerateDefaults::default() };
    let server = TestServer::start_on(load(), ServerOptions { defaults, ..options() });
    let prompt = [2, 300, 301, 302];
    let body = json!({"prompt": prompt, "max_tokens": 2, "ignore_eos": true});
    for from in [0, prompt.len() + 1] {
        fails_from.store(from, Ordering::SeqCst);
        for health in [200, 200, 503, 503] {
            assert_eq!(server.post(TEXT, &body).0, 500);
            assert_eq!(server.get("/health").0, health, "fails from {from} tokens on");
        }
        assert!(server.get("/health").1.contains("device_lost"));
        fails_from.store(usize::MAX, Ordering::SeqCst);
        assert_eq!(server.post(TEXT, &body).0, 200);
        assert_eq!(server.get("/health").0, 200);
    }
}

/// Says that a pass has begun, which then does not end until it is let go.
#[derive(Debug)]
struct Stuck {
    begun: Sender<()>,
    let_go: Mutex<Receiver<()>>,
}

impl LogitsProcessor for Stuck {
    fn process(&self, _: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        let _ = self.begun.send(());
        let _ = self.let_go.lock().map(|let_go| let_go.recv());
        Ok(())
    }
}

#[test]
fn a_pass_that_does_not_end_keeps_no_server() {
    let ((begun, has_begun), (hold, let_go)) = (channel(), channel::<()>());
    let stuck = Stuck { begun, let_go: Mutex::new(let_go) };
    let defaults = GenerateDefaults { logits_processor: Some(Arc::new(stuck)), ..GenerateDefaults::default() };
    let drain_timeout = Duration::from_millis(50);
    let mut server = TestServer::start_on(load(), ServerOptions { defaults, drain_timeout, ..options() });
    let running = server.open(TEXT, &long(8));
    has_begun.recv().expect("a pass");
    server.join();
    drop((running, hold));
}

/// All choices but the first wait until the prompt is read.
#[test]
fn choices_wait_for_their_prompt() {
    let ((begun, has_begun), (hold, let_go)) = (channel(), channel::<()>());
    let stuck = Stuck { begun, let_go: Mutex::new(let_go) };
    let defaults = GenerateDefaults { logits_processor: Some(Arc::new(stuck)), ..GenerateDefaults::default() };
    let mut options = ServerOptions { defaults, ..options() };
    options.scheduler.max_rows = 8;
    let server = TestServer::start_on(load(), options);
    let prompt = [[2].as_slice(), &[300; 39]].concat();
    let running = server.open(TEXT, &with(&long(1), json!({"prompt": prompt, "n": 3})));
    // The last of several passes.
    has_begun.recv().expect("a pass");
    let number = |state: &str| server.metric(&format!("vllm:num_requests_{state}"));
    assert_eq!((number("running"), number("waiting")), (1.0, 2.0));
    drop((running, hold));
}

/// A request that waits keeps what was compiled for it, whatever is compiled meanwhile.
#[test]
fn what_is_compiled_for_a_request_is_held() {
    let ((begun, has_begun), (hold, let_go)) = (channel(), channel::<()>());
    let stuck = Stuck { begun, let_go: Mutex::new(let_go) };
    let defaults = GenerateDefaults { logits_processor: Some(Arc::new(stuck)), ..GenerateDefaults::default() };
    let engine = load();
    let server = TestServer::start_on(engine.clone(), ServerOptions { defaults, ..options() });
    let running = server.open(TEXT, &long(1));
    has_begun.recv().expect("a pass");
    let constraint = Constraint::regex("[ab]+");
    let waiting = server.open(TEXT, &with(&long(8), json!({"guided_regex": "[ab]+"})));
    wait_until("a compiled constraint", || engine.compiled(&constraint).is_some());
    for length in 1..=128 {
        engine.compile(&Constraint::regex(format!("a{{{length}}}"))).expect("compiled");
    }
    assert!(engine.compiled(&constraint).is_some());
    drop(hold);
    assert!(read_head(&waiting).starts_with("HTTP/1.1 200"));
    drop(running);
}
