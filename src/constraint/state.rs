//! A constraint along one text: masks for the rows of a verification, and where the text is complete.

use std::time::{Duration, Instant};

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;

use super::compile::refused;
use crate::device::DRAFTED;
use crate::{Error, Result};

/// A grammar that has read the committed tokens of a generation and, while a round is verified, its accepted drafts.
pub(crate) struct ConstraintState {
    matcher: Matcher,
    /// Tokens of the round that were read.
    ahead: usize,
    /// As many of them complete the text: nothing may follow.
    complete: Option<usize>,
    time: Duration,
}

impl ConstraintState {
    pub fn new(matcher: Matcher) -> Self {
        Self { matcher, ahead: 0, complete: None, time: Duration::ZERO }
    }

    /// Whether nothing may follow what was read.
    pub fn is_complete(&self) -> bool {
        self.complete.is_some()
    }

    /// Time spent here.
    pub fn time(&self) -> Duration {
        self.time
    }

    /// The tokens that must come next, at most `most`.
    pub fn forced(&mut self, most: usize) -> Vec<u32> {
        self.timed(|state| {
            let mut tokens =
                if state.is_complete() || most == 0 { Vec::new() } else { state.matcher.compute_ff_tokens() };
            tokens.truncate(most);
            tokens
        })
    }

    /// How many of the leading `tokens` may come next. Tokens that only a device knows are not judged.
    pub fn valid(&mut self, tokens: &[u32]) -> usize {
        match tokens.contains(&DRAFTED) {
            true => tokens.len(),
            // What is wrong with the grammar, the next mask reports.
            false => self.timed(|state| state.matcher.validate_tokens(tokens).unwrap_or(0)),
        }
    }

    /// Excludes from `logits` `(vocab)`, of the token behind the round's `drafts`, what may not come there.
    ///
    /// # Errors
    /// If a limit is exceeded, or nothing is left.
    pub fn mask(&mut self, drafts: &[u32], logits: &mut [f32]) -> Result<()> {
        self.read(drafts)?;
        self.timed(|state| {
            let mask = state.matcher.compute_mask_or_eos().map_err(refused)?;
            if !keep(&mask, logits) {
                let problem = "no token that it allows next may be emitted; the logits processor excludes all of them";
                return Err(Error::argument("constraint", problem));
            }
            Ok(())
        })
    }

    /// Reads the tokens of a round as far as it has not yet, and says whether they complete the text.
    ///
    /// # Errors
    /// If one may not come there, or a limit is exceeded.
    pub fn read(&mut self, tokens: &[u32]) -> Result<bool> {
        self.timed(|state| {
            while state.complete.is_none() && state.ahead < tokens.len() {
                state.matcher.consume_token(tokens[state.ahead]).map_err(refused)?;
                state.ahead += 1;
                state.complete = state.matcher.is_stopped().then_some(state.ahead);
            }
            Ok(state.complete.is_some_and(|complete| complete <= tokens.len()))
        })
    }

    /// The round is over. Only one that ends the text emits less than was read, so nothing is taken back.
    pub fn commit(&mut self) {
        self.ahead = 0;
    }

    fn timed<R>(&mut self, work: impl FnOnce(&mut Self) -> R) -> R {
        let start = Instant::now();
        let result = work(self);
        self.time += start.elapsed();
        result
    }
}

/// Sets the logits of tokens that are not in `mask` to `-inf`; whether any of the others is above that.
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
