//! From logits to a distribution over tokens, and draws from it.

use foretoken_kernels::vocabulary;
use rand::Rng;

use crate::{Error, Result};

/// How the next token is chosen. The filters apply in the order of the fields, as in transformers; the default is greedy.
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
    fn check(&self) -> Result<()> {
        let refuse = |what: &str| Err(Error::Input(what.to_owned()));
        match self {
            s if !(s.temperature >= 0.0 && s.temperature.is_finite()) => refuse("the temperature must be 0 or more"),
            s if s.top_k == Some(0) => refuse("top-k must be at least 1; leave it out to keep all tokens"),
            s if !(s.top_p > 0.0 && s.top_p <= 1.0) => refuse("top-p must be above 0 and at most 1"),
            s if !(0.0..=1.0).contains(&s.min_p) => refuse("min-p must be from 0 to 1"),
            _ => Ok(()),
        }
    }
}

/// Logits that are compared with the largest before them at once.
const SCANNED: usize = 1024;

/// A [`Sampling`] with the tokens that a checkpoint never emits.
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

    /// Whether the most probable token is taken.
    pub(crate) fn is_greedy(&self) -> bool {
        self.sampling.temperature == 0.0
    }

    /// The most probable token that may be emitted, the lowest id among equals. `ids[i]` is the token of `logits[i]`;
    /// without ids, token `i` is.
    ///
    /// # Errors
    /// If a logit is not a number, or none of a token that may be emitted is finite.
    pub fn most_probable(&self, ids: Option<&[u32]>, logits: &[f32]) -> Result<u32> {
        let mut best: Option<(f32, u32)> = None;
        for (block, first) in logits.chunks(SCANNED).zip((0..).step_by(SCANNED)) {
            // Without a branch per logit: nearly all of a vocabulary's blocks are passed over here.
            let max = best.map_or(f32::NEG_INFINITY, |(max, _)| max);
            if !block.iter().fold(false, |found, logit| found | (*logit >= max) | logit.is_nan()) {
                continue;
            }
            for (logit, i) in block.iter().zip(first..) {
                let id = ids.map_or(i as u32, |ids| ids[i]);
                let better = best.is_none_or(|(max, of)| *logit > max || (*logit == max && id < of));
                if logit.is_nan() {
                    return Err(not_numbers(*logit));
                }
                if better && *logit > f32::NEG_INFINITY && !self.suppressed.contains(&id) {
                    best = Some((*logit, id));
                }
            }
        }
        match best {
            Some((max, id)) if max.is_finite() => Ok(id),
            Some((max, _)) => Err(not_numbers(max)),
            None => Err(not_numbers(f32::NEG_INFINITY)),
        }
    }

    /// The distribution that `logits` give. `ids[i]` is the token of `logits[i]`; without ids, token `i` is.
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
        let mut kept: Vec<u32> = Vec::new();
        vocabulary::top_k(logits, self.sampling.top_k.unwrap_or(logits.len()), &mut kept);
        let mut weights: Vec<f64> = kept.iter().map(|i| weight(*i)).collect(); // largest first
        if self.sampling.top_p < 1.0 {
            let mut left = weights.iter().sum::<f64>() * f64::from(self.sampling.top_p);
            let reached = weights.iter().position(|weight| {
                left -= weight;
                left <= 0.0
            });
            weights.truncate(reached.map_or(weights.len(), |last| last + 1));
        }
        // The largest weight is e^0 = 1, so a weight is its own ratio to it. Zero weights (suppressed tokens) go too.
        let kept_by_min_p = weights.iter().take_while(|w| **w > 0.0 && **w >= f64::from(self.sampling.min_p)).count();
        weights.truncate(kept_by_min_p.max(1));
        Ok(Distribution::new(kept.into_iter().map(id).zip(weights).collect()))
    }
}

fn not_numbers(largest: f32) -> Error {
    Error::Input(format!("the logits are no finite numbers (largest {largest}); the checkpoint is damaged"))
}

/// A probability distribution over tokens; tokens that it does not list have probability 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    entries: Vec<(u32, f64)>, // ascending ids; probabilities sum to 1
}

impl Distribution {
    /// The distribution in which `token` is certain.
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
        // Rounding left a sliver beyond the last entry.
        self.entries.last().map_or(0, |(id, _)| *id)
    }

    /// What is left of this distribution after `draft` had its chance: proportional to `max(self - draft, 0)`
    /// (Leviathan et al. 2023, Chen et al. 2023). Where nothing is left the two are equal, and so is the result.
    pub fn beyond(&self, draft: &Distribution) -> Distribution {
        let left = |(id, p): &(u32, f64)| Some((*id, p - draft.probability(*id))).filter(|(_, left)| *left > 0.0);
        let left: Vec<_> = self.entries.iter().filter_map(left).collect();
        if left.is_empty() { self.clone() } else { Distribution::new(left) }
    }
}
