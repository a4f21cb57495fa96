//! A request on its way through the engine thread: what it asks for, and what comes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use foretoken::speculative::Cancel;
use foretoken::{Finish, GenerateOptions, Piece, Statistics};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// A generation that is asked for.
pub(crate) struct Job {
    pub prompt: Vec<u32>,
    pub options: GenerateOptions,
    /// Of the request, for the log.
    pub request_id: String,
    /// When the request was admitted.
    pub admitted: Instant,
    /// Unbounded, so that the engine never waits for a reader: at most `max_tokens` tokens are ever in it.
    pub updates: UnboundedSender<Update>,
    /// Held until the job is over.
    pub ticket: Ticket,
}

/// What the engine thread says about a job, in this order: `Started`, any number of `Piece`s, then `Ended`; or `Failed` at any
/// time, which is the last.
#[derive(Debug)]
pub(crate) enum Update {
    /// The job has a sequence.
    Started,
    /// A round's tokens.
    Piece(Piece),
    /// It is over.
    Ended(Box<Ended>),
    /// It will not be finished.
    Failed(Failure),
}

/// How a job ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub finish: Finish,
    pub statistics: Statistics,
}

/// Why a job was not finished.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The library's error, for this job alone.
    Library(foretoken::Error),
    /// The server stops.
    Stopping,
    /// A panic outside any one sequence's part of a pass.
    Panic,
}

/// A place among the requests that may run or wait. It is free again when this is dropped.
pub(crate) struct Ticket(Arc<AtomicUsize>);

impl Ticket {
    /// A place, if fewer than `limit` are taken.
    pub fn take(taken: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        let one_more = |taken: usize| (taken < limit).then_some(taken + 1);
        taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        Some(Self(taken.clone()))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The receiving side of a job. Dropping it cancels the job: its sequence is gone before the next pass.
pub(crate) struct Running {
    updates: UnboundedReceiver<Update>,
    cancel: Cancel,
}

impl Running {
    /// A channel for the updates of a job with `options`.
    pub fn channel(options: &GenerateOptions) -> (UnboundedSender<Update>, Self) {
        let (send, updates) = unbounded_channel();
        (send, Self { updates, cancel: options.cancel.clone() })
    }

    /// The next update.
    pub async fn next(&mut self) -> Update {
        self.updates.recv().await.unwrap_or(Update::Failed(Failure::Panic))
    }

    /// The same, for a body that is polled.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Update> {
        self.updates.poll_recv(context).map(|update| update.unwrap_or(Update::Failed(Failure::Panic)))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
