//! A constraint's state in one text: masks for the rows of a verification, and completion.

use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::refused::refused;
use crate::device::DRAFTED;
use crate::{Error, Result};

/// A grammar matcher that has consumed the committed tokens and, during a verification, the accepted drafts.
pub(crate) struct ConstraintState {
    matcher: Matcher,
    /// The matcher before the first token.
    fresh: Arc<Matcher>,
    /// The tokens that were consumed.
    text: Vec<u32>,
    looking: Looking,
    vocab_size: usize,
    /// Tokens of the round that were consumed.
    consumed: usize,
    /// If that many complete the text: nothing may follow.
    complete: Option<usize>,
    time: Duration,
}

/// Whether the matcher checks drafts, which it may not consume. Checking counts against the limits of masks.
#[derive(Clone, Copy, PartialEq)]
enum Looking {
    NotYet,
    Looked,
    /// No longer: a limit was exceeded.
    Never,
}

impl ConstraintState {
    /// The state before the first token of `fresh`, which has consumed none.
    pub fn new(fresh: Arc<Matcher>, vocab_size: usize) -> Self {
        // A copy with its own lexer: its states count against the limit of one generation.
        let matcher = fresh.deep_clone();
        let (text, looking) = (Vec::new(), Looking::NotYet);
        Self { matcher, fresh, text, looking, vocab_size, consumed: 0, complete: None, time: Duration::ZERO }
    }

    /// Whether nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.complete.is_some()
    }

    /// Time spent in this constraint.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// The forced next tokens, at most `most`.
    pub fn forced(&mut self, most: usize) -> Vec<u32> {
        self.timed(|state| {
            if state.is_complete() || most == 0 || !state.looks() {
                return Vec::new();
            }
            let mut tokens = state.matcher.compute_ff_tokens();
            tokens.truncate(most);
            tokens
        })
    }

    /// How many of the leading `tokens` are allowed: none outside the vocabulary. Tokens known only to a device are not
    /// checked.
    pub fn valid(&mut self, tokens: &[u32]) -> usize {
        if tokens.contains(&DRAFTED) {
            return tokens.len();
        }
        let outside = tokens.iter().position(|token| *token as usize >= self.vocab_size);
        let tokens = &tokens[..outside.unwrap_or(tokens.len())];
        // The next mask reports errors of the grammar.
        self.timed(|state| match state.looks() {
            true => state.matcher.validate_tokens(tokens).unwrap_or(0),
            false => tokens.len(),
        })
    }

    /// Whether drafts may be checked; if so, records that they were.
    fn looks(&mut self) -> bool {
        if self.looking == Looking::NotYet {
            self.looking = Looking::Looked;
        }
        self.looking == Looking::Looked
    }

    /// Runs `work`. If it fails after the matcher checked drafts, it runs again on a new matcher that did not.
    ///
    /// # Errors
    /// Those of `work`.
    fn without_looking<T, E: Display>(&mut self, work: impl Fn(&mut Matcher) -> Result<T, E>) -> Result<T> {
        let error = match work(&mut self.matcher) {
            Err(error) if self.looking == Looking::Looked => error,
            done => return done.map_err(refused),
        };
        self.looking = Looking::Never;
        let mut matcher = self.fresh.deep_clone();
        if matcher.consume_tokens(&self.text).is_err() {
            return Err(refused(error));
        }
        self.matcher = matcher;
        work(&mut self.matcher).map_err(refused)
    }

    /// Masks `logits` `(vocab)`, those of the token after the round's `drafts`.
    ///
    /// # Errors
    /// If a limit is exceeded, or no token is left.
    pub fn mask(&mut self, drafts: &[u32], logits: &mut [f32]) -> Result<()> {
        self.read(drafts)?;
        self.timed(|state| {
            let mask = state.without_looking(Matcher::compute_mask_or_eos)?;
            if !keep(&mask, logits) {
                let problem = "the logits processor excludes every token that it allows next";
                return Err(Error::argument("constraint", problem));
            }
            Ok(())
        })
    }

    /// Consumes the tokens of a round not yet consumed; returns whether they complete the text.
    ///
    /// # Errors
    /// If one is not allowed, or a limit is exceeded.
    pub fn read(&mut self, tokens: &[u32]) -> Result<bool> {
        self.timed(|state| {
            while state.complete.is_none() && state.consumed < tokens.len() {
                let token = tokens[state.consumed];
                state.without_looking(|matcher| matcher.consume_token(token))?;
                state.text.push(token);
                state.consumed += 1;
                state.complete = state.matcher.is_stopped().then_some(state.consumed);
            }
            Ok(state.complete.is_some_and(|complete| complete <= tokens.len()))
        })
    }

    /// Commits the round. Only a round that ends the text emits fewer tokens than were consumed, so nothing is rolled
    /// back. After an error, every later mask reports it.
    pub fn commit(&mut self) {
        self.consumed = 0;
    }

    fn timed<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let start = Instant::now();
        let result = work(self);
        self.time += start.elapsed();
        result
    }
}

/// Sets the logits of tokens not in `mask` to `-inf`; returns whether any other is above that.
fn keep(mask: &SimpleVob, logits: &mut [f32]) -> bool {
    let mut left = false;
    let words = mask.as_slice().iter().chain(std::iter::repeat(&0));
    for (word, block) in words.zip(logits.chunks_mut(u32::BITS as usize)) {
        match *word {
            0 => block.fill(f32::NEG_INFINITY),
            word => {
                for (i, logit) in block.iter_mut().enumerate() {
                    *logit = if word >> i & 1 == 1 { *logit } else { f32::NEG_INFINITY };
                    // NaN counts: the sampler reports it.
                    left |= *logit != f32::NEG_INFINITY;
                }
            }
        }
    }
    left
}
