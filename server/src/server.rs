//! The server: listen, serve connections, shut down gracefully.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use foretoken::chat::{ChatOptions, ChatTemplate};
use foretoken::{Engine, PrefixCacheOptions, Sampling, SchedulerOptions, SessionOptions};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use crate::app::App;
use crate::auth::ApiKeys;
use crate::compiler::Compilers;
use crate::defaults::GenerateDefaults;
use crate::hosts::Hosts;
use crate::metrics::Metrics;
use crate::reply::now;
use crate::routes::router;
use crate::served::Served;
use crate::socket::watched;
use crate::worker::{Worker, WorkerOptions};

/// Options of a server.
pub struct ServerOptions {
    /// Address to listen on; port 0 selects a free one.
    pub address: SocketAddr,
    /// The model's name in requests and responses.
    pub model: String,
    /// Maximum number of requests that are decoded in parallel, from 1 to 1024. Default: 4.
    pub parallel: usize,
    /// Maximum number of requests that wait in the queue. Default: 64.
    pub max_queue: usize,
    /// Options of every request's session.
    pub session: SessionOptions,
    /// Options of the scheduler.
    pub scheduler: SchedulerOptions,
    /// Defaults of what requests omit.
    pub defaults: GenerateDefaults,
    /// Overrides the checkpoint's. Default: none.
    pub chat_template: Option<ChatTemplate>,
    /// Accepted API keys. Default: none, which needs no key.
    pub api_keys: Vec<String>,
    /// Host names that requests to a loopback address may use, besides that address and `localhost`. Default: none.
    pub allowed_hosts: Vec<String>,
    /// Maximum number of open connections; more wait until one is closed. Default: 256.
    pub max_connections: usize,
    /// Time within which a connection's next request head must be received, and within which a client
    /// must read some of a response, above 0. Default: 30 s.
    pub idle_timeout: Duration,
    /// Time that running requests have to end at shutdown, which takes a few seconds more at most. Default: 30 s.
    pub drain_timeout: Duration,
}

impl ServerOptions {
    /// `model` on `address`, with defaults.
    pub fn new(address: SocketAddr, model: impl Into<String>) -> Self {
        Self {
            address,
            model: model.into(),
            parallel: 4,
            max_queue: 64,
            session: SessionOptions::default(),
            scheduler: SchedulerOptions {
                prefix_cache: Some(PrefixCacheOptions::default()),
                ..SchedulerOptions::default()
            },
            defaults: GenerateDefaults::default(),
            chat_template: None,
            api_keys: Vec::new(),
            allowed_hosts: Vec::new(),
            max_connections: 256,
            idle_timeout: Duration::from_secs(30),
            drain_timeout: Duration::from_secs(30),
        }
    }
}

/// A listening server.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
    max_connections: usize,
    idle_timeout: Duration,
    drain_timeout: Duration,
}

/// Maximum number of a request's header fields, and bytes of its head.
const MAX_HEADERS: usize = 64;
const MAX_HEAD: usize = 64 << 10;
/// Maximum number of parallel requests: memory is allocated for all of them at the start.
const MAX_PARALLEL: usize = 1024;
/// Time to send the errors of aborted requests, after the drain timeout.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time that the engine thread then has for its current pass.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum idle timeout, about three years: a deadline that far ahead can be computed.
const MAX_IDLE_TIMEOUT: Duration = Duration::from_secs(100_000_000);
/// Delay after an error of `accept`, such as too many open files.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

