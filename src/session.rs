//! One sequence: its cache, and where it stands.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::engine::Engine;
use crate::gemma4::Wanted;
use crate::generation::{Generation, Request};
use crate::kv::{KvCache, KvFormat, KvOptions};
use crate::options::{GenerateOptions, Pipeline, SessionOptions, Speculation, SpeculationOptions};
use crate::sampler::{Sampler, Sampling};
use crate::speculative::{
    Confidence, Draft, Drafters, Frontier, NgramCache, Order, Passes, Pending, Planner, Proposal, Round, Settings,
    SimulatedAcceptance, SpeculationStats, Speculator, Tracer, add_all, count_at,
};
use crate::{Error, Result};

/// A sequence of tokens and its K and V. Prompts and generations alternate; each continues where the last one ended.
pub struct Session {
    pub(crate) engine: Engine,
    pub(crate) desk: Desk,
    kv_options: KvOptions,
    id: u64,
}

/// Where the sequence is.
pub(crate) enum Desk {
    /// Here, at rest.
    Here(Box<Speculator>),
    /// With a drafter, who is ahead of the caller.
    Away(Pending<Box<Speculator>, Result<Proposal>>),
    /// On its way between the two; nobody sees this.
    Moving,
}

impl Session {
    pub(crate) fn new(engine: Engine, options: &SessionOptions) -> Result<Self> {
        let target = engine.target();
        let (layout, context) = (target.kv_layout(), target.config().max_position_embeddings);
        let (kv, device) = match &engine.parts.models {
            None => (KvCache::new(layout, &options.kv, context, engine.parts.isa)?, None),
            Some(models) => {
                let (sequence, context) = models.sequence(&layout, &options.kv, context)?;
                // The rows are on the device: this one counts them.
                let counted = KvOptions { max_context: Some(context), memory: Some(u64::MAX), ..options.kv.clone() };
                let kv = KvCache::new(layout, &counted, context, engine.parts.isa)?;
                (kv, Some(Arc::new(Mutex::new(sequence))))
            }
        };
        let coarse = |key: KvFormat| matches!(key, KvFormat::Coded(format) if format.bits() < 5);
        if kv.report().iter().filter_map(|store| store.key).any(coarse) {
            tracing::warn!(
                "keys in fewer than 5 bits: Gemma 4 does not scale its scores, which multiplies their errors"
            );
        }
        let sampler = Sampler::new(Sampling::default(), engine.parts.suppressed.clone())?;
        let passes = Passes { target: engine.parts.sources.target.clone(), device };
        let desk = Desk::Here(Box::new(Speculator::new(passes, kv, sampler)));
        let id = engine.parts.sessions.fetch_add(1, Ordering::Relaxed);
        Ok(Self { engine, desk, kv_options: options.kv.clone(), id })
    }

    /// The engine that it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The cache. Where the models run on a device, which has the rows, it counts them and holds none.
    ///
    /// # Panics
    /// If a generation at pipeline depth 2 was leaked ([`std::mem::forget`]), until the next one begins: a drafter has the
    /// cache then.
    pub fn kv(&self) -> &KvCache {
        match &self.desk {
            Desk::Here(speculator) => &speculator.kv,
            Desk::Away(_) | Desk::Moving => panic!("a leaked generation is still drafting; begin another one first"),
        }
    }

    /// Bytes of K and V held, wherever they are.
    ///
    /// # Panics
    /// As [`Session::kv`].
    pub fn kv_bytes(&self) -> usize {
        let kv = self.kv();
        match &self.desk {
            Desk::Here(speculator) => {
                speculator.passes.device.as_ref().map_or_else(|| kv.bytes(), |sequence| sequence.lock().kv_bytes())
            }
            Desk::Away(_) | Desk::Moving => kv.bytes(),
        }
    }

    pub(crate) fn kv_options(&self) -> &KvOptions {
        &self.kv_options
    }

    /// What the drafter `ngram-cache` of the last generation has learnt: its dynamic cache with this sequence's counts. To
    /// be saved, and given to later sessions.
    pub fn learnt_ngrams(&mut self) -> Option<NgramCache> {
        self.speculator().0.learnt()
    }

