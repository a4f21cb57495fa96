//! The engine thread: it owns the scheduler, takes jobs from a queue, and sends each round's output.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use foretoken::{Engine, Event, FinishReason, Piece, Scheduler, SchedulerOptions, SequenceId, SessionOptions};

use crate::api_error::ApiError;
use crate::job::{Choice, Ended, Failure, Job, Update};
use crate::metrics::{Metrics, finish_name};

/// Options of the engine thread.
pub(crate) struct WorkerOptions {
    /// Maximum number of running sequences.
    pub parallel: usize,
    /// Maximum number of waiting requests.
    pub max_queue: usize,
    /// Options of every sequence's session.
    pub session: SessionOptions,
    /// The context of a session that has all memory.
    pub context: usize,
    /// Options of the scheduler.
    pub scheduler: SchedulerOptions,
}

/// A slot for a sequence, as of the last pass.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot {
    /// The request that occupies it.
    pub request_id: Option<Arc<str>>,
    pub prompt_tokens: usize,
    pub generated_tokens: usize,
}

/// What the thread and its handle share.
#[derive(Default)]
pub(super) struct Shared {
    pub slots: Mutex<Vec<Slot>>,
    /// Whether all jobs fail before the next pass.
    pub abort: AtomicBool,
    /// Turns in which the device failed since a request last ended normally.
    pub device_failures: AtomicUsize,
}

/// The thread's state.
pub(super) struct EngineThread {
    pub engine: Engine,
    scheduler: Scheduler,
    options: WorkerOptions,
    jobs: Receiver<Job>,
    waiting: VecDeque<Job>,
    pub running: Vec<Started>,
    /// Whether memory has no room for the next job until a sequence ends.
    full: bool,
    pub shared: Arc<Shared>,
    /// Whether this turn is counted in `shared.device_failures`.
    device_failed: bool,
    pub metrics: Arc<Metrics>,
}

/// A job with a sequence, which is that of its first generation.
pub(super) struct Started {
    id: SequenceId,
    slot: usize,
    /// Its other generations are forked after its prefill, as jobs of their own. Their slots are reserved.
    job: Job,
    queued: Duration,
    /// Cached tokens of the prompt, until they are counted with the first piece.
    cached: Option<usize>,
    first: Option<Duration>, // from admission to the first token
    pub generated: usize,
}

impl EngineThread {
    /// The state before the first job.
    pub fn new(engine: &Engine, options: WorkerOptions, jobs: Receiver<Job>, metrics: Arc<Metrics>) -> Self {
        let slots = Mutex::new(vec![Slot::default(); options.parallel]);
        Self {
            scheduler: Scheduler::new(engine, options.scheduler.clone()),
            engine: engine.clone(),
            options,
            jobs,
            waiting: VecDeque::new(),
            running: Vec::new(),
            full: false,
            shared: Arc::new(Shared { slots, ..Shared::default() }),
            device_failed: false,
            metrics,
        }
    }

    /// Takes turns until there are no jobs and will be none.
    pub fn run(mut self) {
        loop {
            // A panic in one sequence's part of a step is an error of that sequence. Any other fails every job.
            match catch_unwind(AssertUnwindSafe(|| self.turn())) {
                Ok(true) => {}
                Ok(false) => return,
                Err(_) => {
                    self.fail_all(|| Failure::Panic);
                    self.publish();
                }
            }
        }
    }

    /// Takes new jobs, runs one step, and sends what it produced. `false` when there are no jobs and will be none.
    pub fn turn(&mut self) -> bool {
        if !self.receive() {
            return false;
        }
        self.device_failed = false;
        if self.shared.abort.load(Ordering::Acquire) {
            self.fail_all(|| Failure::Stopping);
        }
        self.drop_cancelled();
        while let Some(job) = self.next_job() {
            self.start(job);
        }
        let events = self.scheduler.step();
        events.into_iter().for_each(|event| self.take(event));
        self.publish();
        true
    }

