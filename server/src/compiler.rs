//! Compiles constraints on threads of their own, a few at a time. Constraints that are already compiled do not wait.

use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use foretoken::{CompiledConstraint, Constraint, Engine};
use hyper::StatusCode;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::api_error::{ApiError, Result};
use crate::call_format::{CallFormat, Located};
use crate::job::Ticket;

/// Threads that compile.
const MAX_THREADS: usize = 2;
/// Maximum number of requests that compile or wait for that.
const MAX_COMPILING: usize = 16;
/// Bytes of stack, of which only those that are used take memory: the grammar of a tool's schema is
/// written by recursion.
const STACK: usize = 256 << 20;
/// Time within which a constraint must be compiled, including the wait.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of remembered call formats, as many as the engine caches constraints, and bytes of a remembered key.
const MAX_KNOWN: usize = 128;
const MAX_KEY: usize = 512 << 10;

/// The queue for the threads.
pub(crate) struct Compilers {
    taken: Arc<AtomicUsize>,
    running: Arc<Semaphore>,
    /// Constraints of call formats, the last used at the end; `None` if there is none.
    known: Mutex<VecDeque<(String, Option<Constraint>)>>,
}

impl Compilers {
    pub fn new() -> Self {
        Self { taken: Arc::default(), running: Arc::new(Semaphore::new(MAX_THREADS)), known: Mutex::default() }
    }

    /// Takes all places of the queue.
    #[cfg(test)]
    pub fn fill(&self) -> Vec<Ticket> {
        Ticket::take_all(&self.taken, MAX_COMPILING, MAX_COMPILING).expect("an empty queue")
    }

    /// Compiles the constraint of the field `field`.
    ///
    /// # Errors
    /// 400 if it cannot be used; 429 if too many requests wait, 503 if it takes too long.
    pub async fn compile(&self, engine: &Engine, constraint: &Constraint, field: &str) -> Result<CompiledConstraint> {
        if let Some(compiled) = engine.compiled(constraint) {
            return Ok(compiled);
        }
        let (engine, constraint) = (engine.clone(), constraint.clone());
        self.run(move || engine.compile(&constraint)).await?.map_err(|error| ApiError::of_constraint(&error, field))
    }

    /// Makes and compiles the constraint of calls. `None` if there is none.
    ///
    /// # Errors
    /// As [`Compilers::compile`]; a 400 names the tool's field.
    pub async fn compile_calls(&self, engine: &Engine, calls: CallFormat) -> Result<Option<CompiledConstraint>> {
        let key = format!("{calls:?}");
        if let Some(known) = self.known(&key) {
            let compiled = known.as_ref().and_then(|constraint| engine.compiled(constraint));
            if known.is_none() || compiled.is_some() {
                return Ok(compiled);
            }
        }
        let own = engine.clone();
        let compiled = match self.run(move || calls.constraint(&own)).await?? {
            Some(located) => Some(self.compile_located(engine, located).await?),
            None => None,
        };
        self.remember(key, compiled.as_ref().map(|compiled| compiled.constraint().clone()));
        Ok(compiled)
    }

    async fn compile_located(&self, engine: &Engine, located: Located) -> Result<CompiledConstraint> {
        let Located { constraint, field, parts, widened } = located;
        let error = match self.compile(engine, &constraint, &field).await {
            Ok(compiled) => return Ok(compiled),
            Err(error) => error,
        };
        // A timeout or a full queue is not an error of the schemas: wider ones, or each alone, would not compile either.
        if error.status != StatusCode::BAD_REQUEST {
            return Err(error);
        }
        let own = engine.clone();
        if let Some(widened) = widened
            && let Ok(widened) = self.run(move || widened(&own)).await?
            && let Ok(compiled) = self.compile(engine, &widened, &field).await
        {
            return Ok(compiled);
        }
        for (part, of_part) in parts {
            self.compile(engine, &part, &of_part).await?;
        }
        Err(error)
    }