    /// Appends `prompt` and generates. The prompt is processed before this returns; the tokens come as the iterator is
    /// asked for them. Dropping the iterator ends the generation after the last round that it handed out.
    ///
    /// # Errors
    /// If the prompt is empty, has ids outside the vocabulary or does not fit the context, or an option is out of its
    /// range. Nothing of the prompt is kept then.
    pub fn generate(&mut self, prompt: &[u32], options: &GenerateOptions) -> Result<Generation<'_>> {
        let sampler = Sampler::new(options.sampling.clone(), self.engine.parts.suppressed.clone())?;
        let speculation = self.speculation(&options.speculation)?;
        let simulated = SimulatedAcceptance::new(&options.simulate_acceptance)?;
        if prompt.is_empty() {
            return Err(Error::Input("the prompt is empty; give at least one token".into()));
        }
        let mut rng = StdRng::seed_from_u64(options.seed);
        let start = Instant::now();
        let (engine, kv_options, id) = (self.engine.clone(), self.kv_options.clone(), self.id);
        let list = engine.parts.sources.list(&speculation.drafters);
        let (speculator, _) = self.speculator();
        if !speculator.has(&list) {
            let drafters: Result<_> =
                list.iter().map(|one| engine.parts.sources.drafter(one, &speculator.passes, &kv_options)).collect();
            speculator.set_drafters(list, drafters?);
        }
        let settings = Settings {
            sampler,
            drafts: speculation.drafts,
            order: if matches!(speculation.drafters, Drafters::Priority(_)) { Order::Priority } else { Order::Best },
            confidence: if options.trace.is_some() { Confidence::Said } else { Confidence::Unsaid },
            simulated,
        };
        let costs = engine.costs();
        let planner = |drafters: &[_]| Planner::new(speculation.block, speculation.skip_streak, drafters, costs);
        // Drafts are drawn from numbers of their own.
        speculator.configure(settings, planner, StdRng::seed_from_u64(!options.seed));
        let first = engine.parts.pool.install(|| prefill(speculator, prompt, &mut rng))?;
        let kinds = speculator.kinds();
        let statistics = Statistics {
            generations: 1,
            prompt_tokens: prompt.len(),
            prefill: start.elapsed(),
            simulated: !options.simulate_acceptance.is_empty(),
            speculation: SpeculationStats::new(&kinds),
            ..Statistics::default()
        };
        let tracer = options.trace.as_ref().map(|trace| Tracer::begin(trace, id, prompt.len(), kinds));
        let ahead = speculation.pipeline == Pipeline::Ahead;
        Ok(Generation::new(self, Request { rng, options, ahead, tracer, first, statistics }))
    }

    /// The sequence, back from wherever it is, and what was drafted meanwhile.
    pub(crate) fn speculator(&mut self) -> (&mut Speculator, Option<std::thread::Result<Result<Proposal>>>) {
        let mut proposal = None;
        self.desk = match std::mem::replace(&mut self.desk, Desk::Moving) {
            Desk::Away(pending) => {
                let (speculator, result) = pending.wait(&self.engine.parts.pool);
                proposal = Some(result);
                Desk::Here(speculator)
            }
            desk => desk,
        };
        match &mut self.desk {
            Desk::Here(speculator) => (speculator, proposal),
            Desk::Away(_) | Desk::Moving => unreachable!("it was brought here above"),
        }
    }

    /// Has the next round's draft made on the engine's threads.
    pub(crate) fn submit(&mut self, most_rows: usize) {
        self.desk = match std::mem::replace(&mut self.desk, Desk::Moving) {
            Desk::Here(speculator) => {
                let draft = move |speculator: &mut Box<Speculator>, cancel: &_| speculator.propose(most_rows, cancel);
                Desk::Away(Pending::submit(&self.engine.parts.pool, speculator, draft))
            }
            desk => desk,
        };
    }

    /// The options in full, checked.
    fn speculation(&self, speculation: &Speculation) -> Result<SpeculationOptions> {
        let sources = &self.engine.parts.sources;
        let options = match speculation {
            Speculation::WherePossible if sources.assistant.is_some() || sources.draft_model.is_some() => {
                SpeculationOptions::default()
            }
            Speculation::WherePossible | Speculation::Off => SpeculationOptions::off(),
            Speculation::Mtp(mtp) => SpeculationOptions::from(*mtp),
            Speculation::With(options) => options.clone(),
        };
        let most = self.kv_options.max_round_rows;
        let (chain, look_up) = options.block.rows().unwrap_or((1, 1));
        if let Some(rows) = [chain, look_up].into_iter().find(|rows| *rows == 0 || *rows > most) {
            let problem = format!("the draft block size is {rows}, must be from 1 to {most}");
            return Err(Error::Input(format!("{problem}, the rows that a round may stage beside the sliding window")));
        }
        if options.skip_streak.is_some_and(|rounds| !(1..=32).contains(&rounds)) {
            let problem = format!("the skip streak is {}, must be from 1 to 32", options.skip_streak.unwrap_or(0));
            return Err(Error::Input(problem));
        }
        Ok(options)
    }
}

