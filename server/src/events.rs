//! Streamed responses: server-sent events.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use foretoken::Piece;
use hyper::body::{Bytes, Frame};
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE};
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::task::block_in_place;
use tokio::time::{Instant, Sleep, sleep};

use crate::job::{Running, Update};
use crate::reply::{ChoiceOutput, Reply};

pub(crate) fn events(body: EventBody) -> Response {
    // nginx buffers responses unless this header turns it off.
    let headers = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    (headers, [("x-accel-buffering", "no")], Body::new(body)).into_response()
}

/// Time without an event after which a comment is sent: only a write detects that the client is gone.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Bytes from which on pending events are sent as one frame.
const FRAME: usize = 16 << 10;

/// Does work that takes longer than other connections may wait: if the runtime has several threads, another one serves
/// this one's connections meanwhile.
fn beside_connections<T>(work: impl FnOnce() -> T) -> T {
    match Handle::current().runtime_flavor() {
        RuntimeFlavor::MultiThread => block_in_place(work),
        _ => work(),
    }
}

/// The events of a job. Polled when the connection can take more; until then, updates of the engine
/// wait in the channels.
pub(crate) struct EventBody {
    running: Running,
    outputs: Vec<ChoiceOutput>,
    reply: Box<dyn Reply>,
    begun: bool,
    done: bool,
    keep_alive: Pin<Box<Sleep>>,
}

impl EventBody {
    pub fn new(running: Running, outputs: Vec<ChoiceOutput>, reply: Box<dyn Reply>) -> Self {
        let keep_alive = Box::pin(sleep(KEEP_ALIVE));
        Self { running, outputs, reply, begun: false, done: false, keep_alive }
    }

    fn take(&mut self, next: Option<(usize, Update)>) -> String {
        let Some((i, update)) = next else {
            self.done = true;
            return self.reply.close(&self.outputs);
        };
        let output = &mut self.outputs[i];
        match update {
            Update::Started(cached) => {
                output.cached_tokens = cached;
                String::new()
            }
            Update::Piece(piece) => {
                let mut write = || {
                    let parts = output.add(&piece);
                    self.reply.piece(&piece, &parts, output)
                };
                // Those of a prompt may be many.
                if piece.prompt_logprobs.is_empty() { write() } else { beside_connections(write) }
            }
            Update::Ended(ended) => {
                let parts = output.finish();
                let last = match parts.is_empty() {
                    true => String::new(),
                    false => self.reply.piece(&Piece::default(), &parts, output),
                };
                last + &self.reply.end(output, &ended)
            }
            Update::Failed(failure) => {
                self.done = true;
                self.reply.failed(&output.error(&failure), output)
            }
        }
    }
}

impl hyper::body::Body for EventBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if this.done {
            return Poll::Ready(None);
        }
        let mut text = String::new();
        if !std::mem::replace(&mut this.begun, true) {
            text.extend(this.outputs.iter().map(|output| this.reply.begin(output)));
        }
        while !this.done && text.len() < FRAME {
            match this.running.poll_next(context) {
                Poll::Ready(next) => text += &this.take(next),
                Poll::Pending => break,
            }
        }
        if text.is_empty() && !this.done {
            ready!(this.keep_alive.as_mut().poll(context));
            text += ": keep-alive\n\n";
        }
        this.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
        match text.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Ready(Some(Ok(Frame::data(text.into())))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    /// A thread that serves connections may not wait: there, `block_on` panics.
    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn connections_are_served_beside_long_work() {
        let work = || Handle::current().block_on(ready(7));
        let written = tokio::spawn(async move { beside_connections(work) });
        assert_eq!(written.await.expect("no panic"), 7);
    }

    /// A runtime of one thread has no other.
    #[tokio::test]
    async fn a_single_thread_does_its_work() {
        assert_eq!(beside_connections(|| 7), 7);
    }
}
