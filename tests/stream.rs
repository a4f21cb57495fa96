//! A generation as a stream (feature `stream`) writes what the iterator writes, whatever polls it.

mod slow_drafter;

use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::{Context, Poll, Wake, Waker};

use foretoken::speculative::{BlockSize, CustomDrafter, DrafterOptions, Drafters};
use foretoken::{
    DraftPipeline, EndOfGeneration, Engine, EngineOptions, FinishReason, GenerateOptions, Generation, GenerationStream,
    SessionOptions, Speculation, SpeculationOptions, Stop,
};
use futures_core::Stream;
use parking_lot::Mutex;
use slow_drafter::Slow;

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
    for pipeline in [DraftPipeline::InTurn, DraftPipeline::Ahead] {
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

/// Generations with the same options share a handle; the end or the drop of one stream concerns no other.
#[test]
fn a_dropped_stream_cancels_no_other() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(demo) }).expect("the demo");
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let options = GenerateOptions { max_tokens: 6, stop, ..GenerateOptions::default() };
    let begin = || {
        let session = engine.session(&SessionOptions::default()).expect("a session");
        Box::pin(session.into_generation(&[300, 301, 302], &options).expect("a generation").into_stream())
    };
    let rest = |stream: &mut Pin<Box<GenerationStream>>| -> usize {
        std::iter::from_fn(|| next(stream.as_mut())).map(|piece| piece.expect("a piece").tokens.len()).sum()
    };
    let (mut ended, mut dropped, mut other) = (begin(), begin(), begin());
    let handle = ended.cancel_handle();
    assert_eq!(rest(&mut ended), 6);
    drop(ended);
    assert!(!handle.is_cancelled());
    let handle = dropped.cancel_handle();
    next(dropped.as_mut()).expect("a piece").expect("no error");
    drop(dropped);
    assert!(handle.is_cancelled() && !options.cancel.is_cancelled());
    assert_eq!((rest(&mut other), rest(&mut begin())), (6, 6));

    // The shared handle cancels all.
    let mut both = [begin(), begin()];
    options.cancel.cancel();
    assert_eq!(both.each_mut().map(rest), [0, 0]);
}

/// Between two pieces and after the last, a stream gives its generation back, which was not cancelled; while a piece is
/// computed, itself.
#[test]
fn a_stream_gives_its_generation_back() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(demo) }).expect("the demo");
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let options = GenerateOptions { max_tokens: 6, stop, ..GenerateOptions::default() };
    let (session, prompt) = (engine.session(&SessionOptions::default()).expect("a session"), [300, 301, 302]);
    let mut stream = session.into_generation(&prompt, &options).expect("a generation").into_stream();
    assert!(Pin::new(&mut stream).poll_next(&mut Context::from_waker(Waker::noop())).is_pending());
    let mut stream = stream.into_generation().expect_err("a piece is computed");
    let mut tokens = next(Pin::new(&mut stream)).expect("a piece").expect("no error").tokens;

    let mut generation = stream.into_generation().expect("between two pieces");
    assert_eq!(generation.finish_reason(), None);
    tokens.extend(generation.next().expect("a piece").expect("no error").tokens);

    let mut stream = generation.into_stream();
    while let Some(piece) = next(Pin::new(&mut stream)) {
        tokens.extend(piece.expect("no error").tokens);
    }
    assert!(next(Pin::new(&mut stream)).is_none());
    let generation = stream.into_generation().expect("it has ended");
    assert_eq!(generation.finish_reason(), Some(FinishReason::MaxTokens));
    assert_eq!((tokens.len(), generation.statistics().generated_tokens), (6, 6));
    assert_eq!(generation.into_session().tokens(), [&prompt[..], &tokens].concat());
}

/// Calls a function for a drafter, and panics when the drafter is dropped.
struct Broken(Arc<dyn Fn() + Send + Sync>);

impl Broken {
    fn call(&self) {
        (self.0)();
    }
}

impl Drop for Broken {
    fn drop(&mut self) {
        panic!("a bug");
    }
}