    /// Takes new jobs; waits for one if there are none. `false` if there will be no more, and all have ended.
    fn receive(&mut self) -> bool {
        if self.running.is_empty() && self.waiting.is_empty() {
            let Ok(job) = self.jobs.recv() else { return false };
            self.waiting.push_back(job);
        }
        self.waiting.extend(self.jobs.try_iter());
        true
    }

    /// Drops waiting jobs whose clients are gone. Running ones are removed in the scheduler's next step.
    fn drop_cancelled(&mut self) {
        self.waiting.retain(|job| {
            let is_cancelled = job.is_cancelled();
            if is_cancelled {
                (0..job.choices()).for_each(|_| self.metrics.finished("abort"));
                // The next one may need less memory.
                self.full = false;
            }
            !is_cancelled
        });
    }

    /// The next job, if there are slots for all of its generations, and may be memory.
    fn next_job(&mut self) -> Option<Job> {
        let places = self.waiting.front()?.choices();
        let starts = !self.full && self.taken() + places <= self.options.parallel;
        if starts { self.waiting.pop_front() } else { None }
    }

    /// Slots of running sequences, and those reserved for their forks.
    fn taken(&self) -> usize {
        self.running.iter().map(|started| started.job.choices()).sum()
    }

    /// Gives the job a sequence. If memory does not suffice for it beside the running ones, it stays in the queue.
    fn start(&mut self, job: Job) {
        let (begin, queued) = (Instant::now(), job.admitted.elapsed());
        let mut added = self.add(&job);
        while self.could_start_alone(&added) {
            if !self.running.is_empty() {
                return self.requeue(job);
            }
            // What cached prefixes take of a context counts as free.
            if !self.scheduler.drop_prefix() {
                break;
            }
            added = self.add(&job);
        }
        let statistics = added.as_ref().ok().and_then(|id| self.scheduler.statistics(*id));
        let cached = statistics.map(|statistics| statistics.cached_tokens);
        tracing::debug!(request = &*job.request_id, seconds = begin.elapsed().as_secs_f64(), "sequence opened");
        if let Some(cached) = cached {
            // Sending fails if the client is gone; the job is then cancelled.
            let _ = job.choice.updates.send(Update::Started(cached));
        }
        if let (Ok(id), false) = (&added, job.others.is_empty()) {
            // Fails only for a sequence whose prompt is read.
            let _ = self.scheduler.keep_prompt(*id);
        }
        self.started(added, job, queued, cached);
    }

    /// Whether a generation could start alone. Without a limit of pages, an automatic context is what others leave.
    fn could_start_alone(&self, added: &Result<SequenceId, Failure>) -> bool {
        let Err(Failure::Library(error)) = added else { return false };
        match **error {
            foretoken::Error::Context { needed, .. } => needed <= self.options.context,
            ref error => is_memory(error),
        }
    }

    fn started(&mut self, added: Result<SequenceId, Failure>, job: Job, queued: Duration, cached: Option<usize>) {
        match added {
            Ok(id) => {
                let taken = |slot: &usize| self.running.iter().any(|started| started.slot == *slot);
                let slot = (0..).find(|slot| !taken(slot)).unwrap_or(0);
                self.running.push(Started { id, slot, job, queued, cached, first: None, generated: 0 });
            }
            Err(failure) => self.fail(job, failure),
        }
    }

    /// Adds a sequence for a job's first generation.
    fn add(&mut self, job: &Job) -> Result<SequenceId, Failure> {
        let added = catch_unwind(AssertUnwindSafe(|| {
            let session = self.scheduler.session(&self.options.session)?;
            Ok(self.scheduler.add_if_fits(session, &job.prompt, &job.choice.options)?)
        }));
        added.map_err(|_| Failure::Panic)?.map_err(|error| Failure::Library(Arc::new(error)))
    }

