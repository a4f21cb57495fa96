//! Sampling: logits to a token distribution, and draws from it.

use foretoken_kernels::vocabulary;
use rand::Rng;

use crate::{Error, Result};

/// Sampling parameters. Filters apply in field order, as in transformers. Default: greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 takes the most probable token.
    pub temperature: f32,
    /// Keeps the `k` most probable tokens; `None` keeps all.
    pub top_k: Option<usize>,
    /// Keeps the most probable tokens until their probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this probable relative to the most probable; 0 keeps all.
    pub min_p: f32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: None, top_p: 1.0, min_p: 0.0 }
    }
}

impl Sampling {
    /// # Errors
    /// If a parameter is out of its range.
    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |name, range: &str| Err(Error::argument(name, range));
        match self {
            s if !(s.temperature >= 0.0 && s.temperature.is_finite()) => refuse("temperature", "must be 0 or more"),
            s if s.top_k == Some(0) => refuse("top_k", "must be at least 1; leave it out to keep all tokens"),
            s if !(s.top_p > 0.0 && s.top_p <= 1.0) => refuse("top_p", "must be above 0 and at most 1"),
            s if !(0.0..=1.0).contains(&s.min_p) => refuse("min_p", "must be from 0 to 1"),
            _ => Ok(()),
        }
    }
}

/// Logits per block of the argmax.
const SCANNED: usize = 1024;

/// [`Sampling`] plus the checkpoint's suppressed tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    suppressed: Vec<u32>,
}

impl Sampler {
    /// # Errors
    /// If a parameter is out of its range.
    pub fn new(sampling: Sampling, suppressed: Vec<u32>) -> Result<Self> {
        sampling.check()?;
        Ok(Self { sampling, suppressed })
    }

    /// Whether sampling is greedy.
    pub(crate) fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// The most probable token that may be emitted, the lowest id among equals. `ids[i]` is the token of `logits[i]`;
    /// without ids, token `i` is.
    ///
    /// # Errors
    /// If a logit is NaN, or no allowed token's logit is finite.
    pub fn most_probable(&self, ids: Option<&[u32]>, logits: &[f32]) -> Result<u32> {
        let mut best: Option<(f32, u32)> = None;
        for (block, first) in logits.chunks(SCANNED).zip((0..).step_by(SCANNED)) {
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
        match best {
            Some((max, id)) if max.is_finite() => Ok(id),
            Some((max, _)) => Err(Error::logits(max)),
            None => Err(Error::logits(f32::NEG_INFINITY)),
        }
    }

    /// The distribution of `logits`. `ids[i]` is the token of `logits[i]`; without ids, token `i` is.
    ///
    /// # Errors
    /// As [`Sampler::most_probable`].
    pub fn distribution(&self, ids: Option<&[u32]>, logits: &[f32]) -> Result<Distribution> {
        let best = self.most_probable(ids, logits)?;
        if self.sampling.temperature == 0.0 {
            return Ok(Distribution::certain(best));
        }
        let id = |i: u32| ids.map_or(i, |ids| ids[i as usize]);
        let allowed: Vec<f32>;
        let logits = if self.suppressed.is_empty() {
            logits
        } else {
            let mask = |(i, logit): (usize, &f32)| match self.suppressed.contains(&id(i as u32)) {
                true => f32::NEG_INFINITY,
                false => *logit,
            };
            allowed = logits.iter().enumerate().map(mask).collect();
            &allowed
        };
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |i: u32| f64::from((logits[i as usize] - max) / self.sampling.temperature).exp();
        let mut candidates: Vec<u32> = Vec::new();
        vocabulary::top_k(logits, self.sampling.top_k.unwrap_or(logits.len()), &mut candidates);
        let mut weights: Vec<f64> = candidates.iter().map(|i| weight(*i)).collect(); // largest first
        if self.sampling.top_p < 1.0 {
            let mut left = weights.iter().sum::<f64>() * f64::from(self.sampling.top_p);
            let reached = weights.iter().position(|weight| {
                left -= weight;
                left <= 0.0
            });
            weights.truncate(reached.map_or(weights.len(), |last| last + 1));
        }
        // The largest weight is e^0 = 1, so `min_p` compares weights directly. Zero weights (suppressed tokens) are
        // removed.
        let min_p_count = weights.iter().take_while(|w| **w > 0.0 && **w >= f64::from(self.sampling.min_p)).count();
        weights.truncate(min_p_count.max(1));
        Ok(Distribution::new(candidates.into_iter().map(id).zip(weights).collect()))
    }
}

/// A probability distribution over tokens; tokens that it does not list have probability 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    entries: Vec<(u32, f64)>, // ascending ids; probabilities sum to 1
}

