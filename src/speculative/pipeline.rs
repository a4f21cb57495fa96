//! Drafts in the background while the caller does something else.
//!
//! The contract is ownership: what a job may read is moved into it, and returned by `wait`. So a cache cannot be
//! changed while a drafter reads it. This does not compile, because the cache was moved:
//!
//! ```compile_fail,E0382
//! # use foretoken::speculative::Pending;
//! # let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
//! let mut cache = vec![1, 2, 3];
//! let pending = Pending::submit(&pool, cache, |cache, _| cache.iter().sum::<i32>());
//! cache.push(4);
//! let (cache, sum) = pending.wait(&pool);
//! ```
//!
//! This does:
//!
//! ```
//! # use foretoken::speculative::Pending;
//! # let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
//! let cache = vec![1, 2, 3];
//! let pending = Pending::submit(&pool, cache, |cache, _| cache.iter().sum::<i32>());
//! let (mut cache, sum) = pending.wait(&pool);
//! cache.push(4);
//! assert_eq!(sum.unwrap(), 6);
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};

use parking_lot::Mutex;
use rayon::{ThreadPool, Yield};

use crate::{Error, Result};

/// Cancels a job. Clones cancel the same job.
#[derive(Clone, Debug, Default)]
pub struct Cancel {
    cancelled: Arc<AtomicBool>,
    parent: Option<Arc<Cancel>>,
}

impl Cancel {
    /// A handle of one job among those that `self` cancels.
    pub(crate) fn child(&self) -> Self {
        Self { cancelled: Arc::default(), parent: Some(Arc::new(self.clone())) }
    }

    /// Requests cancellation.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// True once cancelled.
    pub fn is_cancelled(&self) -> bool {
        // Only a hint: results are synchronized by channels.
        self.cancelled.load(Ordering::Relaxed) || self.parent.as_ref().is_some_and(|parent| parent.is_cancelled())
    }

    /// # Errors
    /// [`Error::Cancelled`] once cancelled.
    pub(crate) fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Cancelled) } else { Ok(()) }
    }
}

/// A job on a pool's threads that owns the work `W`. It spawns no thread, so none can leak.
#[must_use = "the work comes back from `wait` only"]
pub struct Pending<W, R> {
    result: Receiver<(W, std::thread::Result<R>)>,
    cancel: Cancel,
    #[cfg(feature = "stream")]
    continuations: Continuations,
}

/// The tasks that start when a job ends; `None` once it has ended.
#[derive(Clone)]
pub(crate) struct Continuations(Arc<Mutex<Option<Vec<Task>>>>);

type Task = Box<dyn FnOnce() + Send>;

impl<W: Send + 'static, R: Send + 'static> Pending<W, R> {
    /// Moves `work` to a thread of `pool` and runs `job` on it there.
    pub fn submit(pool: &ThreadPool, work: W, job: impl FnOnce(&mut W, &Cancel) -> R + Send + 'static) -> Self {
        Self::submit_with(pool, Cancel::default(), work, job)
    }

    /// The same, of a job that `cancel` cancels.
    pub(crate) fn submit_with(
        pool: &ThreadPool,
        cancel: Cancel,
        mut work: W,
        job: impl FnOnce(&mut W, &Cancel) -> R + Send + 'static,
    ) -> Self {
        let (send, result) = sync_channel(1);
        let continuations = Continuations(Arc::new(Mutex::new(Some(Vec::new()))));
        let (seen, waiting) = (cancel.clone(), continuations.clone());
        pool.spawn(move || {
            // The work must be returned even after a panic.
            let done = catch_unwind(AssertUnwindSafe(|| job(&mut work, &seen)));
            // Nobody waits if the `Pending` itself was dropped.
            let _ = send.send((work, done));
            let tasks = waiting.0.lock().take();
            tasks.into_iter().flatten().for_each(rayon::spawn);
        });
        Self {
            result,
            cancel,
            #[cfg(feature = "stream")]
            continuations,
        }
    }

    /// Cancels the job; [`Pending::wait`] still returns the work.
    pub fn cancel(&self) {
        self.cancel.cancel();
    }

    /// The tasks that start when the job ends.
    #[cfg(feature = "stream")]
    pub(crate) fn continuations(&self) -> Continuations {
        self.continuations.clone()
    }

    /// The work and the job's result, or its panic.
    ///
    /// # Panics
    /// If the pool was terminated with the job in it, which cannot happen to a pool in use.
    pub fn wait(self, pool: &ThreadPool) -> (W, std::thread::Result<R>) {
        // A thread of the pool must not block: the job may be in its own queue.
        while let Some(yielded) = pool.yield_now() {
            match self.result.try_recv() {
                Ok(done) => return done,
                Err(TryRecvError::Disconnected) => break,
                Err(TryRecvError::Empty) if yielded == Yield::Idle => std::thread::yield_now(),
                Err(TryRecvError::Empty) => {}
            }
        }
        self.result.recv().expect("the job sends before it ends")
    }
}

#[cfg(feature = "stream")]
impl Continuations {
    /// Runs `task`, which waits for the job, on a thread of `pool` once the job has ended. Before that, a thread of the
    /// job that waits for other tasks in rayon could execute it: each would wait for the other forever.
    pub(crate) fn spawn(&self, pool: &ThreadPool, task: impl FnOnce() + Send + 'static) {
        match &mut *self.0.lock() {
            Some(tasks) => tasks.push(Box::new(task)),
            None => pool.spawn(task),
        }
    }
}