    /// Forks the sequence for the other generations of its job, or adds new sequences where it cannot be forked; those
    /// wait for memory as jobs of their own.
    fn fork(&mut self, at: usize) {
        for choice in std::mem::take(&mut self.running[at].job.others) {
            let Started { id, queued, cached, ref job, .. } = self.running[at];
            let (prompt, request_id, constraint) = (job.prompt.clone(), job.request_id.clone(), job.constraint.clone());
            let job = Job { prompt, request_id, admitted: job.admitted, constraint, choice, others: Vec::new() };
            let forked = catch_unwind(AssertUnwindSafe(|| self.scheduler.fork_prompt(id, &job.choice.options)));
            let added = match forked {
                Ok(Ok(id)) => Ok(id),
                _ => self.add(&job),
            };
            if self.could_start_alone(&added) {
                self.requeue(job);
                continue;
            }
            self.started(added, job, queued, cached);
        }
    }

    /// Puts a job back to the front of the queue, until a sequence ends.
    fn requeue(&mut self, job: Job) {
        self.full = true;
        self.waiting.push_front(job);
    }

    fn fail(&mut self, job: Job, failure: Failure) {
        let Job { request_id, choice, others, .. } = job;
        let is_device =
            matches!(&failure, Failure::Library(error) if matches!(**error, foretoken::Error::Device { .. }));
        // A faulty pass may fail all of its requests.
        if is_device && !std::mem::replace(&mut self.device_failed, true) {
            self.shared.device_failures.fetch_add(1, Ordering::Relaxed);
        }
        match &failure {
            Failure::Stopping => tracing::info!(request = &*request_id, "stopped"),
            Failure::Library(error) if ApiError::of(error, "").status.is_client_error() => {
                tracing::info!(request = &*request_id, "refused");
            }
            // A panic's message may contain the client's text.
            Failure::Library(error) if !matches!(**error, foretoken::Error::Panic(_)) => {
                tracing::error!(request = &*request_id, %error, "failed");
            }
            _ => tracing::error!(request = &*request_id, "panic"),
        }
        self.publish();
        for Choice { updates, ticket, .. } in std::iter::once(choice).chain(others) {
            self.metrics.finished("error");
            // Freed before the client can send another request.
            drop(ticket);
            let _ = updates.send(Update::Failed(failure.clone()));
        }
    }

    /// Fails every job, and replaces the scheduler.
    fn fail_all(&mut self, failure: impl Fn() -> Failure) {
        self.running.iter().filter_map(|one| self.scheduler.statistics(one.id)).for_each(|of| self.metrics.decoded(of));
        let empty = Scheduler::new(&self.engine, SchedulerOptions::default());
        let old = std::mem::replace(&mut self.scheduler, empty);
        if catch_unwind(AssertUnwindSafe(|| drop(old))).is_err() {
            tracing::error!("a panic while sequences were dropped");
        }
        // A new prefix cache may take a part of the memory that is free now.
        self.scheduler = Scheduler::new(&self.engine, self.options.scheduler.clone());
        self.full = false;
        for started in std::mem::take(&mut self.running) {
            self.fail(started.job, failure());
        }
        for job in std::mem::take(&mut self.waiting) {
            self.fail(job, failure());
        }
    }

