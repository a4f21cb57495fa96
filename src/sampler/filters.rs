//! Filters: the tokens of a row that may be drawn, and their weights.

use std::cmp::Ordering;

use foretoken_kernels::{Isa, vocabulary};

use super::sampling::{Sampling, Xtc};

/// Bins of 1/16, in which `top_p` and `typical_p` add up probabilities: sorting all 262144 would
/// take longer than a forward pass of a small model.
const BINS: usize = 1024;
const BINS_PER_UNIT: f32 = 16.0;

/// Tokens of a row that may be drawn.
pub(super) struct Candidates {
    isa: Isa,
    /// Indices in the row, in any order.
    indices: Vec<u32>,
    logits: Vec<f32>,
}

impl Candidates {
    /// The `top_k` largest of `logits`, at least one of which is finite, within `top_n_sigma`.
    pub fn new(isa: Isa, sampling: &Sampling, logits: &[f32]) -> Self {
        let mut all = match sampling.top_k {
            Some(k) => {
                let mut indices = Vec::new();
                vocabulary::top_k(logits, k, &mut indices);
                let logits = indices.iter().map(|i| logits[*i as usize]).collect();
                Self { isa, indices, logits }
            }
            None => Self { isa, indices: (0..logits.len() as u32).collect(), logits: logits.to_vec() },
        };
        // The order of top-k and top-n-sigma is irrelevant: both keep the largest.
        if let Some(n) = sampling.top_n_sigma {
            let least = f64::from(all.max()) - f64::from(n) * standard_deviation(logits);
            all = all.filter(|logit| f64::from(logit) >= least);
        }
        all
    }

    /// Applies locally typical sampling, `top_p` and `min_p`, in this order, to the candidates.
    pub fn filtered(mut self, sampling: &Sampling) -> Self {
        if sampling.typical_p < 1.0 {
            self = self.typical(sampling.typical_p);
        }
        if sampling.top_p < 1.0 {
            let (max, weights) = (self.max(), self.weights_at(1.0));
            self = self.nearest(sampling.top_p, &weights, |logit| max - logit);
        }
        if sampling.min_p > 0.0 {
            let least = self.max() + sampling.min_p.ln();
            self = self.filter(|logit| logit >= least);
        }
        self
    }

    /// Indices in the row and proportional weights, above 0, at the temperature and with XTC.
    pub fn weights(self, sampling: &Sampling) -> (Vec<u32>, Vec<f64>) {
        let (indices, weights) = match sampling.xtc {
            None => {
                let weights = self.weights_at(sampling.temperature);
                (self.indices, weights)
            }
            Some(xtc) => self.with_xtc(&xtc, sampling.temperature),
        };
        match weights.contains(&0.0) {
            true => indices.into_iter().zip(weights).filter(|(_, weight)| *weight > 0.0).unzip(),
            false => (indices, weights),
        }
    }

    /// The mixture of all candidates and, with XTC's probability, those without the top choices.
    fn with_xtc(self, xtc: &Xtc, temperature: f32) -> (Vec<u32>, Vec<f64>) {
        let probable = self.weights_at(1.0);
        let least = vocabulary::sum(&probable) * f64::from(xtc.threshold);
        // A threshold of 0 is reached by every possible token, and only by those.
        let is_top = |i: &usize| probable[*i] >= least && self.logits[*i] > f32::NEG_INFINITY;
        let top: Vec<usize> = (0..self.logits.len()).filter(is_top).collect();
        let mut weights = self.weights_at(temperature);
        // All but the least probable of them are excluded; of equals, the last stays.
        let least_probable = top.iter().rev().min_by(|a, b| self.logits[**a].total_cmp(&self.logits[**b]));
        let Some(stays) = least_probable.filter(|_| top.len() > 1) else { return (self.indices, weights) };
        let mut rest = self.logits;
        top.iter().filter(|i| *i != stays).for_each(|i| rest[*i] = f32::NEG_INFINITY);
        let rest = vocabulary::softmax_weights(self.isa, &rest, vocabulary::maximum(&rest), temperature);
        let probability = f64::from(xtc.probability);
        let of_all = (1.0 - probability) / vocabulary::sum(&weights);
        let of_rest = probability / vocabulary::sum(&rest);
        weights.iter_mut().zip(rest).for_each(|(weight, rest)| *weight = of_all * *weight + of_rest * rest);
        (self.indices, weights)
    }

