//! The engine thread: it owns the scheduler, takes jobs from a queue, and hands out what each round wrote.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use foretoken::{Engine, Event, Finish, Scheduler, SchedulerOptions, SequenceId, SessionOptions};

use crate::job::{Choice, Ended, Failure, Job, Ticket, Update};
use crate::metrics::Metrics;

/// What the engine thread is started with.
pub(crate) struct WorkerOptions {
    /// Sequences that are decoded together.
    pub parallel: usize,
    /// Requests that may wait beside those.
    pub max_queue: usize,
    /// Of every sequence.
    pub session: SessionOptions,
    /// Rows of a pass.
    pub scheduler: SchedulerOptions,
}

/// The engine thread, from outside.
pub(crate) struct Worker {
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    taken: Arc<AtomicUsize>,
    limit: usize,
    abort: Arc<AtomicBool>,
    slots: Arc<Mutex<Vec<Slot>>>,
}

/// One of the places for sequences, as it was after the last pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot {
    /// The request that has it.
    pub request_id: Option<String>,
    pub prompt_tokens: usize,
    pub generated_tokens: usize,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the system starts none.
    pub fn start(engine: &Engine, options: WorkerOptions, metrics: Arc<Metrics>) -> std::io::Result<Self> {
        let (send, jobs) = channel();
        let slots = Arc::new(Mutex::new(vec![Slot::default(); options.parallel]));
        let limit = options.parallel.saturating_add(options.max_queue);
        let abort = Arc::new(AtomicBool::new(false));
        let thread = EngineThread {
            scheduler: Scheduler::new(engine, options.scheduler.clone()),
            engine: engine.clone(),
            options,
            jobs,
            waiting: VecDeque::new(),
            running: Vec::new(),
            slots: slots.clone(),
            abort: abort.clone(),
            metrics,
        };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || thread.run())?;
        let (jobs, thread) = (Mutex::new(Some(send)), Mutex::new(Some(thread)));
        Ok(Self { jobs, thread, taken: Arc::default(), limit, abort, slots })
    }

    /// So many places; `None` if fewer are free.
    pub fn admit(&self, places: usize) -> Option<Vec<Ticket>> {
        (0..places).map(|_| Ticket::take(&self.taken, self.limit)).collect()
    }

    /// Requests that may run or wait.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Hands a job to the thread.
    ///
    /// # Errors
    /// If the thread takes no more.
    pub fn submit(&self, job: Job) -> Result<(), Failure> {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.as_ref().and_then(|jobs| jobs.send(job).ok()).ok_or(Failure::Stopping)
    }

    /// The places for sequences.
    pub fn slots(&self) -> Vec<Slot> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether the thread takes jobs.
    pub fn is_alive(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Fails all jobs, running and waiting, before the next pass.
    pub fn abort(&self) {
        self.abort.store(true, Ordering::Release);
    }

    /// Takes no more jobs, and waits until those that it has are over.
    pub fn close(&self) {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner).take();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the engine thread had panicked");
        }
    }
}

struct EngineThread {
    engine: Engine,
    scheduler: Scheduler,
    options: WorkerOptions,
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    running: Vec<Started>,
    slots: Arc<Mutex<Vec<Slot>>>,
    abort: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

/// A generation with a sequence.
struct Started {
    id: SequenceId,
    slot: usize,
    request: Request,
    choice: Choice,
    /// Those that wait for its prompt. Their slots are kept free.
    others: Vec<Choice>,
    first: Option<Duration>, // from admission to the first token
    generated: usize,
}

/// What the generations of a job have in common.
#[derive(Clone)]
struct Request {
    id: String,
    prompt: Arc<Vec<u32>>,
    admitted: Instant,
    queued: Duration,
}

impl EngineThread {
    fn run(mut self) {
        while self.receive() {
            if self.abort.load(Ordering::Acquire) {
                self.fail_all(|| Failure::Stopping);
            }
            self.drop_cancelled();
            while let Some(job) = self.next_job() {
                self.start(job);
            }
            // A panic of one sequence's part is an error of that sequence. What comes here is a defect of the rest.
            match catch_unwind(AssertUnwindSafe(|| self.scheduler.step())) {
                Ok(events) => events.into_iter().for_each(|event| self.take(event)),
                Err(_) => self.fail_all(|| Failure::Panic),
            }
            self.publish();
        }
    }

