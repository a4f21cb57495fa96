//! A constraint's state in one text: masks for the rows of a verification, and completion.

use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::errors::refused;
use crate::device::DRAFTED;
use crate::{Error, Result};

/// Minimum tokens from one copy of the matcher to the next: a copy is up to the lexer's states in size.
const TOKENS_PER_COPY: usize = 64;

/// The state after the committed tokens and, during a verification, the accepted drafts.
pub(crate) struct ConstraintState {
    /// Consumes the text and computes its masks, nothing else: which limits it exceeds does not depend on drafts.
    matcher: Matcher,
    /// A copy that consumes the text as well. It checks drafts, which it may not consume and which count against its
    /// limits; dropped when it exceeds one.
    checker: Option<Matcher>,
    /// Consumed tokens from which on the next copy may be made; the first mask has set its limits by then.
    next_copy: usize,
    vocab_size: usize,
    /// Tokens consumed.
    len: usize,
    /// Those of the round.
    consumed: usize,
    /// Number of the round's tokens that complete the text, after which nothing may follow; `None` until then.
    complete: Option<usize>,
    time: Duration,
}

impl ConstraintState {
    /// The state before the first token of `fresh`, which has consumed none.
    pub fn new(fresh: &Matcher, vocab_size: usize) -> Self {
        // A copy with its own lexer: its states count against the limit of one generation.
        let matcher = fresh.deep_clone();
        let (checker, next_copy, time) = (None, 1, Duration::ZERO);
        Self { matcher, checker, next_copy, vocab_size, len: 0, consumed: 0, complete: None, time }
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
            if state.is_complete() || most == 0 {
                return Vec::new();
            }
            let mut tokens = state.checker().map_or_else(Vec::new, Matcher::compute_ff_tokens);
            tokens.truncate(most);
            tokens
        })
    }

    /// How many of the leading `tokens` are allowed: none outside the vocabulary. Tokens known only to a device are not
    /// checked, and none are after checking exceeded a limit; the check that exceeds it may reject allowed tokens.
    pub fn valid(&mut self, tokens: &[u32]) -> usize {
        if tokens.contains(&DRAFTED) {
            return tokens.len();
        }
        let outside = tokens.iter().position(|token| *token as usize >= self.vocab_size);
        let tokens = &tokens[..outside.unwrap_or(tokens.len())];
        self.timed(|state| match state.checker().map(|checker| checker.validate_tokens(tokens)) {
            Some(Ok(valid)) => valid,
            Some(Err(_)) | None => tokens.len(),
        })
    }

    /// The matcher that checks drafts.
    fn checker(&mut self) -> Option<&mut Matcher> {
        if self.checker.is_none() && self.len >= self.next_copy {
            self.checker = Some(self.matcher.deep_clone());
            self.next_copy = self.len + TOKENS_PER_COPY;
        }
        self.checker.as_mut()
    }

    /// Masks `logits` `(vocab)`, those of the token after the round's `drafts`.
    ///
    /// # Errors
    /// If a limit is exceeded, or no token is left.
    pub fn mask(&mut self, drafts: &[u32], logits: &mut [f32]) -> Result<()> {
        self.read(drafts)?;
        self.timed(|state| {
            let mask = state.matcher.compute_mask_or_eos().map_err(refused)?;
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
                state.matcher.consume_token(token).map_err(refused)?;
                state.checker.take_if(|checker| checker.consume_token(token).is_err());
                (state.len, state.consumed) = (state.len + 1, state.consumed + 1);
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
