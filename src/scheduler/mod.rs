//! Continuous batching of many sequences: plan each, one draft pass per draft position, one forward
//! pass for all rows, accept each, finish each.

mod chunk_planner;
mod memory;
mod prefix_cache;
mod prefix_files;
mod shared_prompt;
mod slot;

pub use prefix_cache::PrefixCacheOptions;
pub use slot::{Event, SequenceId};

use std::fmt;
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::not_started::NotStarted;
use crate::options::GenerateOptions;
use crate::run::{Run, SCORED_ROWS};
use crate::session::{Session, Statistics};
use crate::speculative::{OtherSequences, PassMode, Proposing, Step, Work, complete, run_pass};
use crate::stop::FinishReason;
use crate::{Error, Result};
use chunk_planner::ChunkPlanner;
use prefix_cache::{Origin, PrefixCache};
use shared_prompt::{await_reader, begin_awaiting, least_unread};
use slot::{PartDone, Slot};

/// Options of a [`Scheduler`].
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerOptions {
    /// Rows of a pass: prompt chunks take what the rounds of decoding sequences leave, and at least one row each.
    /// Rounds are never shortened: their drafts were made. A larger pass reads prompts faster; a smaller one delays the
    /// others less. Of several prompts, the oldest and the one with the fewest rows left are the first in turn:
    /// each of the two gets about every second pass. Default: 512.
    pub max_rows: usize,
    /// Maximum time of a pass that decodes and reads prompts, relative to one that only decodes: it reads
    /// as many prompt rows as measured times allow, a multiple of 8, and at least 8. 1 or less reads 8 a
    /// pass, infinity up to `max_rows`. Default: 3.
    pub prompt_slowdown: f64,
    /// Caches prefixes of the sequences, so that those that prompts share are not computed again. Default: none.
    pub prefix_cache: Option<PrefixCacheOptions>,
}

impl Default for SchedulerOptions {
    fn default() -> Self {
        Self { max_rows: 512, prompt_slowdown: 3.0, prefix_cache: None }
    }
}

/// Decodes any number of sessions of one engine together. Sequences join and leave between steps, and each writes what
/// it would have written alone, whatever the others do: on the CPU byte for byte, greedy or sampled. Only if drafts are
/// sampled as well ([`DraftSampling::Sampled`](crate::speculative::DraftSampling)) does a sampled text depend on what
/// is drafted, and keeps no more than its distribution. Finished sequences keep their K/V until [`Scheduler::remove`].
///
/// ```no_run
/// # use foretoken::{Engine, EngineOptions, GenerateOptions, Scheduler, SchedulerOptions, SessionOptions};
/// # fn main() -> foretoken::Result<()> {
/// let engine = Engine::load(&EngineOptions::new("models/demo/target"))?;
/// let mut scheduler = Scheduler::new(&engine, SchedulerOptions::default());
/// for prompt in ["fn main() {", "struct "] {
///     let prompt = engine.tokenizer()?.encode(prompt)?;
///     let session = engine.session(&SessionOptions::default())?;
///     scheduler.add(session, &prompt, &GenerateOptions::default())?;
/// }
/// while scheduler.is_active() {
///     for event in scheduler.step() {
///         println!("{:?}: {}", event.id, event.piece?.text);
///         if event.finish_reason.is_some() {
///             scheduler.remove(event.id);
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
pub struct Scheduler {
    engine: Engine,
    max_rows: usize,
    chunks: ChunkPlanner,
    prefixes: Option<PrefixCache>,
    slots: Vec<Slot>,
    next: u64,
    /// Whether the next pass that reads several prompts reads the one with the fewest rows left first, not the oldest.
    shortest_prompt_first: bool,
    /// Whether passes have no drafts, as all sequences waited for memory.
    plain: bool,
}

impl Scheduler {
    /// A scheduler without sequences, for sessions of `engine`.
    pub fn new(engine: &Engine, options: SchedulerOptions) -> Self {
        let SchedulerOptions { max_rows, prompt_slowdown, prefix_cache } = options;
        let prefixes = prefix_cache.map(|options| PrefixCache::new(engine, options));
        let chunks = ChunkPlanner::new(prompt_slowdown);
        Self {
            engine: engine.clone(),
            max_rows,
            chunks,
            prefixes,
            slots: Vec::new(),
            next: 0,
            shortest_prompt_first: false,
            plain: false,
        }
    }

