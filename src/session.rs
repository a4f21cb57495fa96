//! A session: one sequence with its KV cache.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::engine::Engine;
use crate::kv::{HeldPage, KvCache, KvFormat, KvOptions, PagePool, SequenceState};
use crate::options::{DraftPipeline, GenerateOptions, SessionOptions, Speculation, SpeculationOptions};
use crate::sampler::{Sampler, Sampling};
use crate::speculative::{
    Backend, Cancel, Confidence, DeviceSequence, DrafterOptions, Drafters, NgramCache, Order, OtherSequences, Pending,
    Planner, Proposal, RoundResult, Settings, SimulatedAcceptance, Sources, SpeculationStats, SpeculativeDecoder,
    add_all, count_draft,
};
use crate::{Error, Result};

/// A sequence of tokens and its KV cache. Prompts and generations alternate; each continues where the last one ended.
pub struct Session {
    pub(crate) engine: Engine,
    phase: Phase,
    kv_options: KvOptions,
    pub(crate) id: u64,
}

/// Where the decoder is.
enum Phase {
    /// In the session, with the next draft if one was made ahead of time.
    Idle(Box<SpeculativeDecoder>, Option<Box<Result<Proposal>>>),
    /// On the thread that makes the next draft.
    Drafting(Pending<Box<SpeculativeDecoder>, Result<Proposal>>),
    /// Only inside a function that moves it.
    Transient,
}

impl Session {
    pub(crate) fn new(engine: Engine, options: &SessionOptions) -> Result<Self> {
        let Sources { model, pages, gemma4, .. } = &engine.parts.sources;
        let (state, device) = match &engine.parts.models {
            Some(models) => {
                let (sequence, context) = models.sequence(&options.kv, model.max_position_embeddings())?;
                let device = DeviceSequence { models: models.clone(), sequence: Arc::new(Mutex::new(sequence)) };
                // The rows are on the device; this state only counts them.
                let counted = KvOptions { max_context: Some(context), memory: Some(u64::MAX), ..options.kv.clone() };
                (model.new_state(&counted, &PagePool::new(None))?, Some(device))
            }
            None => (model.new_state(&options.kv, pages)?, None),
        };
        let (context, trained) = (state.kv().max_context(), model.max_position_embeddings());
        if context > trained {
            // Once: a server opens a session for every request.
            engine.parts.long_context.call_once(|| {
                tracing::warn!(context, trained, "the context is longer than the model was trained for; lower it");
            });
        }
        let coarse = |key: KvFormat| matches!(key, KvFormat::Quantized(format) if format.bits() < 5);
        if gemma4.is_some() && state.kv().report().iter().filter_map(|store| store.key).any(coarse) {
            tracing::warn!(
                "keys in fewer than 5 bits: Gemma 4 does not scale attention scores, so their errors are larger"
            );
        }
        let backend = Backend { model: model.clone(), device };
        Self::around(engine, &options.kv, backend, state)
    }

    fn around(engine: Engine, kv_options: &KvOptions, backend: Backend, state: SequenceState) -> Result<Self> {
        let sampler = Sampler::new(engine.parts.isa, Sampling::default(), engine.parts.suppressed.clone())?;
        let phase = Phase::Idle(Box::new(SpeculativeDecoder::new(backend, state, sampler)), None);
        let id = engine.parts.sessions.fetch_add(1, Ordering::Relaxed);
        Ok(Self { engine, phase, kv_options: kv_options.clone(), id })
    }

    /// The session's engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The KV cache. If the models run on a device, it only counts the rows, which are there.
    ///
    /// # Panics
    /// If a generation at pipeline depth 2 was leaked ([`std::mem::forget`]), until the next one
    /// starts: the draft in progress owns the cache until then.
    pub fn kv(&self) -> &KvCache {
        self.idle().state.kv()
    }

    /// Bytes allocated for K and V, on the host or on a device.
    ///
    /// # Panics
    /// As [`Session::kv`].
    pub fn kv_bytes(&self) -> usize {
        let decoder = self.idle();
        decoder.backend.bytes(&decoder.state)
    }

