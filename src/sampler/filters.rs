//! Filters: the tokens of a row that may be drawn, and their weights.

use foretoken_kernels::vocabulary;

use super::sampling::{Sampling, Xtc};

/// Tokens of a row that may be drawn, the largest logit first.
pub(super) struct Candidates(Vec<Candidate>);

struct Candidate {
    /// Index in the row.
    i: u32,
    logit: f32,
    /// `e^(logit - the row's largest)`: proportional to the probability at temperature 1.
    weight: f64,
}

impl Candidates {
    /// The `top_k` largest of `logits`, at least one of which is finite.
    pub fn new(sampling: &Sampling, logits: &[f32]) -> Self {
        let mut largest: Vec<u32> = Vec::new();
        vocabulary::top_k(logits, sampling.top_k.unwrap_or(logits.len()), &mut largest);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let candidate = |i: u32| {
            let logit = logits[i as usize];
            Candidate { i, logit, weight: f64::from(logit - max).exp() }
        };
        let mut candidates: Vec<_> = largest.into_iter().map(candidate).collect();
        // The order of top-k and top-n-sigma is irrelevant: both keep the largest.
        if let Some(n) = sampling.top_n_sigma {
            let least = f64::from(max) - f64::from(n) * standard_deviation(logits);
            candidates.retain(|candidate| f64::from(candidate.logit) >= least);
        }
        Self(candidates)
    }

    /// Applies locally typical sampling, `top_p` and `min_p`, in this order, to the candidates.
    pub fn filtered(mut self, sampling: &Sampling) -> Self {
        if sampling.typical_p < 1.0 {
            self.keep_typical(sampling.typical_p.into());
        }
        if sampling.top_p < 1.0 {
            let mut left = self.total() * f64::from(sampling.top_p);
            let reached = self.0.iter().position(|candidate| {
                left -= candidate.weight;
                left <= 0.0
            });
            self.0.truncate(reached.map_or(self.0.len(), |last| last + 1));
        }
        let least = self.0.first().map_or(0.0, |most| most.weight * f64::from(sampling.min_p));
        self.0.retain(|candidate| candidate.logit > f32::NEG_INFINITY && candidate.weight >= least);
        self
    }

    /// Probabilities or proportional weights, above 0, by index in the row: at the temperature, and with XTC.
    pub fn weights(&self, sampling: &Sampling) -> Vec<(u32, f64)> {
        let mut weights = at_temperature(&self.0, sampling.temperature);
        if let Some(xtc) = sampling.xtc {
            let excluded = self.top_choices(&xtc);
            let mut rest = vec![(0, 0.0); excluded];
            rest.extend(at_temperature(&self.0[excluded..], sampling.temperature));
            // The mixture: with that probability, the top choices are excluded.
            let total = |weights: &[(u32, f64)]| weights.iter().map(|(_, weight)| weight).sum::<f64>();
            let (of_all, of_rest, probability) = (total(&weights), total(&rest), f64::from(xtc.probability));
            for ((_, weight), (_, rest)) in weights.iter_mut().zip(rest) {
                *weight = (1.0 - probability) * *weight / of_all + probability * rest / of_rest;
            }
        }
        weights.retain(|(_, weight)| *weight > 0.0);
        weights
    }

    /// Number of excluded top choices: all but the least probable token at or above the threshold.
    fn top_choices(&self, xtc: &Xtc) -> usize {
        let least = self.total() * f64::from(xtc.threshold);
        self.0.iter().take_while(|candidate| candidate.weight >= least).count().saturating_sub(1)
    }

    fn total(&self) -> f64 {
        self.0.iter().map(|candidate| candidate.weight).sum()
    }

    /// Keeps the tokens whose surprise is closest to the entropy until their probabilities exceed `sum`.
    fn keep_typical(&mut self, sum: f64) {
        self.0.retain(|candidate| candidate.weight > 0.0);
        let total = self.total();
        let surprise = |candidate: &Candidate| -(candidate.weight / total).ln();
        let entropy: f64 = self.0.iter().map(|candidate| candidate.weight / total * surprise(candidate)).sum();
        let distance = |candidate: &Candidate| (surprise(candidate) - entropy).abs();
        self.0.sort_by(|a, b| distance(a).total_cmp(&distance(b)));
        let mut left = sum * total;
        let exceeded = self.0.iter().position(|candidate| {
            left -= candidate.weight;
            left < 0.0
        });
        self.0.truncate(exceeded.map_or(self.0.len(), |last| last + 1));
        self.0.sort_by(|a, b| b.logit.total_cmp(&a.logit).then(a.i.cmp(&b.i)));
    }
}

/// Weights at a temperature, the largest 1.
fn at_temperature(candidates: &[Candidate], temperature: f32) -> Vec<(u32, f64)> {
    let max = candidates.first().map_or(0.0, |candidate| candidate.logit);
    let weight = |candidate: &Candidate| (candidate.i, f64::from((candidate.logit - max) / temperature).exp());
    candidates.iter().map(weight).collect()
}

/// Of the finite logits.
fn standard_deviation(logits: &[f32]) -> f64 {
    let finite = || logits.iter().filter(|logit| logit.is_finite()).map(|logit| f64::from(*logit));
    let count = finite().count().max(1) as f64;
    let mean = finite().sum::<f64>() / count;
    (finite().map(|logit| (logit - mean).powi(2)).sum::<f64>() / count).sqrt()
}
