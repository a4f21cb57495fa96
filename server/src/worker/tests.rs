use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use foretoken::kv::KvOptions;
use foretoken::{
    EndOfGeneration, EngineOptions, FinishReason, GenerateOptions, LogitsProcessor, SchedulerOptions, SessionOptions,
    Speculation, Stop,
};
use foretoken_tools::demo;

use super::*;
use crate::job::{Running, Update};

/// Panics with the tenth token of a sequence.
#[derive(Debug)]
struct Panicking;

impl LogitsProcessor for Panicking {
    fn process(&self, tokens: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        assert!(tokens.len() < PROMPT.len() + 10, "a defect");
        Ok(())
    }
}

const PROMPT: [u32; 4] = [2, 300, 301, 302];

fn submit(worker: &Worker, options: GenerateOptions) -> Running {
    submit_prompt(worker, PROMPT.into(), options)
}

fn submit_prompt(worker: &Worker, prompt: Vec<u32>, options: GenerateOptions) -> Running {
    let (job, running) = job(worker, prompt, &options, 1);
    worker.submit(job).map_err(|_| "refused").expect("a job");
    running
}

/// A job of `choices` generations, which has their places, and their updates.
fn job(worker: &Worker, prompt: Vec<u32>, options: &GenerateOptions, choices: usize) -> (Job, Running) {
    job_with(worker.admit(choices).expect("places"), prompt, options)
}

/// A job of a generation for each of these places, and their updates.
fn job_with(places: Vec<Ticket>, prompt: Vec<u32>, options: &GenerateOptions) -> (Job, Running) {
    let (mut choices, running) = Running::choices(options, places);
    let (request_id, admitted, choice) = ("test".into(), Instant::now(), choices.remove(0));
    (Job { prompt: Arc::new(prompt), request_id, admitted, constraint: None, choice, others: choices }, running)
}

/// Exactly so many tokens.
fn of_length(max_tokens: usize) -> GenerateOptions {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, stop, ..GenerateOptions::default() }
}

/// The tokens, and whether the job was finished.
async fn tokens(mut running: Running) -> (Vec<u32>, Result<FinishReason, Failure>) {
    let mut tokens = Vec::new();
    loop {
        match running.next().await.expect("an update").1 {
            Update::Started(_) => {}
            Update::Piece(piece) => tokens.extend(piece.tokens),
            Update::Ended(ended) => return (tokens, Ok(ended.finish)),
            Update::Failed(failure) => return (tokens, Err(failure)),
        }
    }
}

fn engine() -> Engine {
    let options = EngineOptions::new(demo("target")).with_assistant(demo("assistant"));
    Engine::load(&options).expect("the demo pair")
}

fn start(engine: &Engine) -> Worker {
    let options = WorkerOptions {
        parallel: 3,
        max_queue: 0,
        session: SessionOptions::default(),
        context: 8192,
        scheduler: SchedulerOptions { prefix_cache: Some(Default::default()), ..SchedulerOptions::default() },
    };
    Worker::start(engine, options, Arc::default()).expect("a thread")
}

/// Panics when it is dropped, as the job's last part on the engine thread.
#[derive(Debug)]
struct PanicsOnDrop;

impl LogitsProcessor for PanicsOnDrop {
    fn process(&self, _: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        Ok(())
    }
}

impl Drop for PanicsOnDrop {
    fn drop(&mut self) {
        assert!(std::thread::current().name() != Some("engine"), "a defect");
    }
}

/// A job of one token with `choices` such generations.
fn submit_defect(worker: &Worker, choices: usize) -> Running {
    let options = GenerateOptions { max_tokens: 1, ..GenerateOptions::default() };
    let (mut job, running) = job(worker, PROMPT.into(), &options, choices);
    for choice in std::iter::once(&mut job.choice).chain(&mut job.others) {
        choice.options.logits_processor = Some(Arc::new(PanicsOnDrop));
    }
    worker.submit(job).map_err(|_| "refused").expect("a job");
    running
}

#[tokio::test]
async fn the_thread_goes_on_after_a_panic_outside_of_a_pass() {
    let engine = engine();
    let worker = start(&engine);
    for _ in 0..3 {
        assert!(tokens(submit_defect(&worker, 1)).await.1.is_ok());
        let options = GenerateOptions { max_tokens: 4, ..GenerateOptions::default() };
        let next = tokens(submit(&worker, options)).await;
        // It may have been submitted before the panic.
        assert!(next.1.is_ok() || matches!(next.1, Err(Failure::Panic)), "{:?}", next.1);
        assert!(worker.is_alive());
    }
    let options = GenerateOptions { max_tokens: 4, ..GenerateOptions::default() };
    assert!(tokens(submit(&worker, options)).await.1.is_ok());
    worker.close();
}