    /// Adds a generation on `session`, which takes part from the next step on. An empty session starts from the
    /// longest cached prefix of the prompt, if any, and waits for one that another sequence is reading.
    ///
    /// # Errors
    /// As [`Session::generate`], for what is known before anything is computed, or if the session belongs to
    /// another engine. The session is returned with it.
    pub fn add(
        &mut self,
        session: Session,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<SequenceId, Box<NotStarted>> {
        self.place(session, prompt, options, |_, _, _| Ok(()))
    }

    /// As [`Scheduler::add`], unless the prompt does not fit the limit of the engine's pages beside what other
    /// sequences hold and what is unread of their prompts. It may fit once another sequence is removed.
    ///
    /// # Errors
    /// As [`Scheduler::add`], or [`Error::Memory`] if the prompt does not fit.
    pub fn add_if_fits(
        &mut self,
        session: Session,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<SequenceId, Box<NotStarted>> {
        self.place(session, prompt, options, Self::check_memory)
    }

    /// Adds a generation if `check` passes for its session and the number of rows that are left to read.
    fn place(
        &mut self,
        mut session: Session,
        prompt: &[u32],
        options: &GenerateOptions,
        check: fn(&mut Self, &mut Session, usize) -> Result<()>,
    ) -> Result<SequenceId, Box<NotStarted>> {
        let refuse = |session, error| Err(Box::new(NotStarted { session, error }));
        if !self.engine.is(session.engine()) {
            let problem = "belongs to another engine; open it on the scheduler's";
            return refuse(session, Error::argument("session", problem));
        }
        if let Err(error) = self.prefixes.as_ref().map_or(Ok(()), PrefixCache::check) {
            return refuse(session, error);
        }
        // A leaked generation may still be drafting.
        session.wait();
        let takes_prefix = session.tokens().is_empty() && options.prompt_logprobs.is_none();
        let prefixes = self.prefixes.as_mut().filter(|_| takes_prefix);
        let known = prefixes.and_then(|prefixes| prefixes.find(&session, prompt));
        let cached = known.as_ref().map_or(0, |known| known.tokens().len());
        let (mut session, empty) = match known {
            Some(known) => (known, Some(session)),
            None => (session, None),
        };
        let run = Run::new(&mut session, prompt, cached, options);
        let mut run = match run.and_then(|run| check(self, &mut session, run.unread()).map(|()| run)) {
            Ok(run) => run,
            Err(error) => return refuse(empty.unwrap_or(session), error),
        };
        if let Some(empty) = empty {
            run.replaces(empty);
        }
        if let Some(prefixes) = self.prefixes.as_ref().filter(|_| session.tokens().len() == cached) {
            run.cuts = prefixes.cuts(&session, prompt);
        }
        let awaited = takes_prefix.then(|| await_reader(&mut self.slots, &session, prompt, options)).flatten();
        let id = SequenceId(self.next);
        self.next += 1;
        self.slots.push(Slot { id, session, run, awaited, planned: None, waits: false, kept: None });
        Ok(id)
    }

    /// Ends a sequence's generation after its last piece, and returns its session; `None` if there is no such sequence.
    pub fn remove(&mut self, id: SequenceId) -> Option<Session> {
        let at = self.slots.iter().position(|slot| slot.id == id)?;
        let Slot { mut session, mut run, .. } = self.slots.remove(at);
        self.retry_waiting();
        run.end(&mut session);
        // After a panic the state may be half of a pass.
        if let Some(prefixes) = self.prefixes.as_mut().filter(|_| run.finish_reason() != Some(FinishReason::Error)) {
            prefixes.insert(&mut session, Origin::Ended);
        }
        Some(session)
    }

    /// The sequences that were added and not removed.
    pub fn ids(&self) -> impl Iterator<Item = SequenceId> {
        self.slots.iter().map(|slot| slot.id)
    }

    /// Whether any generation is running.
    pub fn is_active(&self) -> bool {
        self.slots.iter().any(|slot| slot.run.finish_reason().is_none())
    }

    /// Counts and times of a sequence's generation. Times are those of the passes that it took part in.
    pub fn statistics(&self, id: SequenceId) -> Option<&Statistics> {
        self.slots.iter().find(|slot| slot.id == id).map(|slot| &slot.run.statistics)
    }

    /// Adds a copy of sequence `id` that continues with `prompt` and a generation of its own.
    ///
    /// # Errors
    /// As [`Session::fork`] and [`Scheduler::add`], or if there is no such sequence or its prompt is not read yet.
    pub fn fork(&mut self, id: SequenceId, prompt: &[u32], options: &GenerateOptions) -> Result<SequenceId> {
        let fork = self.read_slot(id)?.session.fork()?;
        Ok(self.add(fork, prompt, options)?)
    }

    /// Adds a second sequence with the prompt of `id`, which is not read again except for its last token, and a
    /// generation of its own: it writes what it would have written alone. Log-probabilities of the prompt
    /// ([`GenerateOptions::prompt_logprobs`]) are those of `id`: it has none.
    ///
    /// # Errors
    /// As [`Session::fork`], [`Session::rewind`] and [`Scheduler::add`], or if there is no such sequence or its prompt
    /// is not read yet. At the first piece of `id`, its prompt can still be rewound to; if the model has a recurrent
    /// state, after [`Scheduler::keep_prompt`].
    pub fn fork_prompt(&mut self, id: SequenceId, options: &GenerateOptions) -> Result<SequenceId> {
        let slot = self.read_slot(id)?;
        let last = slot.run.prompt_end - 1;
        let unread = || Error::argument("id", "its prompt was not read completely");
        let token = slot.session.tokens().get(last).copied().ok_or_else(unread)?;
        let mut fork = slot.kept.as_mut().unwrap_or(&mut slot.session).fork()?;
        fork.rewind(last)?;
        let prompt_tokens = slot.run.statistics.prompt_tokens;
        let id = self.add(fork, &[token], options)?;
        if let Some(Slot { run, .. }) = self.slots.last_mut() {
            (run.statistics.prompt_tokens, run.statistics.cached_tokens) = (prompt_tokens, prompt_tokens - 1);
        }
        Ok(id)
    }

    /// Keeps the state before the last token of the prompt of `id` until the step after its first piece, for
    /// [`Scheduler::fork_prompt`] of a model with a recurrent state, which cannot be rewound. The last token is then
    /// read in a pass of its own. Nothing changes for other models.
    ///
    /// # Errors
    /// If there is no such sequence, or its prompt is read.
    pub fn keep_prompt(&mut self, id: SequenceId) -> Result<()> {
        let unread = |slot: &&mut Slot| slot.id == id && slot.run.is_reading();
        let missing = || Error::argument("id", "is not a sequence of this scheduler whose prompt is unread");
        let slot = self.slots.iter_mut().find(unread).ok_or_else(missing)?;
        if slot.session.has_recurrent() {
            slot.run.kept_at = Some(slot.run.prompt_end - 1);
            // The other tokens may be a cached prefix.
            slot.keep_before_last();
        }
        Ok(())
    }

    /// A sequence whose prompt is read.
    fn read_slot(&mut self, id: SequenceId) -> Result<&mut Slot> {
        let missing = || Error::argument("id", "is not a sequence of this scheduler, or was removed");
        let slot = self.slots.iter_mut().find(|slot| slot.id == id).ok_or_else(missing)?;
        if slot.run.is_reading() {
            return Err(Error::argument("id", "its prompt is being read; fork it after its first token"));
        }
        Ok(slot)
    }

    /// Runs one pass for all running generations. Each yields a piece, unless it is still reading its prompt, waits for
    /// the prefix of another one's prompt to be cached, or waits for memory: if it is exhausted for a sequence's rows,
    /// they are retried when another sequence is removed or a cached prefix is dropped. If all wait, they continue
    /// without cached prefixes, then without drafts, then without draft models, and then the newest ends with the
    /// error.
    pub fn step(&mut self) -> Vec<Event> {
        let (engine, mut events) = (self.engine.clone(), Vec::new());
        let start = Instant::now();
        self.slots.iter_mut().filter(|slot| !slot.run.is_reading()).for_each(|slot| slot.kept = None);
        for slot in self.slots.iter_mut().filter(|slot| slot.run.finish_reason().is_none()) {
            if slot.run.cancel.is_cancelled() {
                let piece = slot.run.cancelled(&mut slot.session).unwrap_or_default();
                events.push(slot.event(Ok(piece)));
            }
        }
        if self.prefixes.as_mut().is_some_and(PrefixCache::take_has_dropped) {
            self.retry_waiting();
        }
        if let Some(prefixes) = &mut self.prefixes {
            begin_awaiting(&mut self.slots, prefixes);
        }
        let (mode, mut out_of_memory, done) = engine.run(|| {
            let (mode, out_of_memory) = self.plan(&mut events);
            self.drop_prefixes();
            self.draft(&mut events);
            (mode, out_of_memory, self.pass())
        });
        let time = start.elapsed();
        let (mut pass, mut tokens) = (OtherSequences::default(), 0);
        let any_done = done.iter().any(|one| one.done.is_ok());
        for one in done {
            let counts = one.counts;
            match self.finish(one, time) {
                Ok(event) => {
                    pass = pass + counts;
                    let pieces = event.iter().flat_map(|event| &event.piece);
                    tokens += pieces.map(|piece| piece.tokens.len()).sum::<usize>();
                    events.extend(event);
                }
                Err(error) => out_of_memory = Some(error),
            }
        }
        self.plain &= !any_done && out_of_memory.is_some();
        // Only if all wait: one that has just ended may be removed before the next step, which frees its memory.
        if let Some(error) = out_of_memory
            && !self.prefixes.as_mut().is_some_and(PrefixCache::drop_for_memory)
            && events.is_empty()
            && !self.slots.iter().any(Slot::takes_part)
        {
            events.extend(self.free_memory(error));
        }
        self.chunks.observe(pass.tokens, pass.prompt_rows, start.elapsed());
        if pass.prompt_rows == 0 && self.slots.iter_mut().any(|slot| slot.session.decoder().drafting.chooses()) {
            engine.parts.batches.lock().observe(pass.tokens, mode, tokens, start.elapsed());
        }
        for slot in &mut self.slots {
            // The error follows the text before it.
            if let Some(error) = slot.run.take_error() {
                events.push(slot.event(Err(error)));
            }
        }
        events
    }

    /// Finishes a sequence's part of a pass that took `time`.
    ///
    /// # Errors
    /// If memory was exhausted: the sequence waits then, with its work.
    fn finish(&mut self, one: PartDone, time: Duration) -> Result<Option<Event>> {
        let PartDone { slot, counts, work, done } = one;
        let slot = &mut self.slots[slot];
        let Slot { session, run, waits, .. } = slot;
        let done = match (done, work) {
            (Err(error @ Error::Memory { .. }), Some(work)) => {
                run.put_back(session.decoder(), work);
                *waits = true;
                return Err(error);
            }
            (done, _) => done,
        };
        let was_reading = counts.prompt_rows > 0;
        match was_reading {
            true => run.statistics.prefill += time,
            false => run.statistics.decode += time,
        }
        let prefixes = &mut self.prefixes;
        let piece = Error::catch(|| {
            let taken = run.take(session, done, None)?;
            let is_at_cut = was_reading && run.cuts.contains(&session.decoder().state.len());
            if let Some(prefixes) = prefixes.as_mut().filter(|_| is_at_cut) {
                prefixes.insert(session, Origin::Running);
            }
            match run.has_first() {
                true => run.nothing_to_generate().map_or_else(|| run.emit_first(session), |piece| Ok(Some(piece))),
                false => Ok(taken),
            }
        });
        let piece = piece.or_else(|error| run.fail(session, error).map(Some));
        if was_reading {
            slot.keep_before_last();
        }
        Ok(piece.transpose().map(|piece| slot.event(piece)))
    }

    /// Plans each running generation's part of the next pass. A generation that fails to plan ends, but if memory is
    /// exhausted for the state before its prompt, it waits; the error is returned with the pass's mode.
    fn plan(&mut self, events: &mut Vec<Event>) -> (PassMode, Option<Error>) {
        if !self.slots.iter().any(Slot::takes_part) {
            self.retry_waiting();
        }
        let mut left = self.max_rows;
        let least_unread = self.shortest_prompt_first.then(|| least_unread(&self.slots));
        let (mut reading, decoding): (Vec<_>, Vec<_>) =
            (self.slots.iter_mut()).filter(|slot| slot.takes_part()).partition(|slot| slot.run.is_reading());
        let mut mode = self.engine.parts.batches.lock().mode(decoding.len());
        let (mut of_prompts, mut of_scored) = (self.chunks.rows(decoding.len()), SCORED_ROWS);
        if of_prompts > 0 && reading.len() > 1 {
            if let Some(least_unread) = least_unread {
                reading.sort_by_key(|slot| least_unread[&slot.id]);
            }
            self.shortest_prompt_first = !self.shortest_prompt_first;
        }
        // No drafts in a pass with a chunk: at that many rows each further one costs its full time.
        if self.plain || !reading.is_empty() && of_prompts > 0 {
            mode = PassMode::Plain;
        }
        // Sequences not planned yet emit at least one token, in one row.
        let mut others = OtherSequences { rows: decoding.len(), tokens: decoding.len(), prompt_rows: 0 };
        let mut out_of_memory = None;
        for slot in decoding.into_iter().chain(reading) {
            let Slot { session, run, planned, waits, .. } = slot;
            let (reads, scores) = (run.is_reading(), run.scores_prompt());
            if reads && of_prompts == 0 || scores && of_scored == 0 {
                continue;
            }
            let max_rows = if reads {
                left.min(of_prompts).min(if scores { of_scored } else { usize::MAX }).max(1)
            } else if self.plain || (mode == PassMode::Plain && session.decoder().drafting.chooses()) {
                1
            } else {
                usize::MAX
            };
            let plain = OtherSequences { rows: 1, tokens: 1, prompt_rows: 0 };
            let beside = if reads { others } else { others.without(plain) };
            match run.plan(session.decoder(), max_rows, beside, None) {
                Ok(work) => {
                    left = left.saturating_sub(work.num_rows());
                    if reads {
                        of_prompts = of_prompts.saturating_sub(work.num_rows());
                        of_scored = of_scored.saturating_sub(if scores { work.num_rows() } else { 0 });
                    } else {
                        others = beside + work.counts();
                    }
                    *planned = Some(work);
                }
                Err(error @ Error::Memory { .. }) if reads => {
                    *waits = true;
                    out_of_memory = Some(error);
                }
                Err(error) => events.push(slot.fail(error)),
            }
        }
        (mode, out_of_memory)
    }

    /// Runs the draft models for all sequences together. A sequence whose draft fails ends.
    fn draft(&mut self, events: &mut Vec<Event>) {
        let proposing = self.slots.iter_mut().enumerate().filter_map(|(at, slot)| {
            let Slot { session, run, planned: Some(Work::Verify(proposal)), .. } = slot else { return None };
            Some((at, Proposing { decoder: session.decoder(), proposal, cancel: &run.cancel }))
        });
        let (slots, mut proposing): (Vec<_>, Vec<_>) = proposing.unzip();
        let done = complete(&mut proposing);
        for (at, error) in slots.into_iter().zip(done).filter_map(|(at, done)| Some((at, done.err()?))) {
            self.slots[at].planned = None;
            events.push(self.slots[at].fail(error));
        }
    }

    /// Runs the pass.
    fn pass(&mut self) -> Vec<PartDone> {
        let tokenizer = self.engine.parts.tokenizer.as_deref();
        let (mut parts, mut steps) = (Vec::new(), Vec::<Step<'_>>::new());
        for (at, Slot { session, run, planned, .. }) in self.slots.iter_mut().enumerate() {
            let Some(work) = planned.take() else { continue };
            parts.push((at, work.counts()));
            steps.push(run.step(session.decoder(), work, tokenizer));
        }
        let done = run_pass(&mut steps);
        let works = steps.into_iter().map(|step| step.work);
        let parts = parts.into_iter().zip(works).zip(done);
        parts.map(|(((slot, counts), work), done)| PartDone { slot, counts, work, done }).collect()
    }
}

impl fmt::Debug for Scheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scheduler").field("sequences", &self.slots.len()).finish_non_exhaustive()
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for Slot { session, run, .. } in &mut self.slots {
            run.end(session);
        }
    }
}