    /// Bytes of the recurrent state and of the rows that it has to replay, which are not in the page pool.
    pub(crate) fn recurrent_bytes(&self) -> usize {
        let decoder = self.idle();
        decoder.backend.recurrent_bytes(&decoder.state)
    }

    /// The pages of K and V, those of drafters as well, including those shared with forks.
    pub(crate) fn held_pages(&self) -> impl Iterator<Item = HeldPage> {
        let SpeculativeDecoder { backend, state, drafting } = self.idle();
        backend.held_pages(state).into_iter().chain(drafting.drafters.held_pages())
    }

    /// The tokens of the sequence: prompts and generated tokens.
    ///
    /// # Panics
    /// As [`Session::kv`].
    pub fn tokens(&self) -> &[u32] {
        &self.idle().drafting.tokens
    }

    fn idle(&self) -> &SpeculativeDecoder {
        match &self.phase {
            Phase::Idle(decoder, _) => decoder,
            Phase::Drafting(_) | Phase::Transient => {
                panic!("a leaked generation is still drafting; start another one first")
            }
        }
    }

    /// Extends an automatic context to the largest that fits `memory` bytes of pages.
    ///
    /// # Errors
    /// If no position fits.
    pub(crate) fn extend_context(&mut self, memory: u64) -> Result<()> {
        let longest = self.engine.target().max_position_embeddings();
        let options = self.kv_options.clone();
        let SpeculativeDecoder { backend, state, .. } = self.decoder();
        let kv = state.kv_mut();
        if kv.max_context() < longest {
            let memory = Some(options.memory.unwrap_or(u64::MAX).min(memory));
            let options = KvOptions { memory, ..options };
            let context = match &backend.device {
                None => options.context(longest, |context| kv.bytes_at(context))?,
                Some(device) => device.longest_context(&options, longest)?,
            };
            kv.set_max_context(context);
        }
        Ok(())
    }

    pub(crate) fn kv_options(&self) -> &KvOptions {
        &self.kv_options
    }

    /// What the drafter `ngram-cache` of the last generation has learnt: its dynamic cache and this sequence's
    /// counts, to be saved and passed to later sessions.
    pub fn learnt_ngrams(&mut self) -> Option<NgramCache> {
        self.decoder().drafting.drafters.learnt()
    }