/// The demo's target with so many bytes of K/V memory.
fn with_memory(kv_memory: Option<u64>) -> Engine {
    let options = EngineOptions { kv_memory, ..EngineOptions::new(demo("target")) };
    Engine::load(&options).expect("the demo")
}

/// The engine with the K/V memory of one context of `context` positions and a half.
fn start_with_memory_of(context: usize) -> (Engine, Worker) {
    let kv = KvOptions { max_context: Some(context), ..KvOptions::default() };
    let session = SessionOptions { kv };
    let one = with_memory(None).session(&session).expect("a session").kv().bytes_at(context) as u64;
    start_with(with_memory(Some(one + one / 2)), session, SchedulerOptions::default())
}

/// The engine, and a worker whose queue holds the jobs that wait for memory.
fn start_with(engine: Engine, session: SessionOptions, scheduler: SchedulerOptions) -> (Engine, Worker) {
    let context = engine.session(&session).expect("a session").kv().max_context();
    let options = WorkerOptions { parallel: 3, max_queue: 8, session, context, scheduler };
    let worker = Worker::start(&engine, options, Arc::default()).expect("a thread");
    (engine, worker)
}

/// A job that does not fit memory beside others waits for them.
#[tokio::test]
async fn jobs_wait_for_memory() {
    let (engine, worker) = start_with_memory_of(1024);
    let options = GenerateOptions { max_tokens: 300, ..GenerateOptions::default() };
    let running: Vec<_> = (0..4).map(|_| submit(&worker, options.clone())).collect();
    let mut texts = Vec::new();
    for running in running {
        let (text, finish) = tokens(running).await;
        assert!(finish.is_ok(), "{finish:?}");
        texts.push(text);
    }
    assert!(texts.iter().all(|text| *text == texts[0] && !text.is_empty()));
    worker.close();
    assert_eq!(engine.pages().held(), 0);
}

/// A prompt that does not fit the context that running ones leave waits for them, one that never fits is refused.
#[tokio::test]
async fn prompts_wait_for_their_context() {
    let one = with_memory(None).session(&SessionOptions::default()).expect("a session").kv().bytes_at(1024) as u64;
    let (engine, session) = (with_memory(Some(one)), SessionOptions::default());
    let context = engine.session(&session).expect("a session").kv().max_context();
    assert!((1024..1152).contains(&context), "{context}");
    let scheduler = SchedulerOptions { prefix_cache: Some(Default::default()), ..SchedulerOptions::default() };
    let (_engine, worker) = start_with(engine, session, scheduler);

    let prompt = |first: u32, len: usize| Vec::from_iter((0..len as u32).map(|i| first + i % 97));
    let options = of_length(200);
    let mut first = submit_prompt(&worker, prompt(300, 700), options.clone());
    while !matches!(first.next().await.expect("an update").1, Update::Piece(_)) {}
    let second = submit_prompt(&worker, prompt(500, 700), options.clone());
    let never = submit_prompt(&worker, prompt(300, context + 1), options);
    assert!(matches!(tokens(never).await.1, Err(Failure::Library(_))));
    for running in [first, second] {
        let finish = tokens(running).await.1;
        assert!(matches!(finish, Ok(FinishReason::MaxTokens)), "{finish:?}");
    }
    worker.close();
}

/// The engine with `percent` of the K/V memory of 1024 positions, and contexts that are not given.
fn start_with_percent(percent: u64) -> (Engine, Worker) {
    let session = SessionOptions::default();
    let one = with_memory(None).session(&session).expect("a session").kv().bytes_at(1024) as u64;
    // Prompts are read 8 rows at a time beside others.
    let scheduler = SchedulerOptions { prompt_slowdown: 1.0, ..SchedulerOptions::default() };
    start_with(with_memory(Some(one * percent / 100)), session, scheduler)
}