    /// Handles an event of a sequence.
    fn take(&mut self, event: Event) {
        let Some(at) = self.running.iter().position(|started| started.id == event.id) else { return };
        let others_run = self.running.len() > 1;
        let started = &mut self.running[at];
        match event.piece {
            Ok(piece) => {
                // One that is cancelled before its first token is not read to its end.
                let is_read = event.finish_reason != Some(FinishReason::Cancelled);
                if let Some(before) = started.cached.take_if(|_| is_read) {
                    // It may have waited for a prefix that another sequence read.
                    let cached = self.scheduler.statistics(event.id).map_or(before, |now| now.cached_tokens);
                    let _ = started.job.choice.updates.send(Update::Started(cached));
                    self.metrics.prompt(started.job.prompt.len(), cached);
                }
                self.metrics.generated(piece.tokens.len());
                if !piece.prompt_logprobs.is_empty() && !started.job.others.is_empty() {
                    // Forks do not read the prompt again.
                    let shared = Piece { prompt_logprobs: piece.prompt_logprobs.clone(), ..Piece::default() };
                    let others = started.job.others.iter();
                    others.for_each(|other| drop(other.updates.send(Update::Piece(shared.clone()))));
                }
                if started.first.is_none() && !piece.tokens.is_empty() {
                    let first = started.job.admitted.elapsed();
                    started.first = Some(first);
                    self.metrics.first_token(first);
                    self.fork(at);
                }
                let started = &mut self.running[at];
                started.generated += piece.tokens.len();
                let _ = started.job.choice.updates.send(Update::Piece(piece));
                if let Some(finish) = event.finish_reason {
                    self.end(at, finish);
                }
            }
            // Its prompt found no memory beside the others.
            Err(error) if is_memory(&error) && started.generated == 0 && others_run => {
                let started = self.running.swap_remove(at);
                self.scheduler.remove(started.id);
                self.requeue(started.job);
            }
            // Its text so far is not lost: the client gets a reason to end instead of an error.
            Err(error) if is_memory(&error) && started.generated > 0 => {
                tracing::warn!(request = &*started.job.request_id, %error, "cut short");
                self.end(at, FinishReason::Context);
            }
            Err(error) => {
                let started = self.running.swap_remove(at);
                self.scheduler.statistics(started.id).into_iter().for_each(|failed| self.metrics.decoded(failed));
                self.scheduler.remove(started.id);
                self.full = false;
                self.fail(started.job, Failure::Library(Arc::new(error)));
            }
        }
    }

    /// Ends a generation, and frees its sequence.
    fn end(&mut self, at: usize, finish: FinishReason) {
        if finish != FinishReason::Cancelled {
            self.shared.device_failures.store(0, Ordering::Relaxed);
        }
        let started = self.running.swap_remove(at);
        let statistics = self.scheduler.statistics(started.id).cloned().unwrap_or_default();
        self.scheduler.remove(started.id);
        self.full = false;
        let total = started.job.admitted.elapsed();
        self.metrics.decoded(&statistics);
        tracing::info!(
            request = &*started.job.request_id,
            finish = finish_name(finish),
            prompt_tokens = started.job.prompt.len(),
            cached_tokens = statistics.cached_tokens,
            generated_tokens = statistics.generated_tokens,
            drafted = statistics.drafted,
            accepted = statistics.accepted,
            queued_ms = started.queued.as_millis(),
            first_token_ms = started.first.unwrap_or(total).as_millis(),
            total_ms = total.as_millis(),
            "generated"
        );
        // Before the client has the answer: it may then read the metrics.
        self.publish();
        // There are others only if it ended before its first token.
        for Choice { updates, ticket, .. } in std::iter::once(started.job.choice).chain(started.job.others) {
            self.metrics.ended(&statistics, started.queued, started.first.unwrap_or(total), total);
            self.metrics.finished(finish_name(finish));
            // Freed before the client can send another request.
            drop(ticket);
            let _ = updates.send(Update::Ended(Box::new(Ended { finish, statistics: statistics.clone() })));
        }
    }

    fn publish(&self) {
        let mut slots = vec![Slot::default(); self.options.parallel];
        for started in &self.running {
            slots[started.slot] = Slot {
                request_id: Some(started.job.request_id.clone()),
                prompt_tokens: started.job.prompt.len(),
                generated_tokens: started.generated,
            };
        }
        *self.shared.slots.lock().unwrap_or_else(PoisonError::into_inner) = slots;
        let (running, queued) = (self.running.len(), self.waiting.iter().map(Job::choices).sum::<usize>());
        // Forks wait until the prompt is read.
        self.metrics.queues(running, queued + self.taken() - running);
    }
}

fn is_memory(error: &foretoken::Error) -> bool {
    matches!(error, foretoken::Error::Memory { .. })
}
