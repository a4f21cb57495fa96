//! State machine of one generation: unread prompt, decoded text, finish reason. Its driver (a
//! [`Generation`](crate::Generation) or a [`Scheduler`](crate::Scheduler)) asks for its rows of the
//! next pass and passes the results back.

use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::StdRng;

use crate::options::{DraftPipeline, GenerateOptions};
use crate::piece::Piece;
use crate::sampler::TokenLogprobs;
use crate::session::{Session, Statistics};
use crate::speculative::{
    Cancel, DecodeState, Done, FirstToken, OtherSequences, Proposal, Scored, Snapshot, SpeculationStats,
    SpeculativeDecoder, Step, Tracer, Work, run_pass,
};
use crate::stop::{Detokenizer, FinishReason};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Rows of prompts per pass that have logits: 32 MiB at a vocabulary of 262144.
pub(crate) const SCORED_ROWS: usize = 32;

/// A generation.
pub(crate) struct Run {
    rng: StdRng,
    pub pipeline: DraftPipeline,
    pub cancel: Cancel,
    /// The tokens of the prompt, preceded by the last token of the sequence.
    prompt: Vec<u32>,
    /// How many of them are read, or in the next pass.
    taken: usize,
    /// Length of the sequence including the prompt.
    pub prompt_end: usize,
    /// Lengths of the sequence at which a pass over the prompt ends.
    pub cuts: Vec<usize>,
    /// Another one, at which the state is kept for forks.
    pub kept_at: Option<usize>,
    undo: Option<Undo>,
    /// A draft drawn at random whose rows had no memory.
    drawn: Option<Box<Proposal>>,
    first: Option<FirstToken>, // not emitted yet
    /// See [`GenerateOptions::prompt_logprobs`].
    prompt_top: Option<usize>,
    prompt_logprobs: Vec<TokenLogprobs>, // not emitted yet
    left: usize,                         // tokens that may still be generated
    text: Detokenizer,
    finish: Option<FinishReason>,
    failed: Option<Error>, // reported after the text that was held back
    pub statistics: Statistics,
    tracer: Option<Tracer>,
}

/// The state before the prompt, for rollback until the prompt is read.
enum Undo {
    /// The sequence, with its state if the prompt takes several passes.
    Sequence { len: usize, newest: Option<DecodeState>, state: Option<Box<Snapshot>> },
    /// The empty session that was replaced by a cached prefix.
    Session(Box<Session>),
}