/// Runs generations of these prompts' lengths and tokens, each submitted after the first piece of the one before.
async fn one_after_another(worker: &Worker, lengths: &[(u32, usize)]) {
    let mut all: Vec<(Running, usize)> = Vec::new();
    for (i, (len, max_tokens)) in lengths.iter().copied().enumerate() {
        if let Some((before, _)) = all.last_mut() {
            while !matches!(before.next().await.expect("an update").1, Update::Piece(_)) {}
        }
        let prompt = (0..len).map(|token| 300 + 100 * i as u32 + token % 97).collect();
        all.push((submit_prompt(worker, prompt, of_length(max_tokens)), max_tokens));
    }
    let last = all.len() - 1;
    for (i, (running, max_tokens)) in all.into_iter().enumerate() {
        let (text, finish) = tokens(running).await;
        assert!(matches!(finish, Ok(FinishReason::MaxTokens)), "generation {i}: {finish:?}");
        assert_eq!(text.len(), if i < last { max_tokens - 1 } else { max_tokens }, "generation {i}");
    }
}

/// A text is not cut at the memory that others left when it began.
#[tokio::test]
async fn a_context_does_not_depend_on_others() {
    let (engine, worker) = start_with_percent(150);
    one_after_another(&worker, &[(700, 200), (100, 500)]).await;
    worker.close();
    assert_eq!(engine.pages().held(), 0);
}

/// A prompt whose memory others take while it is read is read again when one of them has ended.
#[tokio::test]
async fn a_prompt_without_memory_goes_back_to_the_queue() {
    let (engine, worker) = start_with_percent(160);
    one_after_another(&worker, &[(450, 550), (900, 20)]).await;
    worker.close();
    assert_eq!(engine.pages().held(), 0);
}

/// What was written when memory is exhausted is not lost.
#[tokio::test]
async fn a_text_is_cut_short_where_memory_ends() {
    let (_engine, worker) = start_with_memory_of(768);
    let running: Vec<_> = (0..3).map(|_| submit(&worker, of_length(700))).collect();
    let mut texts = Vec::new();
    for running in running {
        let (text, finish) = tokens(running).await;
        assert!(matches!(finish, Ok(FinishReason::MaxTokens | FinishReason::Context)), "{finish:?}");
        texts.push(text);
    }
    let longest = texts.iter().max_by_key(|text| text.len()).expect("texts");
    assert!(longest.len() == 700 && texts.iter().all(|text| longest.starts_with(text) && !text.is_empty()));
    worker.close();
}

/// Fails as a device does, while that is set.
#[derive(Debug)]
struct FailingDevice(Arc<AtomicBool>);

impl LogitsProcessor for FailingDevice {
    fn process(&self, _: &[u32], _: &mut [f32]) -> foretoken::Result<()> {
        match self.0.load(Ordering::SeqCst) {
            true => Err(foretoken::Error::Device { device: "GPU".into(), problem: "is lost".into() }),
            false => Ok(()),
        }
    }
}

/// The state of an engine thread with places for a job's `choices` generations, whose turns a test runs, and that job.
fn thread(prompt: Vec<u32>, options: &GenerateOptions, choices: usize) -> (EngineThread, Running) {
    let scheduler = SchedulerOptions { max_rows: 16, ..SchedulerOptions::default() };
    let session = SessionOptions::default();
    let worker = WorkerOptions { parallel: choices, max_queue: 0, session, context: 8192, scheduler };
    let places = Ticket::take_all(&Arc::default(), choices, choices).expect("places");
    let (job, running) = job_with(places, prompt, options);
    let (send, jobs) = channel();
    send.send(job).expect("a receiver");
    (EngineThread::new(&with_memory(None), worker, jobs, Arc::default()), running)
}

fn assert_metrics(thread: &EngineThread, counts: &[(&str, &str, usize)]) {
    let text = thread.metrics.text("m", &thread.engine);
    for (name, label, count) in counts {
        let line = format!("{name}{{model_name=\"m\"{label}}} {count}\n");
        assert!(text.contains(&line), "no {line} in {text}");
    }
}

/// The tokens of a prompt whose client leaves while it is read are not those of prompts that were read.
#[test]
fn prompts_that_are_not_read_to_their_end_are_not_counted() {
    let (mut thread, running) = thread((300..400).collect(), &of_length(4), 1);
    assert!(thread.turn() && thread.running.len() == 1, "its first 16 tokens are read");
    drop(running);
    assert!(thread.turn() && thread.running.is_empty());
    let counts = [
        ("vllm:prompt_tokens_total", "", 0),
        ("vllm:prefix_cache_queries_total", "", 0),
        ("vllm:request_success_total", ",finished_reason=\"abort\"", 1),
    ];
    assert_metrics(&thread, &counts);
}

