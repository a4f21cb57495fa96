//! One sequence: its cache, and where it stands.

use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::engine::Engine;
use crate::gemma4::Wanted;
use crate::generation::Generation;
use crate::kv::KvCache;
use crate::nn::F32View;
use crate::options::{GenerateOptions, MtpOptions, SessionOptions, Speculation};
use crate::sampler::Sampler;
use crate::speculative::{DraftSampling, Frontier};
use crate::{Error, Result};

/// A sequence of tokens and its K and V. Prompts and generations alternate; each continues where the last one ended.
pub struct Session {
    pub(crate) engine: Engine,
    pub(crate) kv: KvCache,
    /// The newest token, once there is one: emitted, but not yet in the cache.
    pub(crate) frontier: Option<Frontier>,
}

impl Session {
    pub(crate) fn new(engine: Engine, options: &SessionOptions) -> Result<Self> {
        let target = engine.target();
        let (layout, context) = (target.kv_layout(), target.config().max_position_embeddings);
        let kv = KvCache::new(layout, &options.kv, context, engine.parts.isa)?;
        Ok(Self { engine, kv, frontier: None })
    }

    /// The engine that it runs on.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The cache.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// Appends `prompt` and generates. The prompt is processed before this returns; the tokens come as the iterator is
    /// asked for them. Dropping the iterator ends the generation after the last round that it handed out.
    ///
    /// # Errors
    /// If the prompt is empty, has ids outside the vocabulary or does not fit the context, or an option is out of its
    /// range. Nothing of the prompt is kept then.
    pub fn generate(&mut self, prompt: &[u32], options: &GenerateOptions) -> Result<Generation<'_>> {
        let sampler = Sampler::new(options.sampling.clone(), self.engine.parts.suppressed.clone())?;
        let (block_size, drafts) = self.speculation(options.speculation)?;
        if prompt.is_empty() {
            return Err(Error::Input("the prompt is empty; give at least one token".into()));
        }
        let mut rng = StdRng::seed_from_u64(options.seed);
        let start = Instant::now();
        let engine = self.engine.clone();
        let first = engine.parts.pool.install(|| self.prefill(prompt, &sampler, &mut rng))?;
        let prefill = start.elapsed();
        Generation::new(self, sampler, rng, options, (block_size, drafts), (prompt.len(), prefill), first)
    }

    /// Runs the target over the prompt, in chunks, and draws the first token after it.
    fn prefill(&mut self, prompt: &[u32], sampler: &Sampler, rng: &mut StdRng) -> Result<Frontier> {
        let ids: Vec<u32> = self.frontier.iter().map(|frontier| frontier.last).chain(prompt.iter().copied()).collect();
        let vocab = self.engine.target().config().num_readable_tokens();
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::Input(format!("token id {id} of the prompt is outside the vocabulary of {vocab}")));
        }
        let needed = self.kv.len() + ids.len();
        if needed > self.kv.max_context() {
            return Err(Error::Context { needed, limit: self.kv.max_context() });
        }
        let engine = self.engine.clone();
        let mut chunks = ids.chunks(self.kv.max_round_rows()).peekable();
        while let Some(chunk) = chunks.next() {
            let wanted = if chunks.peek().is_none() { Wanted::Last } else { Wanted::Nothing };
            let mut round = self.kv.begin_round(chunk.len())?;
            let output = engine.target().forward(chunk, &mut round, wanted)?;
            round.commit(chunk.len());
            // From here on the cache has more than the old frontier speaks of.
            self.frontier = None;
            if let Some(output) = output {
                let last = sampler.distribution(None, &F32View::new(&output.logits)?)?.sample(rng);
                return Ok(Frontier { last, hidden: output.hidden });
            }
        }
        Err(Error::Input("the prompt is empty; give at least one token".into()))
    }

    /// Rows of a verification, and how drafts are chosen.
    fn speculation(&self, speculation: Speculation) -> Result<(usize, DraftSampling)> {
        let mtp = match (speculation, self.engine.assistant()) {
            (Speculation::Off, _) | (Speculation::WherePossible, None) => {
                MtpOptions { block_size: 1, drafts: DraftSampling::Greedy }
            }
            (Speculation::WherePossible, Some(_)) => MtpOptions::default(),
            (Speculation::Mtp(_), None) => {
                let problem = "speculation needs an assistant; load one, or turn speculation off";
                return Err(Error::Input(problem.into()));
            }
            (Speculation::Mtp(mtp), Some(_)) => mtp,
        };
        let most = self.kv.max_round_rows();
        if mtp.block_size == 0 || mtp.block_size > most {
            let problem = format!("the draft block size is {}, must be from 1 to {most}", mtp.block_size);
            return Err(Error::Input(problem));
        }
        Ok((mtp.block_size, mtp.drafts))
    }
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
}

impl Statistics {
    /// Adds another generation's counts and times.
    pub fn add(&mut self, other: &Self) {
        let add_all = |to: &mut Vec<usize>, from: &[usize]| {
            to.resize(to.len().max(from.len()), 0);
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        };
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

    fn tokens_of_rounds(&self) -> f64 {
        self.generated_tokens.saturating_sub(self.generations) as f64
    }
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}
