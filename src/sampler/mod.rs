//! Sampling: logits to a token distribution, and draws from it.

mod distribution;
mod dry;
mod filters;
mod logprobs;
mod penalties;
mod processor;
mod sampling;

use std::borrow::Cow;

use foretoken_kernels::Isa;

pub use distribution::Distribution;
pub use dry::{Breakers, Dry};
pub use logprobs::TokenLogprobs;
pub use penalties::Penalties;
pub use processor::{LogitBias, LogitsProcessor};
pub use sampling::{Sampling, Xtc};

use filters::Candidates;

use crate::{Error, Result};

/// Logits per block of the argmax.
const ARGMAX_BLOCK: usize = 1024;

/// [`Sampling`] plus the checkpoint's suppressed tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    suppressed: Vec<u32>,
    isa: Isa,
}

impl Sampler {
    /// # Errors
    /// If a parameter is out of its range.
    pub fn new(isa: Isa, sampling: Sampling, suppressed: Vec<u32>) -> Result<Self> {
        sampling.check()?;
        Ok(Self { sampling, suppressed, isa })
    }

    /// The instruction set that it computes with.
    pub(crate) fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether the token is the argmax of the unmodified logits.
    pub(crate) fn is_plain_greedy(&self) -> bool {
        self.is_greedy() && self.history() == 0
    }

    /// Whether the most probable token is taken.
    pub(crate) fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// The number of largest logits that a distribution depends on, with those equal to the least;
    /// `None` if it depends on all.
    pub(crate) fn largest_logits(&self) -> Option<usize> {
        self.sampling.top_k.filter(|_| self.sampling.top_n_sigma.is_none() && self.history() == 0)
    }

    /// Number of last tokens that [`Sampler::penalize`] reads; `usize::MAX` for all.
    pub(crate) fn history(&self) -> usize {
        let dry = self.sampling.dry.as_ref().map_or(0, Dry::history);
        self.sampling.penalties.history().max(dry)
    }

    /// Applies the penalties and DRY to `logits` `(vocab)` of the token after `tokens`. Not for logits over
    /// other vocabularies, such as a drafter's head.
    ///
    /// # Errors
    /// None; the signature matches a processor's.
    pub fn penalize(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        self.sampling.penalties.process(tokens, logits)?;
        self.sampling.dry.iter().try_for_each(|dry| dry.process(tokens, logits))
    }

    /// The most probable allowed token, the lowest id among equals. `ids[i]` is the token of
    /// `logits[i]`; without ids, token `i` is.
    ///
    /// # Errors
    /// If a logit is NaN, or no allowed token's logit is finite.
    pub fn most_probable(&self, ids: Option<&[u32]>, logits: &[f32]) -> Result<u32> {
        let mut best: Option<(f32, u32)> = None;
        for (block, first) in logits.chunks(ARGMAX_BLOCK).zip((0..).step_by(ARGMAX_BLOCK)) {
            // Block maximum first, without a branch per logit: nearly all blocks are skipped here.
            let max = best.map_or(f32::NEG_INFINITY, |(max, _)| max);
            if !block.iter().fold(false, |found, logit| found | (*logit >= max) | logit.is_nan()) {
                continue;
            }
            for (logit, i) in block.iter().zip(first..) {
                let id = ids.map_or(i as u32, |ids| ids[i]);
                let better = best.is_none_or(|(max, of)| *logit > max || (*logit == max && id < of));
                if logit.is_nan() {
                    return Err(Error::logits(*logit));
                }
                if better && *logit > f32::NEG_INFINITY && !self.suppressed.contains(&id) {
                    best = Some((*logit, id));
                }
            }
        }
        let (max, id) = best.unwrap_or((f32::NEG_INFINITY, 0));
        if max.is_finite() { Ok(id) } else { Err(Error::logits(max)) }
    }

    /// The distribution of `logits` under the filters and the temperature. `ids[i]` is the token of
    /// `logits[i]`; without ids, token `i` is.
    ///
    /// # Errors
    /// As [`Sampler::most_probable`].
    pub fn distribution(&self, ids: Option<&[u32]>, logits: &[f32]) -> Result<Distribution> {
        let best = self.most_probable(ids, logits)?;
        if self.is_greedy() {
            return Ok(Distribution::certain(best));
        }
        let candidates = Candidates::new(self.isa, &self.sampling, &self.allowed(ids, logits));
        let (mut tokens, weights) = candidates.filtered(&self.sampling).weights(&self.sampling);
        if let Some(ids) = ids {
            tokens.iter_mut().for_each(|i| *i = ids[*i as usize]);
        }
        Ok(match tokens.is_sorted() {
            true => Distribution::ascending(tokens, weights),
            false => Distribution::new(tokens.into_iter().zip(weights).collect()),
        })
    }

    /// The logits, `-inf` for suppressed tokens.
    fn allowed<'a>(&self, ids: Option<&[u32]>, logits: &'a [f32]) -> Cow<'a, [f32]> {
        let mut logits = Cow::Borrowed(logits);
        for token in &self.suppressed {
            let at = ids.map_or(Some(*token as usize), |ids| ids.iter().position(|id| id == token));
            if let Some(at) = at.filter(|at| *at < logits.len()) {
                logits.to_mut()[at] = f32::NEG_INFINITY;
            }
        }
        logits
    }
}