/// The rounds of a failed generation are counted, as its tokens are.
#[test]
fn rounds_of_failed_generations_are_counted() {
    let fails = Arc::<AtomicBool>::default();
    let logits_processor: Option<Arc<dyn LogitsProcessor>> = Some(Arc::new(FailingDevice(fails.clone())));
    let speculation = Speculation::Off;
    let options = GenerateOptions { logits_processor, speculation, ..of_length(8000) };
    let (mut thread, _running) = thread(PROMPT.into(), &options, 1);
    while thread.turn() && thread.running[0].generated < 4 {}
    fails.store(true, Ordering::SeqCst);
    while thread.turn() && !thread.running.is_empty() {}
    let counts = [
        ("vllm:generation_tokens_total", "", 4),
        ("foretoken:rounds_total", "", 3),
        ("vllm:request_success_total", ",finished_reason=\"error\"", 1),
    ];
    assert_metrics(&thread, &counts);
}

/// Generations of a job that end together, before a token, have times of their own.
#[test]
fn each_generation_without_tokens_is_counted() {
    let (mut thread, _running) = thread(PROMPT.into(), &of_length(0), 2);
    while thread.turn() && !thread.running.is_empty() {}
    let counts = [
        ("vllm:request_success_total", ",finished_reason=\"length\"", 2),
        ("vllm:request_queue_time_seconds_count", "", 2),
        ("vllm:e2e_request_latency_seconds_count", "", 2),
        ("vllm:time_to_first_token_seconds_count", "", 0),
    ];
    assert_metrics(&thread, &counts);
}

/// A faulty pass is one failure, however many requests it fails.
#[tokio::test]
async fn a_faulty_pass_is_not_a_lost_device() {
    let (engine, fails) = (engine(), Arc::<AtomicBool>::default());
    let worker = start(&engine);
    let logits_processor: Option<Arc<dyn LogitsProcessor>> = Some(Arc::new(FailingDevice(fails.clone())));
    let options = GenerateOptions { logits_processor, ..of_length(8000) };
    let mut all: Vec<_> = (0..3).map(|_| submit(&worker, options.clone())).collect();
    for running in &mut all {
        while !matches!(running.next().await.expect("an update").1, Update::Piece(_)) {}
    }
    fails.store(true, Ordering::SeqCst);
    for running in all {
        let failure = tokens(running).await.1;
        assert!(matches!(&failure, Err(Failure::Library(error)) if matches!(**error, foretoken::Error::Device { .. })));
    }
    // Two at most: it may begin in the middle of a pass.
    let failures = worker.shared.device_failures.load(Ordering::SeqCst);
    assert!((1..=2).contains(&failures) && !worker.has_lost_device(), "{failures}");
    worker.close();
}

#[tokio::test]
async fn a_stopped_thread_is_reported() {
    let engine = engine();
    let worker = start(&engine);
    // The second one's panic is in the handling of the first one's.
    let running = submit_defect(&worker, 2);
    while worker.is_alive() {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(running);
    let (job, _running) = job(&worker, PROMPT.into(), &GenerateOptions::default(), 1);
    assert!(matches!(worker.submit(job), Err(Failure::EngineStopped)));
}

#[tokio::test]
async fn a_panic_is_the_requests_own() {
    let engine = engine();
    let options = GenerateOptions { max_tokens: 60, ..GenerateOptions::default() };
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let alone = session.generate(&PROMPT, &options).expect("a generation");
    let want: Vec<u32> = alone.flat_map(|piece| piece.expect("a piece").tokens).collect();
    drop(session);

    let worker = start(&engine);
    let before = submit(&worker, options.clone());
    let panicking = GenerateOptions { logits_processor: Some(Arc::new(Panicking)), ..options.clone() };
    let panicking = submit(&worker, panicking);
    let after = submit(&worker, options.clone());
    assert!(worker.admit(1).is_none(), "three places are taken");
    let (written, failure) = tokens(panicking).await;
    let Err(Failure::Library(error)) = failure else { panic!("{failure:?}") };
    assert!(matches!(*error, foretoken::Error::Panic(_)), "{error}");
    assert!(want.starts_with(&written) && written.len() < want.len());
    for running in [before, after] {
        let (written, finish) = tokens(running).await;
        assert!(finish.is_ok() && written == want, "{finish:?}");
    }
    assert_eq!(tokens(submit(&worker, options)).await.0, want, "after the panic");

    // An abort is every job's error, and the thread ends when it takes no more.
    let endless = submit(&worker, GenerateOptions { max_tokens: 8000, ..GenerateOptions::default() });
    worker.abort();
    assert!(matches!(tokens(endless).await.1, Err(Failure::Stopping)));
    worker.close();
    assert!(!worker.is_alive() && engine.pages().held() == 0, "the thread dropped the prefix cache");
}
