//! A generation as a stream (feature `stream`) writes what the iterator writes, whatever polls it.

use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use foretoken::{
    Engine, EngineOptions, GenerateOptions, Generation, Pipeline, SessionOptions, Speculation, SpeculationOptions,
};
use futures_core::Stream;

/// Wakes a thread that is parked.
struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn next<S: Stream>(mut stream: Pin<&mut S>) -> Option<S::Item> {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match stream.as_mut().poll_next(&mut Context::from_waker(&waker)) {
            Poll::Ready(item) => return item,
            Poll::Pending => std::thread::park(),
        }
    }
}

fn is_send<T: Send + 'static>(_: &T) {}

#[test]
fn a_stream_writes_what_the_iterator_writes() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo");
    let options = EngineOptions::new(demo.join("target")).with_assistant(demo.join("assistant"));
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..options }).expect("the demo pair");
    let prompt = engine.tokenizer().and_then(|t| t.encode("struct Counter {\n")).expect("a prompt");
    for pipeline in [Pipeline::InTurn, Pipeline::Ahead] {
        let speculation = Speculation::With(SpeculationOptions { pipeline, ..SpeculationOptions::default() });
        let options = GenerateOptions { max_tokens: 40, speculation, ..GenerateOptions::default() };
        let begin = || -> Generation {
            let session = engine.session(&SessionOptions::default()).expect("a session");
            session.into_generation(&prompt, &options).expect("a generation")
        };
        let want: Vec<u32> = begin().flat_map(|piece| piece.expect("a piece").tokens).collect();
        let generation = begin();
        is_send(&generation);
        let stream = generation.into_stream();
        is_send(&stream);
        let mut stream = pin!(stream);
        let mut got = Vec::new();
        while let Some(piece) = next(stream.as_mut()) {
            got.extend(piece.expect("a piece").tokens);
        }
        assert_eq!(got, want);
        assert!(next(stream.as_mut()).is_none());

        let mut cancelled = Box::pin(begin().into_stream());
        let handle = cancelled.cancel_handle();
        let first = next(cancelled.as_mut()).expect("a piece").expect("no error");
        handle.cancel();
        let rest: usize =
            std::iter::from_fn(|| next(cancelled.as_mut())).map(|piece| piece.expect("a piece").tokens.len()).sum();
        assert_eq!((first.tokens.len(), rest), (1, 0));
    }
}