    fn known(&self, key: &str) -> Option<Option<Constraint>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let at = known.iter().position(|(of, _)| of == key)?;
        let used = known.remove(at)?;
        let constraint = used.1.clone();
        known.push_back(used);
        Some(constraint)
    }

    fn remember(&self, key: String, constraint: Option<Constraint>) {
        if key.len() > MAX_KEY {
            return;
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(of, _)| *of != key);
        if known.len() == MAX_KNOWN {
            known.pop_front();
        }
        known.push_back((key, constraint));
    }

    /// Does work on a thread of its own: compiling cannot be interrupted, and must delay neither
    /// tokenizing nor the shutdown.
    ///
    /// # Errors
    /// 429 if too many requests wait, 503 if the work takes too long, 500 if it panics.
    async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let ticket = Ticket::take(&self.taken, MAX_COMPILING).ok_or_else(|| {
            let message = format!("{MAX_COMPILING} requests are compiling schemas or grammars; retry later");
            ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("queue_full")
        })?;
        let (send, receive) = oneshot::channel();
        let done = async {
            let permit = self.running.clone().acquire_owned().await;
            let thread = std::thread::Builder::new().name("constraint".into()).stack_size(STACK).spawn(move || {
                let result = work();
                drop((permit, ticket));
                let _ = send.send(result);
            });
            thread.map_err(|_| ApiError::internal())?;
            receive.await.map_err(|_| ApiError::internal())
        };
        timeout(COMPILE_TIMEOUT, done).await.unwrap_or_else(|_| {
            let message = format!("the schema or grammar was not compiled within {} s", COMPILE_TIMEOUT.as_secs());
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("compile_timeout"))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::task::{Context, Poll, Waker};

    use foretoken::EngineOptions;
    use foretoken::chat::ChatOptions;
    use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
    use tokio::task::JoinSet;
    use tokio::time::Instant;

    use super::*;

    /// What a future has at its first poll.
    fn at_once<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn engine() -> Engine {
        Engine::load(&EngineOptions::new(foretoken_tools::demo("target"))).expect("the demo model")
    }

    fn calls(format: &Constraint) -> CallFormat {
        let options = ChatOptions::default();
        CallFormat { options, choice: None, declared: Vec::new(), format: Some((format.clone(), "field".into())) }
    }

    /// Work that reports its start and runs until it is released. `most` counts those that run at once.
    struct Held {
        begun: UnboundedSender<()>,
        release: Arc<Mutex<Receiver<()>>>,
        running: Arc<AtomicUsize>,
        most: Arc<AtomicUsize>,
    }

    impl Held {
        fn work(&self) -> impl FnOnce() + Send + use<> {
            let (begun, release) = (self.begun.clone(), self.release.clone());
            let (running, most) = (self.running.clone(), self.most.clone());
            move || {
                most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let _ = begun.send(());
                let _ = release.lock().map(|release| release.recv());
                running.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }

    fn held() -> (Held, UnboundedReceiver<()>, Sender<()>) {
        let ((begun, has_begun), (go, release)) = (unbounded_channel(), channel());
        let release = Arc::new(Mutex::new(release));
        (Held { begun, release, running: Arc::default(), most: Arc::default() }, has_begun, go)
    }

    #[tokio::test]
    async fn two_compile_and_the_seventeenth_is_refused() {
        let (held, mut has_begun, go) = held();
        let compilers = Arc::new(Compilers::new());
        let mut waiting = JoinSet::new();
        for _ in 0..MAX_COMPILING {
            let (compilers, work) = (compilers.clone(), held.work());
            waiting.spawn(async move { compilers.run(work).await });
        }
        while compilers.taken.load(Ordering::SeqCst) < 16 {
            tokio::task::yield_now().await;
        }
        let refused = compilers.run(|| ()).await.expect_err("no place");
        assert_eq!((refused.status, refused.code), (StatusCode::TOO_MANY_REQUESTS, Some("queue_full")));
        for ended in 0..MAX_COMPILING {
            // Two have begun; when one ends, so does the next.
            let begins = if ended == 0 { 2 } else { usize::from(ended <= 14) };
            for _ in 0..begins {
                has_begun.recv().await.expect("it begins");
            }
            assert!(has_begun.try_recv().is_err(), "a third one has begun");
            go.send(()).expect("it waits");
        }
        while let Some(done) = waiting.join_next().await {
            done.expect("no panic").expect("done");
        }
        assert_eq!(held.most.load(Ordering::SeqCst), 2);
        assert_eq!(compilers.run(|| 5).await.expect("a place"), 5);
    }

    /// The wait for a thread counts. What cannot be interrupted keeps its place.
    #[tokio::test(start_paused = true)]
    async fn what_takes_thirty_seconds_is_given_up() {
        let (held, _has_begun, go) = held();
        let compilers = Compilers::new();
        let begin = Instant::now();
        let all = tokio::join!(compilers.run(held.work()), compilers.run(held.work()), compilers.run(held.work()));
        assert_eq!(begin.elapsed().as_secs(), 30);
        for done in [all.0, all.1, all.2] {
            let error = done.expect_err("too late");
            assert_eq!((error.status, error.code), (StatusCode::SERVICE_UNAVAILABLE, Some("compile_timeout")));
            assert!(error.message.contains("not compiled within 30 s"), "{}", error.message);
        }
        assert_eq!((compilers.taken.load(Ordering::SeqCst), compilers.running.available_permits()), (2, 0));
        drop(go);
        drop(compilers.running.acquire_many(MAX_THREADS as u32).await.expect("both threads"));
    }

    /// After a timeout, parts are not compiled one by one.
    #[tokio::test(start_paused = true)]
    async fn what_takes_too_long_is_not_located() {
        let (engine, compilers) = (engine(), Compilers::new());
        let _threads = compilers.running.acquire_many(MAX_THREADS as u32).await.expect("all threads");
        let [constraint, part] = ["[ab]", "[bc]"].map(Constraint::regex);
        let located = Located { constraint, field: "field".into(), parts: vec![(part, "part".into())], widened: None };
        let begin = Instant::now();
        let error = compilers.compile_located(&engine, located).await.expect_err("too late");
        assert_eq!((error.code, begin.elapsed().as_secs()), (Some("compile_timeout"), 30));
    }

    #[tokio::test]
    async fn what_is_compiled_does_not_wait_for_a_thread() {
        let (engine, compilers) = (engine(), Compilers::new());
        let [first, second] = ["[ab]", "[bc]"].map(Constraint::regex);
        compilers.compile(&engine, &first, "field").await.expect("compiled");
        let compiled = compilers.compile_calls(&engine, calls(&first)).await.expect("compiled");
        assert_eq!(compiled.expect("a constraint").constraint(), &first);

        let threads = compilers.running.acquire_many(MAX_THREADS as u32).await.expect("all threads");
        assert!(matches!(at_once(compilers.compile(&engine, &first, "field")), Poll::Ready(Ok(_))));
        let known = at_once(compilers.compile_calls(&engine, calls(&first)));
        assert!(matches!(known, Poll::Ready(Ok(Some(compiled))) if *compiled.constraint() == first));
        assert!(at_once(compilers.compile(&engine, &second, "field")).is_pending());
        assert!(at_once(compilers.compile_calls(&engine, calls(&second))).is_pending());
        // Nor for a place in the queue.
        let places = compilers.fill();
        assert!(matches!(at_once(compilers.compile(&engine, &first, "field")), Poll::Ready(Ok(_))));
        assert!(matches!(at_once(compilers.compile(&engine, &second, "field")), Poll::Ready(Err(error))
            if error.status == StatusCode::TOO_MANY_REQUESTS));
        drop((threads, places));
        compilers.compile(&engine, &second, "field").await.expect("compiled");
        assert!(engine.compiled(&second).is_some());
    }
}