    /// A copy that continues independently. Both share the memory of their common prefix.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn fork(&mut self) -> Result<Self> {
        let (engine, kv_options) = (self.engine.clone(), self.kv_options.clone());
        let from = self.decoder();
        let device = from.backend.device.as_ref().map(|device| device.fork(from.state.len())).transpose()?;
        let backend = Backend { device, ..from.backend.clone() };
        let mut fork = Self::around(engine, &kv_options, backend, from.state.fork())?;
        let to = fork.decoder();
        to.drafting.drafters = from.drafting.drafters.fork();
        to.drafting.tokens = from.drafting.tokens.clone();
        to.drafting.newest = from.drafting.newest.clone();
        Ok(fork)
    }

    /// A fork without the last token, which the target has not read.
    ///
    /// # Errors
    /// As [`Session::fork`].
    pub(crate) fn fork_read(&mut self) -> Result<Self> {
        let mut fork = self.fork()?;
        let decoder = fork.decoder();
        decoder.drafting.truncate(decoder.state.len(), None);
        Ok(fork)
    }

    /// Maximum context of a fork: on a device, what the page tables hold; on the CPU, unlimited.
    pub(crate) fn max_fork_context(&self) -> usize {
        self.idle().backend.device.as_ref().map_or(usize::MAX, DeviceSequence::context)
    }

    /// A fork with the limits of `like`, whose K and V have the same formats.
    ///
    /// # Errors
    /// As [`Session::fork`], or if the page tables on a device do not hold the context of `like`.
    pub(crate) fn fork_like(&mut self, like: &Self) -> Result<Self> {
        let (needed, limit) = (like.kv().max_context(), self.max_fork_context());
        if limit < needed {
            return Err(Error::Context { needed, limit });
        }
        let mut fork = self.fork()?;
        fork.kv_options = like.kv_options.clone();
        fork.decoder().state.kv_mut().set_max_context(like.kv().max_context());
        Ok(fork)
    }

    /// Truncates the sequence to its first `len` tokens, and frees the pages after them. The next generation needs a
    /// prompt, as always.
    ///
    /// # Errors
    /// If there are fewer tokens, or rows that the next query reads were dropped: a sliding window retains the rows of
    /// one more round, and a recurrent state cannot be rewound. Nothing changes then.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        let SpeculativeDecoder { backend, state, drafting } = self.decoder();
        if len == drafting.tokens.len() {
            return Ok(());
        }
        state.rewind(len)?;
        backend.trim(state);
        drafting.truncate(len, None);
        Ok(())
    }

    /// Whether the tokens read can be truncated to the first `len`: see [`Session::rewind`].
    pub(crate) fn can_rewind(&self, len: usize) -> bool {
        self.idle().state.can_rewind(len)
    }

    /// Whether there is a recurrent state, which cannot be truncated.
    pub(crate) fn has_recurrent(&self) -> bool {
        self.idle().state.has_recurrent()
    }

    /// The decoder, waiting for it if it is drafting. A draft made meanwhile is dropped.
    pub(crate) fn decoder(&mut self) -> &mut SpeculativeDecoder {
        self.decoder_and_draft().0
    }

    /// The decoder, waiting for it if it is drafting, and the draft made meanwhile.
    pub(crate) fn decoder_and_draft(&mut self) -> (&mut SpeculativeDecoder, Option<Result<Proposal>>) {
        self.wait();
        match &mut self.phase {
            Phase::Idle(decoder, drafted) => (decoder, drafted.take().map(|drafted| *drafted)),
            Phase::Drafting(_) | Phase::Transient => unreachable!("it was brought here above"),
        }
    }

    /// Waits for the decoder if it is drafting; the draft is kept.
    pub(crate) fn wait(&mut self) {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Transient) {
            Phase::Drafting(pending) => {
                let (decoder, drafted) = pending.wait(&self.engine.parts.pool);
                let drafted = drafted.unwrap_or_else(|panic| Err(Error::panicked(&*panic)));
                Phase::Idle(decoder, Some(Box::new(drafted)))
            }
            phase => phase,
        };
    }

    /// Starts the next round's draft on the engine's threads, which `cancel` ends after the token that is being
    /// drafted.
    pub(crate) fn submit(&mut self, max_rows: usize, cancel: &Cancel) {
        self.phase = match std::mem::replace(&mut self.phase, Phase::Transient) {
            Phase::Idle(decoder, None) => {
                let engine = self.engine.clone();
                let draft = move |decoder: &mut Box<SpeculativeDecoder>, cancel: &_| {
                    engine.parts.on_thread(|| {
                        let mut proposal = decoder.propose(max_rows, OtherSequences::default())?;
                        decoder.complete(&mut proposal, cancel)?;
                        Ok(proposal)
                    })
                };
                Phase::Drafting(Pending::submit_with(&self.engine.parts.pool, cancel.child(), decoder, draft))
            }
            phase => phase,
        };
    }

    /// The tasks that start when the draft ends that is being made, or was and not taken.
    #[cfg(feature = "stream")]
    pub(crate) fn draft_continuations(&self) -> Option<crate::speculative::Continuations> {
        if let Phase::Drafting(pending) = &self.phase { Some(pending.continuations()) } else { None }
    }

    /// Cancels the draft that is being made, if any.
    pub(crate) fn cancel_draft(&self) {
        if let Phase::Drafting(pending) = &self.phase {
            pending.cancel();
        }
    }

    /// Prepares the sequence for a generation: drafters, planner, sampler.
    ///
    /// # Errors
    /// If an option is out of its range.
    pub(crate) fn configure(&mut self, options: &GenerateOptions) -> Result<DraftPipeline> {
        let sampler =
            Sampler::new(self.engine.parts.isa, options.sampling.clone(), self.engine.parts.suppressed.clone())?;
        let speculation = self.speculation(&options.speculation)?;
        let simulated = SimulatedAcceptance::new(&options.simulate_acceptance)?;
        let (engine, kv_options) = (self.engine.clone(), self.kv_options.clone());
        let constraint = options.constraint.as_ref().map(|constraint| engine.constraint(constraint)).transpose()?;
        let mut list = engine.parts.sources.list(&speculation.drafters);
        if constraint.is_some() {
            if simulated.is_some() {
                let problem = "cannot be combined with a constraint; remove one of them";
                return Err(Error::argument("simulate_acceptance", problem));
            }
            if options.speculation != Speculation::Off {
                list.insert(0, DrafterOptions::Forced);
            }
        }
        let SpeculativeDecoder { backend, drafting, state, .. } = self.decoder();
        let context = state.kv().max_context();
        let new = |options: &DrafterOptions| engine.parts.sources.drafter(options, backend, &kv_options, context);
        drafting.drafters.set(list, context, new)?;
        let settings = Settings {
            sampler,
            constraint: constraint.map(Mutex::new),
            processor: options.logits_processor.clone(),
            drafts: speculation.drafts,
            order: match speculation.drafters {
                Drafters::Priority(_) => Order::Priority,
                Drafters::Auto | Drafters::Best(_) => Order::Best,
            },
            confidence: if options.trace.is_some() { Confidence::Report } else { Confidence::Omit },
            simulated,
            logprobs: options.logprobs,
        };
        let costs = drafting.drafters.configure();
        let planner = Planner::new(speculation.block, speculation.skip_streak, &costs, engine.costs());
        // Drafts have a random generator of their own.
        drafting.configure(settings, planner, StdRng::seed_from_u64(!options.seed));
        Ok(speculation.pipeline)
    }

    /// The resolved options, validated.
    fn speculation(&self, speculation: &Speculation) -> Result<SpeculationOptions> {
        let sources = &self.engine.parts.sources;
        let options = match speculation {
            Speculation::Auto if sources.has_mtp() || sources.draft_model.is_some() => SpeculationOptions::default(),
            Speculation::Auto | Speculation::Off => SpeculationOptions::off(),
            Speculation::With(options) => options.clone(),
        };
        let most = self.kv_options.max_round_rows;
        let (chain, lookup) = options.block.rows().unwrap_or((1, 1));
        if let Some(rows) = [chain, lookup].into_iter().find(|rows| *rows == 0 || *rows > most) {
            let problem = format!("is {rows}, must be from 1 to {most}");
            let limit = "the rows that a round may stage besides the sliding window";
            return Err(Error::argument("block", format!("{problem}, {limit}")));
        }
        if let Some(rounds) = options.skip_streak.filter(|rounds| !(1..=32).contains(rounds)) {
            return Err(Error::argument("skip_streak", format!("is {rounds}, must be from 1 to 32")));
        }
        Ok(options)
    }
}

