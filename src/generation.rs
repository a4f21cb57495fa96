//! A generation: an iterator over rounds.

use std::panic::resume_unwind;
use std::time::Instant;

use rand::rngs::StdRng;

use crate::Result;
use crate::engine::Engine;
use crate::options::{EndOfGeneration, GenerateOptions, Stop};
use crate::session::{Desk, Session, Statistics};
use crate::speculative::{Cancel, Frontier, Path, Tracer};
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
    rng: StdRng,
    ahead: bool,
    left: usize,
    text: TextEnd,
    first: Option<Frontier>, // not handed out yet, and so not yet the session's
    finish: Option<Finish>,
    statistics: Statistics,
    tracer: Option<Tracer>,
}

/// What a generation starts from.
pub(crate) struct Request<'a> {
    pub rng: StdRng,
    pub options: &'a GenerateOptions,
    /// Whether drafts are made while the caller is busy.
    pub ahead: bool,
    pub tracer: Option<Tracer>,
    pub first: Frontier,
    pub statistics: Statistics,
}

impl<'s> Generation<'s> {
    pub(crate) fn new(session: &'s mut Session, request: Request<'_>) -> Self {
        let Request { rng, options, ahead, tracer, first, statistics } = request;
        let text = TextEnd::new(&options.stop, session.engine.end_of_generation());
        let (left, finish) = (options.max_tokens, (options.max_tokens == 0).then_some(Finish::Length));
        Self { session, rng, ahead, left, text, first: Some(first), finish, statistics, tracer }
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
                if let Some(tracer) = &mut self.tracer {
                    tracer.first(tokenizer, first.last);
                }
                let tokens = vec![first.last];
                let begin = self.session.speculator().0.begin(first);
                self.statistics.speculation.begin += begin;
                tokens
            }
            None => self.next_tokens(&engine)?,
        };
        self.left -= tokens.len();
        self.statistics.generated_tokens += tokens.len();
        let left = self.left;
        let (speculator, _) = self.session.speculator();
        let room = speculator.kv.max_context() - speculator.kv.len();
        if self.text.ended {
            self.finish = Some(Finish::Stop);
        } else if left == 0 {
            self.finish = Some(Finish::Length);
        } else if room == 0 {
            self.finish = Some(Finish::Context);
        }
        if self.finish.is_some() {
            self.learn();
        } else if self.ahead {
            self.session.submit(most_rows(left, room));
        }
        let text = self.text.take(tokenizer, self.finish)?;
        Ok(Piece { tokens, text })
    }

    /// One round of the target.
    fn next_tokens(&mut self, engine: &Engine) -> Result<Vec<u32>> {
        let tokenizer = engine.parts.tokenizer.as_ref();
        let start = Instant::now();
        let (speculator, drafted) = self.session.speculator();
        let wait = start.elapsed();
        let room = speculator.kv.max_context() - speculator.kv.len();
        let (rng, text) = (&mut self.rng, &mut self.text);
        let path = if drafted.is_some() { Path::Lazy } else { Path::Sync };
        let drafted = drafted.map(|result| result.unwrap_or_else(|panic| resume_unwind(panic))).transpose()?;
        let round = engine.parts.pool.install(|| {
            let proposal = match drafted {
                Some(proposal) => proposal,
                None => speculator.propose(most_rows(self.left, room), &Cancel::default())?,
            };
            speculator.verify(proposal, |token| text.push(tokenizer, token), rng)
        })?;
        let Some(round) = round else { return Ok(Vec::new()) };
        let wait = if path == Path::Sync { round.draft_time } else { wait };
        self.statistics.count(&round, wait);
        if let Some(tracer) = &mut self.tracer {
            tracer.round(tokenizer, &round, path, wait);
        }
        Ok(round.tokens)
    }

    /// Hands what was learnt about costs to the engine, and to the statistics.
    fn learn(&mut self) {
        let (speculator, drafted) = self.session.speculator();
        let context = speculator.kv.len();
        let (costs, chooses) = (speculator.costs().clone(), speculator.chooses());
        if let Some(Ok(Ok(drafted))) = &drafted {
            self.statistics.speculation.cancelled += 1;
            if let Some(tracer) = &self.tracer {
                tracer.cancelled(drafted.drafted());
            }
        }
        self.statistics.speculation.estimate(&costs, context);
        if chooses {
            *self.session.engine.parts.costs.lock() = costs;
        }
    }
}

/// Rows that a round may have: it emits at most as many tokens, and `max_tokens` is exact.
fn most_rows(left: usize, room: usize) -> usize {
    left.min(room).max(1)
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

impl Drop for Generation<'_> {
    /// Cancels a draft that is under way, and waits until the cache is back.
    fn drop(&mut self) {
        if let Desk::Away(pending) = &self.session.desk {
            pending.cancel();
        }
        if self.finish.is_none() {
            self.learn();
        }
        if let Some(tracer) = &self.tracer {
            tracer.end(match self.finish {
                Some(Finish::Stop) => "stop",
                Some(Finish::Length) => "length",
                Some(Finish::Context) => "context",
                None => "dropped",
            });
        }
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