    /// Takes new jobs; with nothing to do, waits for one. `false` if there will be none, and nothing is left to do.
    fn receive(&mut self) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            match self.jobs.recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(_) => return false,
            }
        }
        loop {
            match self.jobs.try_recv() {
                Ok(job) => self.waiting.push_back(job),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return true,
            }
        }
    }

    /// Drops waiting jobs whose clients went away. Those with sequences end in the scheduler's next step.
    fn drop_cancelled(&mut self) {
        let before = self.waiting.len();
        self.waiting.retain(|job| !job.is_cancelled());
        (self.waiting.len()..before).for_each(|_| self.metrics.finished("abort"));
    }

    /// The next job, if there are places for all of its generations.
    fn next_job(&mut self) -> Option<Job> {
        let places = 1 + self.waiting.front()?.others.len();
        if self.taken() + places <= self.options.parallel { self.waiting.pop_front() } else { None }
    }

    /// Places of sequences that run, and of those that wait for a prompt that is being read.
    fn taken(&self) -> usize {
        self.running.iter().map(|started| 1 + started.others.len()).sum()
    }

    /// Gives the job a sequence.
    fn start(&mut self, job: Job) {
        let Job { prompt, request_id, admitted, choice, others } = job;
        let request = Request { id: request_id, prompt, admitted, queued: admitted.elapsed() };
        let begin = Instant::now();
        let added = self.add(&request.prompt, &choice);
        tracing::debug!(request = request.id, seconds = begin.elapsed().as_secs_f64(), "sequence opened");
        if let Ok(id) = &added {
            let cached = self.scheduler.statistics(*id).map_or(0, |statistics| statistics.cached_tokens);
            self.metrics.prompt(request.prompt.len(), cached);
            // If nobody listens any more, the job is cancelled.
            let _ = choice.updates.send(Update::Started(cached));
        }
        self.started(added, request, choice, others);
    }

    fn started(&mut self, added: Result<SequenceId, Failure>, request: Request, choice: Choice, others: Vec<Choice>) {
        match added {
            Ok(id) => {
                let taken = |slot: &usize| self.running.iter().any(|started| started.slot == *slot);
                let slot = (0..).find(|slot| !taken(slot)).unwrap_or(0);
                self.running.push(Started { id, slot, request, choice, others, first: None, generated: 0 });
            }
            Err(failure) => self.fail(&request.id, (choice, others), failure),
        }
    }

    /// A sequence of its own.
    fn add(&mut self, prompt: &[u32], choice: &Choice) -> Result<SequenceId, Failure> {
        let added = catch_unwind(AssertUnwindSafe(|| {
            let session = self.scheduler.session(&self.options.session)?;
            self.scheduler.add(session, prompt, &choice.options).map_err(|refused| refused.1)
        }));
        added.map_err(|_| Failure::Panic)?.map_err(|error| Failure::Library(Arc::new(error)))
    }

    /// Gives those that waited for a prompt their sequences: forks, or sequences of their own where none can be made.
    fn fork(&mut self, at: usize) {
        for choice in std::mem::take(&mut self.running[at].others) {
            let (id, request) = (self.running[at].id, self.running[at].request.clone());
            let forked = catch_unwind(AssertUnwindSafe(|| self.scheduler.fork_prompt(id, &choice.options)));
            let added = match forked {
                Ok(Ok(id)) => Ok(id),
                _ => self.add(&request.prompt, &choice),
            };
            self.started(added, request, choice, Vec::new());
        }
    }

    fn fail(&self, request_id: &str, (choice, others): (Choice, Vec<Choice>), failure: Failure) {
        match &failure {
            Failure::Library(error) if matches!(**error, foretoken::Error::Panic(_)) => {
                // The message may contain what the client sent.
                tracing::error!(request = request_id, "panic");
            }
            Failure::Panic => tracing::error!(request = request_id, "panic"),
            Failure::Library(error) if is_clients(error) => {
                tracing::info!(request = request_id, "refused");
            }
            Failure::Library(error) => tracing::error!(request = request_id, %error, "failed"),
            Failure::Stopping => tracing::info!(request = request_id, "stopped"),
        }
        for Choice { updates, ticket, .. } in std::iter::once(choice).chain(others) {
            self.metrics.finished("error");
            // Before the client can ask again.
            drop(ticket);
            let _ = updates.send(Update::Failed(failure.clone()));
        }
    }

    /// Fails every job. The scheduler's sequences go with it.
    fn fail_all(&mut self, failure: impl Fn() -> Failure) {
        let fresh = Scheduler::new(&self.engine, self.options.scheduler.clone());
        let old = std::mem::replace(&mut self.scheduler, fresh);
        if catch_unwind(AssertUnwindSafe(|| drop(old))).is_err() {
            tracing::error!("a panic while sequences were dropped");
        }
        for started in std::mem::take(&mut self.running) {
            self.fail(&started.request.id, (started.choice, started.others), failure());
        }
        for job in std::mem::take(&mut self.waiting) {
            self.fail(&job.request_id, (job.choice, job.others), failure());
        }
    }

    /// Hands on what a pass brought for a sequence.
    fn take(&mut self, event: Event) {
        let Some(at) = self.running.iter().position(|started| started.id == event.id) else { return };
        let started = &mut self.running[at];
        match event.piece {
            Ok(piece) => {
                self.metrics.generated(piece.tokens.len());
                if started.first.is_none() && !piece.tokens.is_empty() {
                    let first = started.request.admitted.elapsed();
                    started.first = Some(first);
                    self.metrics.first_token(first);
                    self.fork(at);
                }
                let started = &mut self.running[at];
                started.generated += piece.tokens.len();
                let _ = started.choice.updates.send(Update::Piece(piece));
                if let Some(finish) = event.finish {
                    self.end(at, finish);
                }
            }
            Err(error) => {
                let started = self.running.swap_remove(at);
                self.scheduler.remove(started.id);
                let failure = Failure::Library(Arc::new(error));
                self.fail(&started.request.id, (started.choice, started.others), failure);
            }
        }
    }

    /// Ends a generation, and frees its sequence.
    fn end(&mut self, at: usize, finish: Finish) {
        let started = self.running.swap_remove(at);
        let statistics = self.scheduler.statistics(started.id).cloned().unwrap_or_default();
        self.scheduler.remove(started.id);
        let total = started.request.admitted.elapsed();
        self.metrics.ended(&statistics, (started.request.queued, started.first.unwrap_or(total), total));
        tracing::info!(
            request = started.request.id,
            finish = finish_name(finish),
            prompt_tokens = started.request.prompt.len(),
            generated_tokens = statistics.generated_tokens,
            drafted = statistics.drafted,
            accepted = statistics.accepted,
            queued_ms = started.request.queued.as_millis(),
            first_token_ms = started.first.unwrap_or(total).as_millis(),
            total_ms = total.as_millis(),
            "generated"
        );
        // Others are left only where it was cancelled in front of its first token.
        for Choice { updates, ticket, .. } in std::iter::once(started.choice).chain(started.others) {
            self.metrics.finished(finish_name(finish));
            // Before the client can ask again.
            drop(ticket);
            let _ = updates.send(Update::Ended(Box::new(Ended { finish, statistics: statistics.clone() })));
        }
    }

    fn publish(&self) {
        let mut slots = vec![Slot::default(); self.options.parallel];
        for started in &self.running {
            slots[started.slot] = Slot {
                request_id: Some(started.request.id.clone()),
                prompt_tokens: started.request.prompt.len(),
                generated_tokens: started.generated,
            };
        }
        *self.slots.lock().unwrap_or_else(PoisonError::into_inner) = slots;
        self.metrics.queues(self.running.len(), self.waiting.len());
    }
}

