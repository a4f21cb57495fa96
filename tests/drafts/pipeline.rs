//! Drafting ahead: the cache moves to the drafting job and back, whatever happens to the generation.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use foretoken::chat::{ChatTemplate, ReplyParser};
use foretoken::checkpoint::Checkpoint;
use foretoken::speculative::{BlockSize, CustomDrafter, DrafterOptions, Drafters, Pending};
use foretoken::tokenizer::Tokenizer;
use foretoken::{
    Cancel, Constraint, DraftPipeline, Engine, EngineOptions, Error, Event, FinishReason, GenerateOptions, Generation,
    NotStarted, Scheduler, SchedulerOptions, Session, SessionOptions, Speculation, SpeculationOptions,
};
use parking_lot::Mutex;

use crate::cases;
use crate::demo_pair::{demo, ids, options, plain};
use crate::slow_drafter::Slow;

/// Threads share engines and options, and pass sequences on.
#[test]
fn engines_are_shared_and_sequences_move() {
    fn shared<T: Send + Sync + 'static>() {}
    fn moved<T: Send + 'static>() {}
    shared::<(Engine, Tokenizer, ChatTemplate, Checkpoint)>();
    shared::<(EngineOptions, SessionOptions, GenerateOptions, SchedulerOptions, Constraint, Cancel)>();
    shared::<(Error, Event)>();
    moved::<(Session, Generation, Scheduler, NotStarted, ReplyParser)>();
}

fn pool(threads: usize) -> rayon::ThreadPool {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("threads")
}

#[test]
fn work_goes_and_comes_back() {
    let pool = pool(2);
    let pending = Pending::submit(&pool, vec![1, 2], |work, _| {
        work.push(3);
        work.len()
    });
    let (work, result) = pending.wait(&pool);
    assert_eq!((work, result.expect("no panic")), (vec![1, 2, 3], 3));
}

#[test]
fn a_cancelled_job_sees_it() {
    let pool = pool(1);
    let pending = Pending::submit(&pool, 0_u64, |rounds, cancel| {
        while !cancel.is_cancelled() {
            *rounds += 1;
            std::thread::sleep(Duration::from_micros(50));
        }
    });
    pending.cancel();
    assert!(pending.wait(&pool).1.is_ok());
}

#[test]
fn a_panic_loses_no_work() {
    let pool = pool(1);
    let pending = Pending::submit(&pool, String::from("cache"), |_, _| -> usize { panic!("a bug") });
    let (work, result) = pending.wait(&pool);
    assert_eq!(work, "cache");
    let payload = result.expect_err("the panic");
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"a bug"));
    // The pool's thread survives.
    assert_eq!(pool.install(|| 7), 7);
}

/// A caller on the pool's only thread runs the job itself instead of deadlocking.
#[test]
fn waiting_on_the_pool_itself() {
    let pool = pool(1);
    let sum = pool.install(|| {
        let pending = Pending::submit(&pool, vec![1, 2, 3], |work, _| work.iter().sum::<i32>());
        pending.wait(&pool).1.expect("no panic")
    });
    assert_eq!(sum, 6);
}

/// Drafting ahead on the engine's own and only thread.
#[test]
fn a_generation_on_the_engines_thread() {
    let engine = demo(1);
    let prompt = engine.tokenizer().and_then(|t| t.encode("impl Iterator for Counter {\n")).expect("tokens");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let ahead = options("mtp", BlockSize::Fixed(4), DraftPipeline::Ahead, 24);
    let got = engine.run(|| ids(&mut session, &prompt, &ahead));
    let mut fresh = engine.session(&SessionOptions::default()).expect("a session");
    assert_eq!(got, ids(&mut fresh, &prompt, &plain(24)));
}

/// The session can be read between two rounds; the draft being made is used by the next one.
#[test]
fn a_session_is_read_while_the_next_draft_is_made() {
    let engine = demo(1);
    let prompt = engine.tokenizer().and_then(|t| t.encode("impl Iterator for Counter {\n")).expect("tokens");
    let ahead = options("mtp", BlockSize::Fixed(4), DraftPipeline::Ahead, 24);
    let want = ids(&mut engine.session(&SessionOptions::default()).expect("a session"), &prompt, &plain(24));
    let session = engine.session(&SessionOptions::default()).expect("a session");
    let mut generation = session.into_generation(&prompt, &ahead).expect("a generation");
    let mut written = prompt.clone();
    while let Some(piece) = generation.next() {
        written.extend(piece.expect("a piece").tokens);
        assert_eq!(generation.session().tokens(), written);
        assert_eq!(generation.session().kv().len(), written.len() - 1);
    }
    assert_eq!(written[prompt.len()..], want);
    let statistics = generation.statistics();
    assert!(statistics.accepted > 0 && statistics.speculation.cancelled == 0, "{statistics}");
    assert_eq!(generation.into_session().tokens(), written);
}