/// Runs the target over the prompt, in chunks, and draws the first token after it.
fn prefill(speculator: &mut Speculator, prompt: &[u32], rng: &mut StdRng) -> Result<Frontier> {
    let last = speculator.frontier.as_ref().map(|frontier| frontier.last);
    let ids: Vec<u32> = last.into_iter().chain(prompt.iter().copied()).collect();
    let vocab = speculator.passes.target.config().num_readable_tokens();
    if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::Input(format!("token id {id} of the prompt is outside the vocabulary of {vocab}")));
    }
    let needed = speculator.kv.len() + ids.len();
    if needed > speculator.kv.max_context() {
        return Err(Error::Context { needed, limit: speculator.kv.max_context() });
    }
    let passes = speculator.passes.clone();
    let mut chunks = ids.chunks(speculator.kv.max_round_rows()).peekable();
    while let Some(chunk) = chunks.next() {
        let wanted = if chunks.peek().is_none() { Wanted::Last } else { Wanted::Nothing };
        let mut round = speculator.kv.begin_round(chunk.len())?;
        let passed = passes.run(chunk, &mut round, wanted)?;
        round.commit(chunk.len());
        // From here on the cache has more than the old frontier speaks of.
        if speculator.frontier.take().is_some() {
            speculator.tokens.pop();
        }
        speculator.tokens.extend(chunk);
        if let Some(mut passed) = passed {
            let last = passed.judge(&mut Draft::default(), (speculator.sampler(), None), rng)?.next;
            return Ok(Frontier { last, hidden: passed.settle(0, last, Confidence::Said)? });
        }
    }
    Err(Error::Input("the prompt is empty; give at least one token".into()))
}

/// Counts and times of one generation.
#[derive(Clone, Debug, Default)]
pub struct Statistics {
    /// Generations counted: each one's first token comes from the prompt's pass, not from a round.
    pub generations: usize,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Passes of the target after the prompt's.
    pub rounds: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Drafted tokens that were emitted.
    pub accepted: usize,
    /// For each place in the chain, how often a token was drafted there.
    pub drafted_at: Vec<usize>,
    /// For each place in the chain, how often the token drafted there was emitted.
    pub accepted_at: Vec<usize>,
    /// Time for the prompt.
    pub prefill: Duration,
    /// Time for everything after it.
    pub decode: Duration,
    /// Part of `decode` spent drafting.
    pub draft: Duration,
    /// Part of `decode` spent in the target's passes.
    pub verify: Duration,
    /// Whether drafts were accepted by a coin: the text is meaningless then.
    pub simulated: bool,
    /// What each drafter and the planner did.
    pub speculation: SpeculationStats,
}

impl Statistics {
    /// Adds another generation's counts and times.
    pub fn add(&mut self, other: &Self) {
        add_all(&mut self.drafted_at, &other.drafted_at);
        add_all(&mut self.accepted_at, &other.accepted_at);
        self.generations += other.generations;
        self.prompt_tokens += other.prompt_tokens;
        self.generated_tokens += other.generated_tokens;
        self.rounds += other.rounds;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
        self.prefill += other.prefill;
        self.decode += other.decode;
        self.draft += other.draft;
        self.verify += other.verify;
        self.simulated |= other.simulated;
        self.speculation.add(&other.speculation);
    }

    pub(crate) fn count(&mut self, round: &Round, wait: Duration) {
        let drafted = round.draft.tokens.len();
        self.rounds += 1;
        self.drafted += drafted;
        self.accepted += round.accepted;
        count_at(&mut self.drafted_at, drafted);
        count_at(&mut self.accepted_at, round.accepted);
        self.draft += round.draft_time;
        self.verify += round.verify_time;
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

    /// Prompt tokens per second.
    pub fn prefill_tokens_per_second(&self) -> f64 {
        ratio(self.prompt_tokens as f64, self.prefill.as_secs_f64())
    }

    /// Tokens per second after the first, which the prompt's pass gives.
    pub fn decode_tokens_per_second(&self) -> f64 {
        ratio(self.tokens_of_rounds(), self.decode.as_secs_f64())
    }

    /// How many times as fast as plain decoding the rounds were, estimated: [`SpeculationStats::plain_ms`] over the time of
    /// drafts, passes and acceptance. `None` without drafters, or if plain steps were not measured.
    pub fn speed_up(&self) -> Option<f64> {
        let s = &self.speculation;
        let plain_ms = s.plain_ms.filter(|_| !s.drafters.is_empty())?;
        Some(ratio(plain_ms / 1e3, (s.wait + s.verify + s.accept).as_secs_f64()))
    }

    fn tokens_of_rounds(&self) -> f64 {
        self.generated_tokens.saturating_sub(self.generations) as f64
    }
}

/// For people: speed, acceptance and the estimated speed-up on one line.
impl fmt::Display for Statistics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens at {:.1} tokens/s", self.generated_tokens, self.decode_tokens_per_second())?;
        if !self.speculation.drafters.is_empty() {
            write!(f, ", {} of {} drafted tokens accepted", self.accepted, self.drafted)?;
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