impl Server {
    /// Opens the port, and starts the engine thread. Connections are served from [`Server::run`] on.
    ///
    /// # Errors
    /// If the address is not available, a limit is 0, an option is out of range, the prefix cache's directory
    /// does not exist, or the K/V cache does not fit.
    pub async fn bind(engine: &Engine, options: ServerOptions) -> anyhow::Result<Self> {
        let context = check(engine, &options)?;
        let address = options.address;
        let listener = TcpListener::bind(address).await.map_err(|e| anyhow::anyhow!("{address}: {e}"))?;
        let metrics = Arc::new(Metrics::default());
        let worker = WorkerOptions {
            parallel: options.parallel,
            max_queue: options.max_queue,
            session: options.session,
            context,
            scheduler: options.scheduler,
        };
        let worker = Worker::start(engine, worker, metrics.clone())?;
        let served = Served {
            engine: engine.clone(),
            model: options.model,
            context,
            parallel: options.parallel,
            places: worker.limit(),
            defaults: options.defaults.of_checkpoint(engine),
            chat_template: options.chat_template,
        };
        let app = App {
            served,
            worker,
            metrics,
            compilers: Compilers::new(),
            created: now(),
            api_keys: ApiKeys::new(options.api_keys)?,
            hosts: Hosts::new(address, options.allowed_hosts),
            stopping: AtomicBool::new(false),
            aborting: watch::Sender::new(false),
        };
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            app: Arc::new(app),
            max_connections: options.max_connections,
            idle_timeout: options.idle_timeout.min(MAX_IDLE_TIMEOUT),
            drain_timeout: options.drain_timeout,
        })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Maximum tokens of a sequence.
    pub fn context(&self) -> usize {
        self.app.served.context
    }

    /// Serves until `stop` is ready. Then no new requests are accepted, and running ones have the drain
    /// timeout to end; what is left then gets an error.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (draining, drained) = watch::channel(false);
        let permits = Arc::new(Semaphore::new(self.max_connections.min(Semaphore::MAX_PERMITS)));
        let mut connections = JoinSet::new();
        let router = router(self.app.clone());
        let mut stop = pin!(stop);
        loop {
            let accepted = async {
                let permit = permits.clone().acquire_owned().await;
                (permit, self.listener.accept().await)
            };
            tokio::select! {
                () = &mut stop => break,
                (permit, accepted) = accepted => match accepted {
                    Ok((stream, _)) => {
                        let serving = serve(stream, router.clone(), self.idle_timeout, drained.clone());
                        connections.spawn(async move {
                            serving.await;
                            drop(permit);
                        });
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection was not accepted");
                        sleep(ACCEPT_RETRY).await;
                    }
                },
            }
            while connections.try_join_next().is_some() {}
        }
        drop(self.listener);
        tracing::info!(connections = connections.len(), "stopping");
        self.app.stopping.store(true, Ordering::Release);
        // Every connection closes after its current response.
        let _ = draining.send(true);
        let all = async { while connections.join_next().await.is_some() {} };
        let mut all = pin!(all);
        if timeout(self.drain_timeout, &mut all).await.is_err() {
            tracing::warn!("drain timeout: the remaining requests are aborted");
            self.app.aborting.send_replace(true);
            self.app.worker.abort();
            let _ = timeout(ABORT_TIMEOUT, &mut all).await;
        }
        self.app.worker.abort();
        if timeout(CLOSE_TIMEOUT, close(self.app)).await.is_err() {
            tracing::warn!("the engine thread's current pass takes longer; the thread ends with the process");
        }
    }
}

/// Waits for the engine thread, which ends after its current pass. Not on the runtime's threads,
/// which may all be taken.
async fn close(app: Arc<App>) {
    let (send, closed) = oneshot::channel();
    std::thread::spawn(move || {
        app.worker.close();
        let _ = send.send(());
    });
    let _ = closed.await;
}

/// Checks the options, and that a request with defaults can be served. Returns the context length.
fn check(engine: &Engine, options: &ServerOptions) -> anyhow::Result<usize> {
    let parallel = options.parallel;
    anyhow::ensure!((1..=MAX_PARALLEL).contains(&parallel), "parallel is {parallel}, must be from 1 to {MAX_PARALLEL}");
    anyhow::ensure!(options.max_connections > 0, "max_connections is 0, must be at least 1");
    anyhow::ensure!(!options.idle_timeout.is_zero(), "idle_timeout is 0, must be above 0");
    anyhow::ensure!(options.defaults.max_tokens != Some(0), "max_tokens is 0, must be at least 1");
    options.scheduler.prefix_cache.iter().try_for_each(PrefixCacheOptions::check)?;
    if let Some(directory) = options.scheduler.prefix_cache.as_ref().and_then(|cache| cache.directory.as_ref()) {
        anyhow::ensure!(
            directory.is_dir(),
            "{}: is not a directory, so cached prefixes cannot be saved there; create it first",
            directory.display()
        );
    }
    let defaults = &options.defaults;
    std::iter::once(&defaults.sampling).chain(&defaults.chat_sampling).try_for_each(Sampling::check)?;
    ChatOptions { variables: defaults.variables.clone(), ..ChatOptions::default() }.check()?;
    let session = engine.session(&options.session)?;
    let context = session.kv().max_context();
    session.into_generation(&[0], &defaults.options()).map_err(foretoken::Error::from)?;
    Ok(context)
}