/// Whether the request caused the error.
fn is_clients(error: &foretoken::Error) -> bool {
    use foretoken::Error as E;
    matches!(error, E::Argument { .. } | E::Context { .. } | E::Template(_) | E::Tokenizer(_))
}

/// As vLLM's label `finished_reason`.
fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::EndOfText | Finish::StopString | Finish::Constraint => "stop",
        Finish::MaxTokens | Finish::Context => "length",
        Finish::Cancelled => "abort",
        _ => "error",
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use foretoken::{EngineOptions, GenerateOptions, LogitsProcessor};

    use super::*;
    use crate::job::Running;

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
        let (mut choices, running) = Running::choices(&options, worker.admit(1).expect("a place"));
        let (request_id, admitted, choice) = ("test".into(), Instant::now(), choices.remove(0));
        let job = Job { prompt: Arc::new(PROMPT.into()), request_id, admitted, choice, others: choices };
        worker.submit(job).map_err(|_| "refused").expect("a job");
        running
    }

    /// The tokens, and whether the job was finished.
    async fn tokens(mut running: Running) -> (Vec<u32>, Result<Finish, Failure>) {
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

    #[tokio::test]
    async fn a_panic_is_the_requests_own() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let options = EngineOptions::new(demo.join("target")).with_assistant(demo.join("assistant"));
        let engine = Engine::load(&options).expect("the demo pair");
        let options = GenerateOptions { max_tokens: 60, ..GenerateOptions::default() };
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let alone = session.generate(&PROMPT, &options).expect("a generation");
        let want: Vec<u32> = alone.flat_map(|piece| piece.expect("a piece").tokens).collect();
        drop(session);

        let worker = WorkerOptions {
            parallel: 3,
            max_queue: 0,
            session: SessionOptions::default(),
            scheduler: SchedulerOptions { prefix_cache: Some(Default::default()), ..SchedulerOptions::default() },
        };
        let worker = Worker::start(&engine, worker, Arc::default()).expect("a thread");
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
        assert_eq!(tokens(submit(&worker, options)).await.0, want, "behind the panic");

        // An abort is every job's error, and the thread ends when it takes no more.
        let endless = submit(&worker, GenerateOptions { max_tokens: 8000, ..GenerateOptions::default() });
        worker.abort();
        assert!(matches!(tokens(endless).await.1, Err(Failure::Stopping)));
        worker.close();
        assert!(!worker.is_alive() && engine.pages().held() == 0, "the kept prefixes went with the thread");
    }
}
