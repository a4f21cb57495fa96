//! Distributions over tokens: draws, and the residual of speculative sampling.

use rand::Rng;

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