/// Serves the requests of a connection in order.
async fn serve(stream: TcpStream, router: Router, idle: Duration, mut draining: watch::Receiver<bool>) {
    // Events are small, and each is sent at once.
    let _ = stream.set_nodelay(true);
    let (stream, watch) = watched(stream);
    let mut stream = TimeoutStream::new(stream);
    stream.set_write_timeout(Some(idle));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(router));
    let mut connection = pin!(connection);
    let drained = async { draining.wait_for(|draining| *draining).await.is_ok() };
    let served = async {
        tokio::select! {
            result = connection.as_mut() => result,
            _ = drained => {
                connection.as_mut().graceful_shutdown();
                connection.as_mut().await
            }
        }
    };
    tokio::select! {
        biased;
        result = served => if let Err(error) = result {
            // The client closed early, or sent something that is not HTTP.
            tracing::debug!(%error, "connection closed");
        },
        // The handler or the response is dropped with its client, which ends the generation.
        () = watch.closed() => {}
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::io::{self, Write};
    use std::pin::Pin;
    use std::sync::Mutex;
    use std::task::{Context, Poll, Waker};

    use axum::body::Body;
    use foretoken::EngineOptions;
    use hyper::body::{Bytes, Frame};
    use hyper::service::Service;
    use hyper::{Request, StatusCode};

    use super::*;

    /// A body of which nothing is sent.
    struct Unsent;

    impl hyper::body::Body for Unsent {
        type Data = Bytes;
        type Error = Infallible;

        fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
            Poll::Pending
        }
    }

    /// A log that is kept.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().expect("the log").write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The state of a server of the demo model.
    async fn app(api_keys: Vec<String>) -> Arc<App> {
        let engine = Engine::load(&EngineOptions::new(foretoken_tools::demo("target"))).expect("the demo model");
        let any_port = SocketAddr::from(([127, 0, 0, 1], 0));
        let options = ServerOptions { api_keys, ..ServerOptions::new(any_port, "demo") };
        Server::bind(&engine, options).await.expect("a server").app
    }

    /// The bodies of refused requests are not waited for after the drain.
    #[tokio::test]
    async fn refused_requests_are_answered_when_the_drain_ends() {
        let app = app(vec!["a key".into()]).await;
        let request = Request::post("/v1/completions").header("host", "localhost").body(Body::new(Unsent));
        let service = TowerToHyperService::new(router(app.clone()));
        let mut response = pin!(service.call(request.expect("a request")));
        let mut context = Context::from_waker(Waker::noop());
        assert!(response.as_mut().poll(&mut context).is_pending());
        app.aborting.send_replace(true);
        let Poll::Ready(Ok(response)) = response.as_mut().poll(&mut context) else { panic!("it waits for the body") };
        assert_eq!(response.status(), StatusCode::UNAUTHORIZED);
    }

    /// Whatever a request waits for, its client's leaving is in the log.
    #[tokio::test]
    async fn requests_that_are_not_answered_are_logged() {
        let service = TowerToHyperService::new(router(app(Vec::new()).await));
        let request = Request::post("/v1/completions").header("host", "localhost").header("x-request-id", "left");
        let request = request.header("content-type", "application/json").body(Body::new(Unsent)).expect("a request");
        let kept = Log::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let mut response = Box::pin(service.call(request));
        assert!(response.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        drop(response);
        let log = String::from_utf8(kept.0.lock().expect("the log").clone()).expect("a text");
        let line = log.lines().find(|line| line.contains("request=\"left\"")).unwrap_or_default();
        assert!(line.contains("closed before the response") && line.contains("route=\"/v1/completions\""), "{log}");
    }

    /// Also from a response that sends nothing, with bytes of a next request behind the one that it answers.
    #[tokio::test]
    async fn clients_that_leave_a_silent_response_are_noticed() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt}; // `Write` has methods of the same names

        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a listener");
        let address = listener.local_addr().expect("an address");
        let mut client = TcpStream::connect(address).await.expect("a connection");
        let (stream, _) = listener.accept().await.expect("a connection");
        let router = Router::new().fallback(|| async { Body::new(Unsent) });
        let (_draining, drained) = watch::channel(false);
        let mut serving = pin!(serve(stream, router, Duration::from_secs(30), drained));
        client.write_all(b"GET / HTTP/1.1\r\n\r\n\r\n").await.expect("written");
        let mut begin = [0; 12];
        tokio::select! {
            () = &mut serving => panic!("it is not served"),
            read = client.read_exact(&mut begin) => assert_eq!(read.expect("a head"), begin.len()),
        }
        assert_eq!(&begin, b"HTTP/1.1 200");
        drop(client);
        // While nothing is ready, the clock jumps to the next timer.
        tokio::time::pause();
        timeout(Duration::from_secs(3600), serving).await.expect("the connection is closed");
    }

    /// Also if its constraint finds the queue of compilers full.
    #[tokio::test]
    async fn requests_that_find_a_full_queue_are_counted() {
        let app = app(Vec::new()).await;
        let service = TowerToHyperService::new(router(app.clone()));
        let body = Body::from(r#"{"prompt": "a", "guided_regex": "[ab]+"}"#);
        let request = Request::post("/v1/completions").header("host", "localhost");
        let request = request.header("content-type", "application/json").body(body).expect("a request");
        let places = app.compilers.fill();
        let response = service.call(request).await.expect("a response");
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let metrics = app.metrics.text("demo", &app.served.engine);
        assert!(metrics.contains("foretoken:requests_refused_total{model_name=\"demo\"} 1\n"), "{metrics}");
        drop(places);
    }
}