/// A cancelled generation does not wait for the rest of the draft that is being made.
#[test]
fn cancelling_ends_the_draft_after_its_token() {
    let (engine, drafted) = (demo(1), Arc::new(AtomicUsize::new(0)));
    let ((begun, is_begun), (go, may_go)) = (channel(), channel::<()>());
    let (counted, may_go) = (drafted.clone(), Mutex::new(may_go));
    let wait = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        begun.send(()).expect("the test");
        // Until the other end is dropped.
        let _ = may_go.lock().recv();
    });
    let custom = CustomDrafter::new("slow", move || Box::new(Slow(wait.clone())));
    let drafters = Drafters::Priority(vec![DrafterOptions::Custom(custom)]);
    let (block, pipeline) = (BlockSize::Fixed(9), DraftPipeline::Ahead);
    let speculation = Speculation::With(SpeculationOptions { drafters, block, pipeline, ..Default::default() });
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let mut generation =
        session.generate(&[5, 6], &GenerateOptions { speculation, ..plain(64) }).expect("a generation");
    assert_eq!(generation.next().expect("a piece").expect("the first token").tokens.len(), 1);
    is_begun.recv().expect("a draft");
    generation.cancel_handle().cancel();
    drop(go);
    assert!(generation.all(|piece| piece.expect("held back text").tokens.is_empty()));
    assert_eq!((generation.finish_reason(), drafted.load(Ordering::Relaxed)), (Some(FinishReason::Cancelled), 1));
    assert_eq!(generation.statistics().speculation.cancelled, 1);
}

/// The proposal of a plain step is no draft that was discarded.
#[test]
fn only_drafts_count_as_discarded() {
    let engine = demo(1);
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let ahead = options("ngram-simple:n=64", BlockSize::Fixed(4), DraftPipeline::Ahead, 24);
    let mut generation = session.generate(&[5, 6], &ahead).expect("a generation");
    assert_eq!(generation.next().expect("a piece").expect("the first token").tokens.len(), 1);
    generation.cancel_handle().cancel();
    assert!(generation.all(|piece| piece.expect("held back text").tokens.is_empty()));
    assert_eq!(generation.statistics().speculation.cancelled, 0);
}

/// A scheduler with a prefix cache waits for the draft of a leaked generation, as the session itself does.
#[test]
fn the_session_of_a_leaked_generation_is_scheduled() {
    let engine = demo(1);
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let ahead = options("mtp", BlockSize::Fixed(4), DraftPipeline::Ahead, 24);
    let mut generation = session.generate(&[5, 6], &ahead).expect("a generation");
    generation.next().expect("a piece").expect("no error");
    std::mem::forget(generation);
    let cached = SchedulerOptions { prefix_cache: Some(Default::default()), ..SchedulerOptions::default() };
    let mut scheduler = Scheduler::new(&engine, cached);
    let id = scheduler.add(session, &[7], &plain(4)).expect("a sequence");
    assert_eq!(cases::texts(&mut scheduler)[&id].len(), 4);
}

/// Two sessions of one engine with different options, from two threads.
#[test]
fn sessions_differ() {
    let engine = demo(2);
    let prompt = engine.tokenizer().and_then(|t| t.encode("/// Returns the")).expect("tokens");
    let mut fresh = engine.session(&SessionOptions::default()).expect("a session");
    let want = ids(&mut fresh, &prompt, &plain(64));
    let wishes = [
        options("mtp", BlockSize::Fixed(6), DraftPipeline::Ahead, 64),
        options("ngram-simple:n=2,mtp", BlockSize::Measured, DraftPipeline::InTurn, 64),
        plain(64),
    ];
    std::thread::scope(|scope| {
        let run = |wish| {
            let (engine, prompt) = (&engine, &prompt);
            scope.spawn(move || {
                let mut session = engine.session(&SessionOptions::default()).expect("a session");
                let mut generation = session.generate(prompt, wish).expect("a generation");
                let ids: Vec<u32> = generation.by_ref().flat_map(|piece| piece.expect("a piece").tokens).collect();
                (ids, generation.statistics().clone())
            })
        };
        let runs = wishes.each_ref().map(run).map(|thread| thread.join().expect("no panic"));
        assert!(runs.iter().all(|(ids, _)| *ids == want));
        let drafters = runs.each_ref().map(|(_, statistics)| statistics.speculation.drafters.len());
        assert_eq!(drafters, [1, 2, 0]);
        assert!(runs[0].1.speculation.rows.len() == 7 && runs[0].1.accepted > 0 && runs[2].1.drafted == 0);
    });
}

/// An error of the drafter is reported when the draft is needed; the session continues without it.
#[test]
fn an_error_comes_out_of_the_next_round() {
    let case = cases::named("edge");
    let directory = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "model.safetensors"] {
        let from = case.assistant_path().expect("an assistant").join(file);
        std::fs::copy(from, directory.path().join(file)).expect("a copy");
    }
    let path = directory.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("a file");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("safetensors");
    let norm =
        tensors.tensor("model.norm.weight").expect("a tensor").data().as_ptr() as usize - bytes.as_ptr() as usize;
    bytes[norm..norm + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).expect("a file");
    let engine = EngineOptions::new(case.path.join("target")).with_assistant(directory.path());
    let engine = Engine::load(&EngineOptions { threads: Some(1), ..engine }).expect("an engine");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let ahead = options("mtp", BlockSize::Fixed(4), DraftPipeline::Ahead, 8);
    let pieces: Vec<_> = session.generate(&[2, 3], &ahead).expect("the target is sound").collect();
    assert!(
        matches!(&pieces[..], [Ok(first), Err(Error::NotFinite { what: "logits of a draft", .. })] if first.tokens.len() == 1),
        "{pieces:?}"
    );
    assert_eq!(session.kv().len(), 2);
    assert_eq!(ids(&mut session, &[4], &plain(4)).len(), 4);
}
