//! A generation: an iterator over rounds.

use std::time::{Duration, Instant};

use rand::rngs::StdRng;

use crate::Result;
use crate::options::{EndOfGeneration, GenerateOptions, Stop};
use crate::sampler::Sampler;
use crate::session::{Session, Statistics};
use crate::speculative::{DraftSampling, Frontier, Speculator};
use crate::tokenizer::{StreamDecoder, Tokenizer};

/// What one round wrote.
#[derive(Clone, Debug, Default)]
pub struct Piece {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The text that they complete: whole characters, and nothing that may be the beginning of a stop string. Empty if
    /// the checkpoint has no tokenizer.
    pub text: String,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A token or string that ends the text.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The context is full.
    Context,
}

/// Yields a [`Piece`] per round. After an error, and after the end, it yields nothing more; what was yielded before
/// stands, and the session can be used again.
pub struct Generation<'s> {
    session: &'s mut Session,
    sampler: Sampler,
    rng: StdRng,
    num_drafts: usize,
    drafts: DraftSampling,
    left: usize,
    text: TextEnd,
    first: Option<Frontier>, // not handed out yet, and so not yet the session's
    finish: Option<Finish>,
    statistics: Statistics,
}

impl<'s> Generation<'s> {
    pub(crate) fn new(
        session: &'s mut Session,
        sampler: Sampler,
        rng: StdRng,
        options: &GenerateOptions,
        (block_size, drafts): (usize, DraftSampling),
        (prompt_tokens, prefill): (usize, Duration),
        first: Frontier,
    ) -> Result<Self> {
        let text = TextEnd::new(&options.stop, session.engine.end_of_generation());
        let statistics = Statistics {
            generations: 1,
            prompt_tokens,
            prefill,
            drafted_at: vec![0; block_size - 1],
            accepted_at: vec![0; block_size - 1],
            ..Statistics::default()
        };
        let finish = (options.max_tokens == 0).then_some(Finish::Length);
        let (num_drafts, left) = (block_size - 1, options.max_tokens);
        Ok(Self { session, sampler, rng, num_drafts, drafts, left, text, first: Some(first), finish, statistics })
    }

    /// Counts and times so far.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Why it ended; `None` while it goes on.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    fn round(&mut self) -> Result<Piece> {
        let engine = self.session.engine.clone();
        let tokenizer = engine.parts.tokenizer.as_ref();
        let tokens = match self.first.take() {
            Some(first) => {
                self.text.push(tokenizer, first.last)?;
                let tokens = vec![first.last];
                self.session.frontier = Some(first);
                tokens
            }
            None => {
                let Some(frontier) = self.session.frontier.as_mut() else { return Ok(Piece::default()) };
                let room = self.session.kv.max_context() - self.session.kv.len();
                // `max_tokens` is exact: a round emits at most one token more than it drafts.
                let num_drafts = self.num_drafts.min(self.left - 1).min(room.saturating_sub(1));
                let speculator = Speculator {
                    target: engine.target(),
                    assistant: engine.assistant(),
                    sampler: &self.sampler,
                    drafts: self.drafts,
                };
                let (kv, rng, text) = (&mut self.session.kv, &mut self.rng, &mut self.text);
                let ends = |token| text.push(tokenizer, token);
                let round = engine.parts.pool.install(|| speculator.round(kv, frontier, num_drafts, ends, rng))?;
                self.count(round.drafted, round.accepted);
                self.statistics.draft += round.draft_time;
                self.statistics.verify += round.verify_time;
                round.tokens
            }
        };
        self.left -= tokens.len();
        self.statistics.generated_tokens += tokens.len();
        if self.text.ended {
            self.finish = Some(Finish::Stop);
        } else if self.left == 0 {
            self.finish = Some(Finish::Length);
        } else if self.session.kv.len() == self.session.kv.max_context() {
            self.finish = Some(Finish::Context);
        }
        let text = self.text.take(tokenizer, self.finish)?;
        Ok(Piece { tokens, text })
    }

    fn count(&mut self, drafted: usize, accepted: usize) {
        let s = &mut self.statistics;
        s.rounds += 1;
        s.drafted += drafted;
        s.accepted += accepted;
        s.drafted_at[..drafted].iter_mut().for_each(|n| *n += 1);
        s.accepted_at[..accepted].iter_mut().for_each(|n| *n += 1);
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish.is_some() {
            return None;
        }
        let start = Instant::now();
        let first = self.first.is_some();
        let piece = self.round();
        if !first {
            self.statistics.decode += start.elapsed();
        }
        if piece.is_err() {
            self.finish = Some(Finish::Stop);
        }
        Some(piece)
    }
}

/// Decodes what is emitted and watches for the end.
struct TextEnd {
    stop_tokens: Vec<u32>,
    stop_strings: Vec<String>,
    decoder: StreamDecoder,
    text: String, // decoded, not handed out
    ended: bool,
}

impl TextEnd {
    fn new(stop: &Stop, end_of_generation: &[u32]) -> Self {
        let mut stop_tokens = stop.tokens.clone();
        if stop.end_of_generation == EndOfGeneration::Stops {
            stop_tokens.extend(end_of_generation);
        }
        let stop_strings = stop.strings.iter().filter(|s| !s.is_empty()).cloned().collect();
        Self { stop_tokens, stop_strings, decoder: StreamDecoder::default(), text: String::new(), ended: false }
    }

    /// Takes an emitted token; says whether the text ends with it.
    fn push(&mut self, tokenizer: Option<&Tokenizer>, token: u32) -> Result<bool> {
        if let Some(tokenizer) = tokenizer {
            self.text += &self.decoder.push(tokenizer, token)?;
        }
        let found = self.stop_strings.iter().filter_map(|stop| self.text.find(stop)).min();
        if let Some(at) = found {
            self.text.truncate(at);
            // What the decoder still holds comes after the stop string.
            self.decoder = StreamDecoder::default();
        }
        self.ended = found.is_some() || self.stop_tokens.contains(&token);
        Ok(self.ended)
    }

    /// The text that can be handed out: all at the end, else all but what may become a stop string.
    fn take(&mut self, tokenizer: Option<&Tokenizer>, finish: Option<Finish>) -> Result<String> {
        if finish.is_some() {
            if let Some(tokenizer) = tokenizer {
                self.text += &self.decoder.finish(tokenizer)?;
            }
            return Ok(std::mem::take(&mut self.text));
        }
        let begins = |at: &usize| {
            let rest = &self.text[*at..];
            self.stop_strings.iter().any(|stop| stop.starts_with(rest))
        };
        let keep = (0..self.text.len()).filter(|at| self.text.is_char_boundary(*at)).find(begins);
        let rest = self.text.split_off(keep.unwrap_or(self.text.len()));
        Ok(std::mem::replace(&mut self.text, rest))
    }
}