    /// Keeps the tokens whose surprisal is closest to the entropy until their probabilities reach `sum`.
    fn typical(self, sum: f32) -> Self {
        let max = self.max();
        let weights = self.weights_at(1.0);
        let total = vocabulary::sum(&weights);
        // The surprisal is `max + ln total - logit`, the entropy its expectation.
        let possible = weights.iter().zip(&self.logits).filter(|(weight, _)| **weight > 0.0);
        let mean = possible.map(|(weight, logit)| weight * f64::from(logit - max)).sum::<f64>() / total;
        self.nearest(sum, &weights, |logit| (f64::from(logit - max) - mean).abs() as f32)
    }

    /// Keeps the tokens with the least `distance` of their logits until their probabilities,
    /// proportional to `weights`, reach `sum`.
    fn nearest(self, sum: f32, weights: &[f64], distance: impl Fn(f32) -> f32) -> Self {
        let bin = |logit: f32| ((distance(logit) * BINS_PER_UNIT) as usize).min(BINS - 1);
        let mut bins = [0.0; BINS];
        for (logit, weight) in self.logits.iter().zip(weights) {
            bins[bin(*logit)] += weight;
        }
        let reached = vocabulary::sum(weights) * f64::from(sum);
        // Of the bin that reaches the sum, only the nearest are kept.
        let (mut before, mut last) = (0.0, 0);
        while last < BINS - 1 && before + bins[last] < reached {
            before += bins[last];
            last += 1;
        }
        let (mut kept, mut of_last) = (Vec::new(), Vec::new());
        for (i, logit) in (0u32..).zip(&self.logits) {
            match bin(*logit).cmp(&last) {
                Ordering::Less => kept.push(i),
                Ordering::Equal => of_last.push(i),
                Ordering::Greater => (),
            }
        }
        let far = |i: &u32| distance(self.logits[*i as usize]);
        of_last.sort_by(|a, b| far(a).total_cmp(&far(b)));
        for i in of_last {
            if before >= reached {
                break;
            }
            before += weights[i as usize];
            kept.push(i);
        }
        self.at(&kept)
    }

    /// Those at the positions `order`.
    fn at(&self, order: &[u32]) -> Self {
        Self {
            isa: self.isa,
            indices: order.iter().map(|i| self.indices[*i as usize]).collect(),
            logits: order.iter().map(|i| self.logits[*i as usize]).collect(),
        }
    }

    fn filter(self, keep: impl Fn(f32) -> bool) -> Self {
        let kept: Vec<u32> = (0..).zip(&self.logits).filter(|(_, logit)| keep(**logit)).map(|(i, _)| i).collect();
        self.at(&kept)
    }

    fn max(&self) -> f32 {
        vocabulary::maximum(&self.logits)
    }

    /// Weights of the candidates, the largest 1.
    fn weights_at(&self, temperature: f32) -> Vec<f64> {
        vocabulary::softmax_weights(self.isa, &self.logits, self.max(), temperature)
    }
}

/// Of the finite logits.
fn standard_deviation(logits: &[f32]) -> f64 {
    let finite = || logits.iter().filter(|logit| logit.is_finite()).map(|logit| f64::from(*logit));
    let count = finite().count().max(1) as f64;
    let mean = finite().sum::<f64>() / count;
    (finite().map(|logit| (logit - mean).powi(2)).sum::<f64>() / count).sqrt()
}
