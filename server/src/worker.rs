//! A handle of the engine thread: admission, submission, and its end.

mod engine_thread;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use foretoken::Engine;

use crate::job::{Failure, Job, Ticket};
use crate::metrics::Metrics;
pub(crate) use engine_thread::WorkerOptions;
use engine_thread::{EngineThread, Shared, Slot};

/// Passes in which the device failed, without a request that ended since, after which it counts as lost: a driver's
/// faults seldom pass.
const LOST_AFTER: usize = 3;

/// A handle of the engine thread.
pub(crate) struct Worker {
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    taken: Arc<AtomicUsize>,
    limit: usize,
    shared: Arc<Shared>,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(engine: &Engine, options: WorkerOptions, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let (send, jobs) = channel();
        let limit = options.parallel.saturating_add(options.max_queue);
        let thread = EngineThread::new(engine, options, jobs, metrics);
        let shared = thread.shared.clone();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || thread.run())?;
        let (jobs, thread) = (Mutex::new(Some(send)), Mutex::new(Some(thread)));
        Ok(Self { jobs, thread, taken: Arc::default(), limit, shared })
    }

    /// Reserves as many places in the queue; `None` if fewer are free.
    pub fn admit(&self, places: usize) -> Option<Vec<Ticket>> {
        Ticket::take_all(&self.taken, self.limit, places)
    }

    /// Maximum number of running and waiting requests.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Sends a job to the thread.
    ///
    /// # Errors
    /// If the worker was closed, or the thread has panicked.
    pub fn submit(&self, job: Job) -> Result<(), Failure> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.as_ref().ok_or(Failure::Stopping)?.send(job).map_err(|_| Failure::EngineStopped)
    }

    /// The slots.
    pub fn slots(&self) -> Vec<Slot> {
        self.shared.slots.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the thread runs.
    pub fn is_alive(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Whether the device failed in several passes, and no request has ended normally since.
    pub fn has_lost_device(&self) -> bool {
        self.shared.device_failures.load(Ordering::Relaxed) >= LOST_AFTER
    }

    /// Fails all jobs, running and waiting, before the next pass.
    pub fn abort(&self) {
        self.shared.abort.store(true, Ordering::Release);
    }

    /// Accepts no more jobs, and waits until the accepted ones have ended.
    pub fn close(&self) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the engine thread had panicked");
        }
    }
}

#[cfg(test)]
mod tests;