impl Engine {
    /// Opens a session: an empty cache for one sequence.
    ///
    /// # Errors
    /// If an option is out of its range; [`Error::Memory`] if the context does not fit memory; [`Error::Unsupported`]
    /// if the CPU cannot quantize heads of this width; [`Error::Device`] if the device has no kernels for a K/V format,
    /// or fails.
    pub fn session(&self, options: &SessionOptions) -> Result<Session> {
        let session = Session::new(self.clone(), options)?;
        self.parts.warn_of_short_context(&options.kv, session.kv().max_context());
        Ok(session)
    }
}

/// Counts and times of a generation, or the sums of several: see [`Statistics::add`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Statistics {
    /// Generations counted. The first token of each comes from the prompt's pass, not from a round.
    pub generations: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt found in the prefix cache ([`crate::PrefixCacheOptions`]) or in the sequence forked from,
    /// and not computed.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Passes of the target after the prompt's.
    pub rounds: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafted tokens that were emitted.
    pub accepted: usize,
    /// For each draft position, how often a token was drafted there.
    pub drafted_at: Vec<usize>,
    /// For each of these positions, how often the token drafted there was emitted.
    pub accepted_at: Vec<usize>,
    /// Time for the prompt, and for the [start](SpeculationStats::begin) of the drafters after it.
    pub prefill: Duration,
    /// Time after it.
    pub decode: Duration,
    /// Time for a constraint's masks, truncated drafts and forced tokens: part of `prefill` for the
    /// first token, else of `decode`.
    pub constraint: Duration,
    /// Whether acceptance was simulated: the text is meaningless then.
    pub simulated: bool,
    /// Statistics of each drafter and the planner.
    pub speculation: SpeculationStats,
}

