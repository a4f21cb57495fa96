//! Jobs sent to the engine thread, and their updates.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use foretoken::{Cancel, CompiledConstraint, FinishReason, GenerateOptions, Piece, Statistics};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// One or more generations from one prompt.
pub(crate) struct Job {
    pub prompt: Arc<Vec<u32>>,
    /// The request's id, for the log.
    pub request_id: Arc<str>,
    /// When the request was admitted.
    pub admitted: Instant,
    /// The constraint of its options, which the engine thread need not compile again while this is held.
    pub constraint: Option<CompiledConstraint>,
    /// The first generation, which prefills the prompt.
    pub choice: Choice,
    /// Further generations, which are forked after prefill.
    pub others: Vec<Choice>,
}

impl Job {
    /// Number of generations.
    pub fn choices(&self) -> usize {
        1 + self.others.len()
    }

    /// Whether its client is gone.
    pub fn is_cancelled(&self) -> bool {
        self.choice.options.cancel.is_cancelled()
    }
}

/// One generation.
pub(crate) struct Choice {
    pub options: GenerateOptions,
    /// Unbounded, so that the engine never waits for a client: it holds at most `max_tokens` tokens.
    pub updates: UnboundedSender<Update>,
    /// Held until the generation ends.
    pub ticket: Ticket,
}

/// An update of a generation: `Started`, again if it waited for memory since, and before the first of any number of
/// `Piece`s; then `Ended`; or `Failed` at any time, which is the last.
#[derive(Debug)]
pub(crate) enum Update {
    /// It has a sequence, whose prompt has this many tokens from the prefix cache.
    Started(usize),
    /// A round's tokens, or the log-probabilities of its prompt's.
    Piece(Piece),
    Ended(Box<Ended>),
    Failed(Failure),
}

/// How a generation ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub finish: FinishReason,
    pub statistics: Statistics,
}

/// Why a generation failed.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// An error of this generation only.
    Library(Arc<foretoken::Error>),
    /// The server is shutting down.
    Stopping,
    /// A panic outside any one sequence's part of a pass.
    Panic,
    /// The engine thread has ended after a panic.
    EngineStopped,
}

/// A place in the queue (running or waiting). Dropping it frees the place.
pub(crate) struct Ticket(Arc<AtomicUsize>);

impl Ticket {
    /// A place, if fewer than `limit` are taken.
    pub fn take(taken: &Arc<AtomicUsize>, limit: usize) -> Option<Self> {
        Self::take_all(taken, limit, 1)?.pop()
    }

    /// So many places, if as many of `limit` are free. In one step: requests that took them one by one could refuse
    /// each other and all leave.
    pub fn take_all(taken: &Arc<AtomicUsize>, limit: usize, places: usize) -> Option<Vec<Self>> {
        let with_all = |taken: usize| taken.checked_add(places).filter(|taken| *taken <= limit);
        taken.fetch_update(Ordering::AcqRel, Ordering::Acquire, with_all).ok()?;
        Some((0..places).map(|_| Self(taken.clone())).collect())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The receiving side of generations. Dropping it cancels them before the next pass.
#[derive(Default)]
pub(crate) struct Running {
    /// A receiver for each; `None` when it has ended.
    updates: Vec<Option<UnboundedReceiver<Update>>>,
    cancels: Vec<Cancel>,
}

impl Running {
    /// As many generations as tickets, and their receiving side. Generation `i` has the seed plus `i`.
    pub fn choices(options: &GenerateOptions, tickets: Vec<Ticket>) -> (Vec<Choice>, Self) {
        let (mut choices, mut updates) = (Vec::new(), Vec::new());
        for (i, ticket) in (0..).zip(tickets) {
            let (send, receive) = unbounded_channel();
            // A clone would share the cancel handle.
            let (seed, cancel) = (options.seed.wrapping_add(i), Cancel::default());
            let options = GenerateOptions { seed, cancel, ..options.clone() };
            choices.push(Choice { options, updates: send, ticket });
            updates.push(Some(receive));
        }
        let cancels = choices.iter().map(|choice| choice.options.cancel.clone()).collect();
        (choices, Self { updates, cancels })
    }

    /// Adds another job's generations.
    pub fn append(&mut self, mut other: Self) {
        self.updates.append(&mut other.updates);
        self.cancels.append(&mut other.cancels);
    }

    /// The next update and its generation's index; `None` when all have ended.
    pub async fn next(&mut self) -> Option<(usize, Update)> {
        poll_fn(|context| self.poll_next(context)).await
    }

    /// The next update of the first generation, whatever others have already; `None` if it has ended.
    pub async fn next_of_first(&mut self) -> Option<Update> {
        poll_fn(|context| self.poll_of(0, context)).await
    }

    /// As [`Running::next`], for a polled body.
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        let mut all_ended = true;
        for i in 0..self.updates.len() {
            match self.poll_of(i, context) {
                Poll::Ready(Some(update)) => return Poll::Ready(Some((i, update))),
                Poll::Ready(None) => {}
                Poll::Pending => all_ended = false,
            }
        }
        if all_ended { Poll::Ready(None) } else { Poll::Pending }
    }

    /// The next update of generation `i`; `None` if it has ended.
    fn poll_of(&mut self, i: usize, context: &mut Context<'_>) -> Poll<Option<Update>> {
        let Some(updates) = &mut self.updates[i] else { return Poll::Ready(None) };
        let update = ready!(updates.poll_recv(context)).unwrap_or(Update::Failed(Failure::Panic));
        if matches!(update, Update::Ended(_) | Update::Failed(_)) {
            self.updates[i] = None;
        }
        Poll::Ready(Some(update))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.cancels.iter().for_each(Cancel::cancel);
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Barrier;
    use std::task::Waker;
    use std::thread;

    use super::*;

    /// Of two requests that ask at once for more than half of the places, one has them.
    #[test]
    fn requests_for_several_places_do_not_refuse_each_other() {
        let (taken, together) = (Arc::default(), Barrier::new(2));
        let request = || {
            let one = |_: usize| {
                together.wait();
                let tickets = Ticket::take_all(&taken, 1500, 1000);
                // Both have asked.
                together.wait();
                tickets.is_some()
            };
            (0..200).map(one).collect::<Vec<_>>()
        };
        let [first, second] = thread::scope(|scope| {
            [scope.spawn(request), scope.spawn(request)].map(|thread| thread.join().expect("no panic"))
        });
        assert!(first.iter().zip(&second).all(|(first, second)| first != second));
        assert_eq!(taken.load(Ordering::Relaxed), 0);
    }

    /// Forks can have tokens before the first generation's beginning was seen: none of them is lost.
    #[tokio::test]
    async fn updates_of_forks_wait_for_the_first_generation() {
        let tickets = (0..2).map(|_| Ticket::take(&Arc::default(), 1).expect("a place")).collect();
        let (choices, mut running) = Running::choices(&GenerateOptions::default(), tickets);
        let piece = Piece { tokens: vec![5], ..Piece::default() };
        choices[1].updates.send(Update::Piece(piece)).expect("a receiver");
        {
            let mut first = pin!(running.next_of_first());
            assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            choices[0].updates.send(Update::Started(3)).expect("a receiver");
            assert!(matches!(first.await, Some(Update::Started(3))));
        }
        assert!(matches!(running.next().await, Some((1, Update::Piece(piece))) if piece.tokens == [5]));
        drop(choices);
        assert!(matches!(running.next_of_first().await, Some(Update::Failed(Failure::Panic))));
        assert!(running.next_of_first().await.is_none());
    }
}