/// If a stream is dropped while a piece is computed, or while a draft is made, the engine's thread drops its
/// generation. The thread continues if that panics.
#[test]
fn a_panic_while_a_generation_is_dropped_ends_no_thread() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(demo) }).expect("the demo");
    for pipeline in [DraftPipeline::InTurn, DraftPipeline::Ahead] {
        let ((begun, has_begun), (go, may_go)) = (channel(), channel::<()>());
        let may_go = Mutex::new(may_go);
        let wait: Arc<dyn Fn() + Send + Sync> = Arc::new(move || {
            let _ = begun.send(());
            // Until the other end is dropped.
            let _ = may_go.lock().recv();
        });
        let custom = CustomDrafter::new("broken", move || {
            let broken = Broken(wait.clone());
            Box::new(Slow(Arc::new(move || broken.call())))
        });
        let drafters = Drafters::Priority(vec![DrafterOptions::Custom(custom)]);
        let speculation = SpeculationOptions { drafters, block: BlockSize::Fixed(9), pipeline, ..Default::default() };
        let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
        let speculation = Speculation::With(speculation);
        let options = GenerateOptions { max_tokens: 64, speculation, stop, ..GenerateOptions::default() };
        let session = engine.session(&SessionOptions::default()).expect("a session");
        let mut stream = Box::pin(session.into_generation(&[5, 6], &options).expect("a generation").into_stream());
        next(stream.as_mut()).expect("a piece").expect("the first token");
        if pipeline == DraftPipeline::InTurn {
            // Only the second piece has a draft.
            assert!(stream.as_mut().poll_next(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        has_begun.recv().expect("a draft");
        drop(stream);
        drop(go);
        // After the generation was dropped, on the same thread.
        engine.run(|| ());
    }
}

/// While a draft waits for tasks of its own in rayon, its threads execute other jobs of the pool, but not the round
/// that waits for the draft.
#[test]
fn a_drafter_may_wait_for_rayon() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let engine = Engine::load(&EngineOptions { threads: Some(2), ..EngineOptions::new(demo) }).expect("the demo");
    let ((begun, has_begun), (go, may_go)) = (channel(), channel::<()>());
    let may_go = Mutex::new(may_go);
    let join = Arc::new(move || {
        let ((stolen, is_stolen), (back, is_back)) = (channel(), channel());
        let back_on_this_thread = || {
            let _ = (back.send(()), begun.send(()));
            // Until the other end is dropped.
            let _ = may_go.lock().recv();
        };
        let on_the_other_thread = || {
            let _ = stolen.send(());
            rayon::join(move || is_back.recv().is_ok(), back_on_this_thread);
        };
        rayon::join(move || is_stolen.recv().is_ok(), on_the_other_thread);
    });
    let custom = CustomDrafter::new("join", move || Box::new(Slow(join.clone())));
    let drafters = Drafters::Priority(vec![DrafterOptions::Custom(custom)]);
    let (block, pipeline) = (BlockSize::Fixed(2), DraftPipeline::Ahead);
    let speculation = Speculation::With(SpeculationOptions { drafters, block, pipeline, ..Default::default() });
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let options = GenerateOptions { max_tokens: 6, speculation, stop, ..GenerateOptions::default() };
    let session = engine.session(&SessionOptions::default()).expect("a session");
    let mut stream = pin!(session.into_generation(&[5, 6], &options).expect("a generation").into_stream());
    let mut tokens = next(stream.as_mut()).expect("a piece").expect("the first token").tokens.len();
    has_begun.recv().expect("a draft");
    // Both threads are in the draft now. The one that waits in rayon could execute the round.
    assert!(stream.as_mut().poll_next(&mut Context::from_waker(Waker::noop())).is_pending());
    engine.run(|| ());
    drop(go);
    while let Some(piece) = next(stream.as_mut()) {
        tokens += piece.expect("a piece").tokens.len();
    }
    assert_eq!(tokens, 6);
}

/// The thread that drops a stream does not wait for the draft that is being made, whether the piece before it was
/// polled or not.
#[test]
fn a_dropped_stream_does_not_wait_for_its_draft() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..EngineOptions::new(demo) }).expect("the demo");
    for polls in [1, 2] {
        let ((begun, has_begun), (go, may_go)) = (channel(), channel::<()>());
        let may_go = Mutex::new(may_go);
        let wait = Arc::new(move || {
            let _ = begun.send(());
            // Until the other end is dropped.
            let _ = may_go.lock().recv();
        });
        let custom = CustomDrafter::new("slow", move || Box::new(Slow(wait.clone())));
        let drafters = Drafters::Priority(vec![DrafterOptions::Custom(custom)]);
        let (block, pipeline) = (BlockSize::Fixed(9), DraftPipeline::Ahead);
        let speculation = Speculation::With(SpeculationOptions { drafters, block, pipeline, ..Default::default() });
        let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
        let options = GenerateOptions { max_tokens: 64, speculation, stop, ..GenerateOptions::default() };
        let session = engine.session(&SessionOptions::default()).expect("a session");
        let mut stream = Box::pin(session.into_generation(&[5, 6], &options).expect("a generation").into_stream());
        let mut poll = || stream.as_mut().poll_next(&mut Context::from_waker(Waker::noop()));
        assert!(poll().is_pending());
        // The only thread makes it, so the piece before it is complete.
        has_begun.recv().expect("a draft");
        if polls == 2 {
            assert!(matches!(poll(), Poll::Ready(Some(Ok(piece))) if piece.tokens.len() == 1));
        }
        drop(stream);
        drop((go, options));
        // No second token is drafted, and the drafter is dropped after the sequence.
        assert!(has_begun.recv().is_err(), "{polls} polls");
        assert_eq!(engine.pages().held(), 0, "{polls} polls");
    }
}