impl Distribution {
    /// The one-hot distribution of `token`.
    pub fn certain(token: u32) -> Self {
        Self { entries: vec![(token, 1.0)] }
    }

    /// The distribution proportional to `weights`, each token once; weights must be positive.
    pub fn new(mut weights: Vec<(u32, f64)>) -> Self {
        let total: f64 = weights.iter().map(|(_, weight)| weight).sum();
        weights.iter_mut().for_each(|(_, weight)| *weight /= total);
        weights.sort_unstable_by_key(|(id, _)| *id);
        Self { entries: weights }
    }

    /// The probability of `token`.
    pub fn probability(&self, token: u32) -> f64 {
        self.entries.binary_search_by_key(&token, |(id, _)| *id).map_or(0.0, |i| self.entries[i].1)
    }

    /// Draws a token.
    pub fn sample(&self, rng: &mut impl Rng) -> u32 {
        if let [(only, _)] = self.entries[..] {
            return only;
        }
        let mut left = rng.random::<f64>();
        for (id, probability) in &self.entries {
            left -= probability;
            if left < 0.0 {
                return *id;
            }
        }
        // Rounding: the probabilities sum to slightly less than 1.
        self.entries.last().map_or(0, |(id, _)| *id)
    }

    /// The residual `norm(max(0, self - draft))` (Leviathan et al. 2023, Chen et al. 2023). If it is zero everywhere,
    /// the two are equal, and `self` is returned.
    pub fn residual(&self, draft: &Distribution) -> Distribution {
        let left = |(id, p): &(u32, f64)| Some((*id, p - draft.probability(*id))).filter(|(_, left)| *left > 0.0);
        let left: Vec<_> = self.entries.iter().filter_map(left).collect();
        if left.is_empty() { self.clone() } else { Distribution::new(left) }
    }
}

/// Modifies logits before sampling: a mask, a bias, a penalty.
///
/// It is called for every verified row in order, up to the first rejected draft, so that its effect on the text is the
/// same with and without speculation.
pub trait LogitsProcessor: std::fmt::Debug + Send + Sync {
    /// Modifies `logits` `(vocab)` of the token after `tokens`: prompt, text, and accepted drafts.
    /// `-inf` excludes a token.
    ///
    /// # Errors
    /// The implementation's; they end the generation.
    fn process(&self, tokens: &[u32], logits: &mut [f32]) -> Result<()>;
}

/// Log-probabilities under the target's own distribution: of its logits at temperature 1, before any
/// [`LogitsProcessor`] and filter.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The emitted token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// The most probable tokens and theirs, the most probable first.
    pub top: Vec<(u32, f32)>,
}

impl TokenLogprobs {
    /// Log-probabilities of `token` and of the `top` most probable tokens, from a row of logits.
    pub(crate) fn of(logits: &[f32], token: u32, top: usize) -> Self {
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
        let logprob = |id: u32| (f64::from(logits[id as usize]) - max - sum.ln()) as f32;
        let mut best = Vec::new();
        vocabulary::top_k(logits, top, &mut best);
        Self { token, logprob: logprob(token), top: best.into_iter().map(|id| (id, logprob(id))).collect() }
    }
}