impl Run {
    /// Validates the request and prepares the sequence, which has the first `cached` tokens of `prompt`. Nothing is
    /// computed.
    ///
    /// # Errors
    /// If the prompt is empty, has ids outside the vocabulary or does not fit the context, or an option is out of its
    /// range.
    pub fn new(session: &mut Session, prompt: &[u32], cached: usize, options: &GenerateOptions) -> Result<Self> {
        let (engine, id) = (session.engine.clone(), session.id);
        let decoder = session.decoder();
        let newest = decoder.drafting.newest.as_ref().map(|newest| newest.last);
        let ids: Vec<u32> = newest.into_iter().chain(prompt[cached..].iter().copied()).collect();
        if prompt.is_empty() {
            return Err(Error::argument("prompt", "is empty; pass at least one token"));
        }
        if engine.parts.tokenizer.is_none() && options.stop.strings.iter().any(|stop| !stop.is_empty()) {
            return Err(Error::argument("stop.strings", "need a tokenizer, and the engine has none; omit them"));
        }
        let vocab = decoder.backend.model.num_readable_tokens();
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(Error::argument("prompt", format!("token id {id} is outside the vocabulary of {vocab}")));
        }
        if ids.len() > decoder.state.remaining() {
            let (needed, limit) = (decoder.state.len() + ids.len(), decoder.state.kv().max_context());
            return Err(Error::Context { needed, limit });
        }
        let pipeline = session.configure(options)?;
        let decoder = session.decoder();
        let kinds = decoder.drafting.drafters.kinds();
        let statistics = Statistics {
            generations: 1,
            prompt_tokens: prompt.len(),
            cached_tokens: cached,
            simulated: !options.simulate_acceptance.is_empty(),
            speculation: SpeculationStats::new(&kinds),
            ..Statistics::default()
        };
        Ok(Self {
            rng: StdRng::seed_from_u64(options.seed),
            pipeline,
            cancel: options.cancel.child(),
            prompt_end: decoder.state.len() + ids.len(),
            prompt: ids,
            taken: 0,
            cuts: Vec::new(),
            kept_at: None,
            undo: Some(Undo::Sequence {
                len: decoder.state.len(),
                newest: decoder.drafting.newest.clone(),
                state: None,
            }),
            drawn: None,
            first: None,
            prompt_top: options.prompt_logprobs,
            prompt_logprobs: Vec::new(),
            left: options.max_tokens,
            text: Detokenizer::new(&options.stop, engine.end_of_generation()),
            finish: None,
            failed: None,
            statistics,
            tracer: options.trace.as_ref().map(|trace| Tracer::begin(trace, id, prompt.len(), kinds)),
        })
    }

    /// Makes a partially read prompt roll back to `empty`, not to the cached prefix that replaced it.
    pub fn replaces(&mut self, empty: Session) {
        self.undo = Some(Undo::Session(Box::new(empty)));
    }

    /// Continues from `found`, a cached prefix of the prompt and longer than what `session` has read of it.
    ///
    /// # Errors
    /// As [`Run::new`], for the options that it was made with.
    pub fn continue_from(
        &mut self,
        session: &mut Session,
        mut found: Session,
        options: &GenerateOptions,
    ) -> Result<()> {
        self.pipeline = found.configure(options)?;
        let len = found.tokens().len();
        self.taken += len - self.read();
        self.statistics.cached_tokens = len;
        let before = std::mem::replace(session, found);
        if !matches!(self.undo, Some(Undo::Session(_))) {
            self.replaces(before);
        }
        Ok(())
    }

    /// Why it ended; `None` while it is running.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Whether the prompt has unread tokens.
    pub fn is_reading(&self) -> bool {
        self.unread() > 0
    }

    /// Whether the next rows of the prompt get log-probabilities. The last row's logits are those of the text's first
    /// token.
    pub fn scores_prompt(&self) -> bool {
        self.prompt_top.is_some() && self.unread() > 1
    }

    /// Rows of the prompt that are not read.
    pub fn unread(&self) -> usize {
        self.prompt.len() - self.taken
    }

    /// Length of the sequence that is read, while it reads its prompt.
    pub fn read(&self) -> usize {
        self.prompt_end - self.unread()
    }

    /// The tokens after those.
    pub fn unread_tokens(&self) -> &[u32] {
        &self.prompt[self.taken..]
    }

    /// Whether the first token after the prompt is ready to be emitted.
    pub fn has_first(&self) -> bool {
        self.first.is_some()
    }

    /// Maximum rows of a round: it emits at most as many tokens, and `max_tokens` is exact.
    pub fn max_rows(&self, decoder: &SpeculativeDecoder) -> usize {
        self.left.min(decoder.state.remaining()).max(1)
    }

    /// Its part of the next pass, of at most `max_rows` rows besides those of `others`; a proposal may have to be
    /// [completed](crate::speculative::complete). A draft made ahead of time is used unchanged, one that was put back
    /// is shortened.
    ///
    /// # Errors
    /// If a drafter produced NaN or infinity, or panics; if the state before the prompt cannot be kept: nothing of the
    /// prompt is taken then.
    pub fn plan(
        &mut self,
        decoder: &mut SpeculativeDecoder,
        max_rows: usize,
        others: OtherSequences,
        drafted: Option<Proposal>,
    ) -> Result<Work> {
        if self.is_reading() {
            return self.plan_prompt(decoder, max_rows);
        }
        Ok(Work::Verify(match (self.drawn.take(), drafted) {
            (Some(mut drawn), _) => {
                drawn.shorten(max_rows.saturating_sub(1));
                drawn
            }
            (None, Some(drafted)) => Box::new(drafted),
            (None, None) => {
                let max_rows = max_rows.min(self.max_rows(decoder));
                Box::new(Error::catch(|| decoder.propose(max_rows, others))?)
            }
        }))
    }

    /// The next rows of the prompt, at most `max_rows`, up to the next cut. See [`Run::plan`].
    fn plan_prompt(&mut self, decoder: &SpeculativeDecoder, max_rows: usize) -> Result<Work> {
        let cuts = self.cuts.iter().chain(&self.kept_at);
        let next_cut = cuts.filter_map(|cut| cut.checked_sub(decoder.state.len()).filter(|rows| *rows > 0)).min();
        let max_rows = max_rows.min(next_cut.unwrap_or(usize::MAX));
        let unread = self.unread();
        let top = self.prompt_top.filter(|_| self.scores_prompt());
        let most = if top.is_some() { SCORED_ROWS.min(unread - 1) } else { unread };
        let rows = max_rows.clamp(1, decoder.state.kv().max_round_rows()).min(most);
        let is_last = rows == unread;
        if let (false, Some(Undo::Sequence { state: state @ None, .. })) = (is_last, &mut self.undo) {
            *state = Some(Box::new(decoder.snapshot()?));
        }
        let scored = top.map(|top| Scored { tokens: self.unread_tokens()[1..=rows].to_vec(), top });
        let ids = self.unread_tokens()[..rows].to_vec();
        self.taken += rows;
        Ok(Work::Prompt { ids, is_last, scored })
    }

    /// Takes back what was planned and not done: its rows of the prompt are unread. A draft is made again, unless it
    /// was drawn at random: whether its rows have memory may depend on the draw, and another would bias the text.
    pub fn put_back(&mut self, decoder: &mut SpeculativeDecoder, work: Work) {
        match work {
            Work::Prompt { ids, .. } => self.taken -= ids.len(),
            Work::Verify(proposal) if !proposal.draft.is_certain() => self.drawn = Some(proposal),
            Work::Verify(proposal) => decoder.drafting.take_back(*proposal),
        }
    }

    /// The step that executes `work`.
    pub fn step<'s>(
        &'s mut self,
        decoder: &'s mut SpeculativeDecoder,
        work: Work,
        tokenizer: Option<&'s Tokenizer>,
    ) -> Step<'s> {
        let text = &mut self.text;
        let ends = Box::new(move |token| text.push(tokenizer, token));
        Step { decoder, work: Some(work), rng: &mut self.rng, ends }
    }

    /// Processes the result of a step. A round yields a piece; a completed prompt does so with [`Run::emit_first`].
    /// `waited`: how long the round waited for a draft made in parallel with the caller; `None` if it made its own.
    ///
    /// # Errors
    /// The step's, to be passed to [`Run::fail`].
    pub fn take(
        &mut self,
        session: &mut Session,
        done: Result<Done>,
        waited: Option<Duration>,
    ) -> Result<Option<Piece>> {
        match done? {
            Done::Prompt(first) => {
                if first.is_some() {
                    (self.first, self.undo) = (first, None);
                }
                Ok(None)
            }
            Done::Scored(logprobs) => {
                self.prompt_logprobs.extend(logprobs);
                Ok(None)
            }
            Done::Round(round) => {
                let round = *round;
                self.statistics.count(&round, waited.unwrap_or(round.proposal.time));
                if let Some(tracer) = &mut self.tracer {
                    tracer.round(session.engine.parts.tokenizer.as_deref(), &round, waited);
                }
                self.piece(session, round.tokens, round.accepted, round.logprobs).map(Some)
            }
        }
    }

    /// Emits the first token after the prompt, which becomes part of the sequence.
    ///
    /// # Errors
    /// If the tokenizer cannot decode it.
    pub fn emit_first(&mut self, session: &mut Session) -> Result<Option<Piece>> {
        let Some(FirstToken { state, logprobs }) = self.first.take() else { return Ok(None) };
        let tokenizer = session.engine.parts.tokenizer.as_deref();
        self.text.push(tokenizer, state.last)?;
        if let Some(tracer) = &mut self.tracer {
            tracer.first(tokenizer, state.last);
        }
        let tokens = vec![state.last];
        let begin = session.decoder().drafting.begin(state);
        self.statistics.prefill += begin;
        self.statistics.speculation.begin += begin;
        self.piece(session, tokens, 0, logprobs).map(Some)
    }

    fn piece(
        &mut self,
        session: &mut Session,
        tokens: Vec<u32>,
        accepted: usize,
        logprobs: Vec<TokenLogprobs>,
    ) -> Result<Piece> {
        self.left -= tokens.len();
        self.statistics.generated_tokens += tokens.len();
        self.statistics.constraint = session.decoder().drafting.constraint_time();
        let full = session.decoder().state.remaining() == 0;
        self.finish = match self.text.ended {
            Some(finish) => Some(finish),
            None if session.decoder().drafting.is_complete() => Some(FinishReason::Constraint),
            None if self.left == 0 => Some(FinishReason::MaxTokens),
            None => full.then_some(FinishReason::Context),
        };
        if self.finish.is_some() {
            self.learn(session);
        }
        let (text, control) = self.text.take(session.engine.parts.tokenizer.as_deref(), self.finish)?;
        let prompt_logprobs = std::mem::take(&mut self.prompt_logprobs);
        Ok(Piece { tokens, text, control, accepted, logprobs, prompt_logprobs })
    }

    /// Ends a cancelled generation. Returns the text that was held back, if any.
    pub fn cancelled(&mut self, session: &mut Session) -> Option<Piece> {
        self.restore(session);
        self.finish = Some(FinishReason::Cancelled);
        self.learn(session);
        self.held_back(session)
    }

    /// Ends the generation if `max_tokens` is 0; its piece then.
    pub fn nothing_to_generate(&mut self) -> Option<Piece> {
        if self.left > 0 || self.finish.is_some() {
            return None;
        }
        self.finish = Some(FinishReason::MaxTokens);
        Some(Piece { prompt_logprobs: std::mem::take(&mut self.prompt_logprobs), ..Piece::default() })
    }

    /// Whether the error that ended the generation is still to be [taken](Run::take_error).
    pub fn has_error(&self) -> bool {
        self.failed.is_some()
    }

    /// The error that ended the generation, after the text before it was emitted.
    pub fn take_error(&mut self) -> Option<Error> {
        self.failed.take()
    }

    /// Ends with an error and rolls back a partially read prompt. Text that was held back comes first.
    ///
    /// # Errors
    /// `error`, if no text was held back.
    pub fn fail(&mut self, session: &mut Session, error: Error) -> Result<Piece> {
        self.restore(session);
        // A panic after a round's tokens are recorded leaves tokens whose rows were not committed.
        let SpeculativeDecoder { state, drafting, .. } = session.decoder();
        if drafting.tokens.len() > state.len() + usize::from(drafting.newest.is_some()) {
            drafting.truncate(state.len(), None);
        }
        self.finish = Some(FinishReason::Error);
        match self.held_back(session) {
            Some(piece) => {
                self.failed = Some(error);
                Ok(piece)
            }
            None => Err(error),
        }
    }

    /// The text that was held back, if any.
    fn held_back(&mut self, session: &Session) -> Option<Piece> {
        let (text, control) = self.text.take(session.engine.parts.tokenizer.as_deref(), self.finish).ok()?;
        (!text.is_empty()).then(|| Piece { text, control, ..Piece::default() })
    }

    /// Rolls back a partially read prompt.
    fn restore(&mut self, session: &mut Session) {
        let Some(undo) = self.undo.take() else { return };
        self.taken = self.prompt.len();
        let (len, newest, state) = match undo {
            Undo::Sequence { len, newest, state } => (len, newest, state),
            Undo::Session(empty) => {
                *session = *empty;
                return;
            }
        };
        let decoder = session.decoder();
        // Without a snapshot the prompt is one pass, which failed.
        if let Some(state) = state {
            decoder.restore(*state);
        }
        decoder.drafting.truncate(len, newest);
    }

    /// Stores the measured costs in the engine and the statistics.
    fn learn(&mut self, session: &mut Session) {
        let (decoder, drafted) = session.decoder_and_draft();
        // A proposal of a plain step is no draft.
        if let Some(Ok(drafted)) = &drafted
            && drafted.planned_len > 0
        {
            self.statistics.speculation.cancelled += 1;
            if let Some(tracer) = &self.tracer {
                tracer.cancelled(drafted.planned_len);
            }
        }
        let costs = decoder.drafting.costs().clone();
        self.statistics.speculation.estimate(&costs, decoder.state.len());
        if decoder.drafting.chooses() {
            session.engine.parts.costs.lock().merge(costs);
        }
    }

    /// Ends the generation: stores the costs, records how it ended, and rolls back a partially read prompt.
    pub fn end(&mut self, session: &mut Session) {
        if self.finish.is_none() {
            self.restore(session);
            self.learn(session);
        }
        if let Some(tracer) = self.tracer.take() {
            tracer.end(self.finish.map_or("dropped", FinishReason::name));
        }
    }
}

/// Advances one generation by one pass. The wait for a draft that was made in parallel is measured from `requested`.
///
/// # Errors
/// See [`Run::take`].
pub(crate) fn advance(run: &mut Run, session: &mut Session, requested: Instant) -> Result<Option<Piece>> {
    let engine = session.engine.clone();
    let (decoder, drafted) = session.decoder_and_draft();
    let waited = drafted.is_some().then(|| requested.elapsed());
    let max_rows = decoder.state.kv().max_round_rows();
    let done = engine.run(|| {
        let mut work = run.plan(decoder, max_rows, OtherSequences::default(), drafted.transpose()?)?;
        if let Work::Verify(proposal) = &mut work {
            decoder.complete(proposal, &run.cancel)?;
        }
        let mut steps = [run.step(decoder, work, engine.parts.tokenizer.as_deref())];
        loop {
            match run_pass(&mut steps).pop().unwrap_or(Ok(Done::Prompt(None))) {
                Err(Error::Memory { .. }) if steps[0].give_up_drafts() => {}
                done => return done,
            }
        }
    });
    run.take(session, done, waited)
}
