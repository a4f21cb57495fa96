//! The server's life: listen, serve connections, drain.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use foretoken::chat::ChatTemplate;
use foretoken::{Engine, PrefixCacheOptions, SchedulerOptions, SessionOptions};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_io_timeout::TimeoutStream;

use crate::app::App;
use crate::auth::ApiKeys;
use crate::convert::{self, GenerateDefaults};
use crate::hosts::Hosts;
use crate::metrics::Metrics;
use crate::reply::now;
use crate::routes::router;
use crate::worker::{Worker, WorkerOptions};

/// Options of a server.
pub struct ServerOptions {
    /// Where to listen; port 0 is any that is free.
    pub address: SocketAddr,
    /// The model's name in requests and answers.
    pub model: String,
    /// Sequences that are decoded together. Default: 4.
    pub parallel: usize,
    /// Requests that may wait beside those. Default: 64.
    pub max_queue: usize,
    /// Of every sequence.
    pub session: SessionOptions,
    /// Rows of a pass.
    pub scheduler: SchedulerOptions,
    /// What requests leave out.
    pub defaults: GenerateDefaults,
    /// Instead of the checkpoint's. Default: none.
    pub chat_template: Option<ChatTemplate>,
    /// Of which a request must have one. Default: none are needed.
    pub api_keys: Vec<String>,
    /// Names by which requests may call a server on a loopback address, besides that address and `localhost`. Default: none.
    pub allowed_hosts: Vec<String>,
    /// Connections at a time; more wait until one is closed. Default: 256.
    pub max_connections: usize,
    /// Time in which a request's head must be there, from the last answer on; also that for which a client may take nothing of
    /// an answer. Default: 30 s.
    pub idle_timeout: Duration,
    /// Time that requests under way have when the server stops. Default: 30 s.
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

/// A server that listens.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
    max_connections: usize,
    idle_timeout: Duration,
    drain_timeout: Duration,
}

/// Header fields of a request, and bytes of its head.
const MAX_HEADERS: usize = 64;
const MAX_HEAD: usize = 64 << 10;
/// Time for answers of requests that were aborted, behind the drain.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);
/// Wait after an error of accepting, such as no file descriptor being left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

impl Server {
    /// Opens the port, and starts the engine thread. Connections wait until [`Server::run`].
    ///
    /// # Errors
    /// If the address cannot be had, a number is 0, an option of the sessions is out of its range, or K and V do not fit.
    pub async fn bind(engine: &Engine, options: ServerOptions) -> anyhow::Result<Self> {
        anyhow::ensure!(options.parallel > 0, "parallel is 0, must be at least 1");
        anyhow::ensure!(options.max_connections > 0, "max_connections is 0, must be at least 1");
        let context = check(engine, &options)?;
        let address = options.address;
        let listener = TcpListener::bind(address).await.map_err(|e| anyhow::anyhow!("{address}: {e}"))?;
        let metrics = Arc::new(Metrics::default());
        let worker = WorkerOptions {
            parallel: options.parallel,
            max_queue: options.max_queue,
            session: options.session,
            scheduler: options.scheduler,
        };
        let app = App {
            engine: engine.clone(),
            worker: Worker::start(engine, worker, metrics.clone())?,
            metrics,
            model: options.model,
            created: now(),
            context,
            parallel: options.parallel,
            defaults: options.defaults,
            chat_template: options.chat_template,
            api_keys: ApiKeys::new(options.api_keys)?,
            hosts: Hosts::new(address, options.allowed_hosts),
            stopping: AtomicBool::new(false),
        };
        Ok(Self {
            address: listener.local_addr()?,
            listener,
            app: Arc::new(app),
            max_connections: options.max_connections,
            idle_timeout: options.idle_timeout,
            drain_timeout: options.drain_timeout,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Positions of a sequence.
    pub fn context(&self) -> usize {
        self.app.context
    }

    /// Serves until `stop` is ready. Then nothing new is taken, and what is under way has the drain timeout to end; what is left
    /// then gets an error.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let (draining, drained) = watch::channel(false);
        let permits = Arc::new(Semaphore::new(self.max_connections));
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
        // Every connection closes behind the answer that it is at.
        let _ = draining.send(true);
        let all = async { while connections.join_next().await.is_some() {} };
        let mut all = pin!(all);
        if timeout(self.drain_timeout, &mut all).await.is_err() {
            tracing::warn!("requests were still under way; they get an error");
            self.app.worker.abort();
            let _ = timeout(ABORT_TIMEOUT, &mut all).await;
        }
        self.app.worker.abort();
        let app = self.app;
        // The thread ends behind the pass that it is at.
        let _ = tokio::task::spawn_blocking(move || app.worker.close()).await;
    }
}

/// The context of the sequences, if a request that says nothing can be served.
fn check(engine: &Engine, options: &ServerOptions) -> anyhow::Result<usize> {
    anyhow::ensure!(options.defaults.max_tokens != Some(0), "max_tokens is 0, must be at least 1");
    let session = engine.session(&options.session)?;
    let context = session.kv().max_context();
    let generate =
        convert::default_options(engine, &options.defaults).map_err(|error| anyhow::anyhow!(error.message))?;
    session.into_generation(&[0], &generate).map_err(|refused| refused.1)?;
    Ok(context)
}

/// Serves the requests of a connection, one after the other.
async fn serve(stream: TcpStream, router: Router, idle: Duration, mut draining: watch::Receiver<bool>) {
    // Events are small, and each is to go out at once.
    let _ = stream.set_nodelay(true);
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
    let result = tokio::select! {
        result = connection.as_mut() => result,
        _ = drained => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        // A peer that closes early, or sends what is no HTTP.
        tracing::debug!(%error, "connection closed");
    }
}