impl Statistics {
    /// Adds another generation's counts and times.
    pub fn add(&mut self, other: &Self) {
        add_all(&mut self.drafted_at, &other.drafted_at);
        add_all(&mut self.accepted_at, &other.accepted_at);
        self.generations += other.generations;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
        self.rounds += other.rounds;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.prefill += other.prefill;
        self.decode += other.decode;
        self.constraint += other.constraint;
        self.simulated |= other.simulated;
        self.speculation.add(&other.speculation);
    }

    pub(crate) fn count(&mut self, round: &RoundResult, wait: Duration) {
        let drafted = round.proposal.draft.tokens.len();
        self.rounds += 1;
        self.drafted += drafted;
        self.accepted += round.accepted;
        count_draft(&mut self.drafted_at, &mut self.accepted_at, drafted, round.accepted);
        self.speculation.count(round, wait);
    }

    /// Accepted tokens per drafted token; 0 if none was drafted.
    pub fn acceptance_rate(&self) -> f64 {
        ratio(self.accepted as f64, self.drafted as f64)
    }

    /// Tokens emitted per pass of the target after the prompt's.
    pub fn tokens_per_round(&self) -> f64 {
        ratio(self.tokens_of_rounds(), self.rounds as f64)
    }

    /// Prompt tokens per second, without those found in the prefix cache.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        ratio((self.prompt_tokens - self.cached_tokens) as f64, self.prefill.as_secs_f64())
    }

    /// Tokens per second after the first, which comes from the prompt's pass.
    pub fn decode_tokens_per_second(&self) -> f64 {
        ratio(self.tokens_of_rounds(), self.decode.as_secs_f64())
    }

    /// Estimated speed-up of the rounds over plain decoding: [`SpeculationStats::plain_ms`] over the time of drafts,
    /// passes and acceptance. `None` without drafters, or if plain steps were not measured.
    pub fn speed_up(&self) -> Option<f64> {
        let s = &self.speculation;
        let plain_ms = s.plain_ms.filter(|_| !s.drafters.is_empty())?;
        Some(ratio(plain_ms / 1e3, (s.wait + s.verify + s.accept).as_secs_f64()))
    }

    fn tokens_of_rounds(&self) -> f64 {
        self.generated_tokens.saturating_sub(self.generations) as f64
    }
}

/// Human-readable: speed, acceptance and the estimated speed-up on one line.
impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.generated_tokens == 1 { "token" } else { "tokens" };
        write!(f, "{} {unit}", self.generated_tokens)?;
        if self.tokens_of_rounds() > 0.0 {
            write!(f, " at {:.1} tokens/s", self.decode_tokens_per_second())?;
        }
        match self.drafted {
            _ if self.speculation.drafters.is_empty() => {}
            0 => write!(f, ", no draft was verified")?,
            drafted => write!(f, ", {} of {drafted} drafted tokens accepted", self.accepted)?,
        }
        if let Some(speed_up) = self.speed_up() {
            write!(f, ", {speed_up:.2}x the estimated speed without speculation")?;
        }
        if self.simulated {
            write!(f, "; acceptance was simulated: the text is meaningless")?;
        }
        Ok(())
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}
