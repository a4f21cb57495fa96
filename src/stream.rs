//! A generation as an asynchronous stream (feature `stream`): its passes run on the engine's
//! threads, and the caller's threads never block.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use futures_core::Stream;
use parking_lot::Mutex;

use crate::generation::Generation;
use crate::piece::Piece;
use crate::speculative::Cancel;
use crate::{Error, Result};

/// Yields a [`Piece`] per round: [`Generation::into_stream`] (feature `stream`). Dropping it cancels this generation
/// before its next pass, and no other with the same [`GenerateOptions::cancel`](crate::GenerateOptions). If it computes
/// or drafts at the moment, its memory is freed on the engine's threads when that ends. After its end it holds the
/// session until it is dropped, or [given back](GenerationStream::into_generation).
#[must_use = "a stream computes nothing until it is polled"]
pub struct GenerationStream {
    state: State,
    cancel: Cancel,
}

enum State {
    /// Between two pieces.
    Idle(Box<Generation>),
    /// On one of the engine's threads.
    Running(Arc<Mutex<Job>>),
    /// Everything was yielded.
    Ended(Box<Generation>),
    /// It panicked, or was given back.
    Taken,
}

/// A generation and its next piece, or its panic.
type Done = std::thread::Result<(Box<Generation>, Option<Result<Piece>>)>;

/// A piece being computed.
struct Job {
    done: Option<Done>,
    waker: Option<Waker>,
}

impl Generation {
    /// The generation as a stream (feature `stream`). Polling drives it: nothing is computed before the first poll.
    ///
    /// ```
    /// # use foretoken::{GenerateOptions, Session};
    /// use std::future::poll_fn;
    /// use std::pin::Pin;
    ///
    /// use futures_core::Stream;
    ///
    /// # async fn write(session: Session, prompt: &[u32]) -> foretoken::Result<Session> {
    /// let mut stream = session.into_generation(prompt, &GenerateOptions::default())?.into_stream();
    /// // `StreamExt::next` of the crates futures and tokio-stream does the same.
    /// while let Some(piece) = poll_fn(|context| Pin::new(&mut stream).poll_next(context)).await {
    ///     print!("{}", piece?.text);
    /// }
    /// let generation = stream.into_generation().expect("the stream has ended");
    /// println!("{:?}: {}", generation.finish_reason(), generation.statistics());
    /// # Ok(generation.into_session())
    /// # }
    /// ```
    pub fn into_stream(self) -> GenerationStream {
        GenerationStream { cancel: self.cancel_handle(), state: State::Idle(Box::new(self)) }
    }
}

impl GenerationStream {
    /// Stops this generation alone, from anywhere: before the next chunk of the prompt, or before the next round.
    pub fn cancel_handle(&self) -> Cancel {
        self.cancel.clone()
    }

    /// The generation, between two pieces or after the last: why it ended, its statistics and its session.
    ///
    /// # Errors
    /// The stream itself while a piece is computed and was not polled, or if the generation panicked.
    pub fn into_generation(mut self) -> Result<Generation, Self> {
        match std::mem::replace(&mut self.state, State::Taken) {
            State::Idle(generation) | State::Ended(generation) => Ok(*generation),
            state => {
                self.state = state;
                Err(self)
            }
        }
    }

    fn submit(generation: Box<Generation>, waker: &Waker) -> Arc<Mutex<Job>> {
        let job = Arc::new(Mutex::new(Job { done: None, waker: Some(waker.clone()) }));
        let result = job.clone();
        // The round waits for the draft that is being made from now on.
        let waits_since = generation.draft_continuations().map(|_| Instant::now());
        spawn(generation, move |mut generation| {
            let done = catch_unwind(AssertUnwindSafe(|| {
                let piece = generation.next_since(waits_since.unwrap_or_else(Instant::now));
                (generation, piece)
            }));
            let mut job = result.lock();
            job.done = Some(done);
            let waker = job.waker.take();
            drop(job);
            waker.into_iter().for_each(Waker::wake);
        });
        job
    }
}

impl Stream for GenerationStream {
    type Item = Result<Piece, Error>;

    /// # Panics
    /// If the generation panicked, with the same payload.
    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match std::mem::replace(&mut self.state, State::Taken) {
            State::Idle(generation) => {
                self.state = State::Running(Self::submit(generation, context.waker()));
                Poll::Pending
            }
            State::Running(job) => {
                let mut running = job.lock();
                match running.done.take() {
                    Some(Ok((generation, Some(piece)))) => {
                        self.state = State::Idle(generation);
                        Poll::Ready(Some(piece))
                    }
                    Some(Ok((generation, None))) => {
                        self.state = State::Ended(generation);
                        Poll::Ready(None)
                    }
                    Some(Err(panic)) => resume_unwind(panic),
                    None => {
                        running.waker = Some(context.waker().clone());
                        drop(running);
                        self.state = State::Running(job);
                        Poll::Pending
                    }
                }
            }
            State::Ended(generation) => {
                self.state = State::Ended(generation);
                Poll::Ready(None)
            }
            State::Taken => Poll::Ready(None),
        }
    }
}

impl Drop for GenerationStream {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut self.state, State::Taken);
        if matches!(state, State::Idle(_) | State::Running(_)) {
            self.cancel.cancel();
        }
        let generation = match state {
            State::Idle(generation) => Some(generation),
            // The last reference, unless the pass still runs: then its thread drops the generation.
            State::Running(job) => {
                let done = Arc::into_inner(job).and_then(|job| job.into_inner().done);
                done.and_then(|done| done.ok()).map(|(generation, _)| generation)
            }
            State::Ended(_) | State::Taken => None,
        };
        if let Some(generation) = generation.filter(|generation| generation.draft_continuations().is_some()) {
            // Its end waits for the draft's current token, whose job may wait for others: not on this thread.
            spawn(generation, drop);
        }
    }
}

/// Runs `task` on one of the engine's threads, once no draft is being made.
fn spawn(generation: Box<Generation>, task: impl FnOnce(Box<Generation>) + Send + 'static) {
    let (engine, continuations) = (generation.engine().clone(), generation.draft_continuations());
    let task = move || task(generation);
    match continuations {
        Some(continuations) => continuations.spawn(&engine.parts.pool, task),
        None => engine.parts.pool.spawn(task),
    }
}
