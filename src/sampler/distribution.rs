//! Distributions over tokens: draws, and the residual of speculative sampling.

use foretoken_kernels::vocabulary;
use rand::Rng;

/// Probabilities per block of a draw: whether the drawn token is in it is decided by their sum.
const BLOCK: usize = 256;

/// A probability distribution over tokens; tokens that it does not list have probability 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Distribution {
    ids: Vec<u32>, // ascending
    probabilities: Vec<f64>,
}

impl Distribution {
    /// The one-hot distribution of `token`.
    pub fn certain(token: u32) -> Self {
        Self { ids: vec![token], probabilities: vec![1.0] }
    }

    /// Whether it has one token.
    pub fn is_certain(&self) -> bool {
        self.ids.len() == 1
    }

    /// The distribution proportional to `weights`, each token once; weights must be positive.
    pub fn new(mut weights: Vec<(u32, f64)>) -> Self {
        weights.sort_unstable_by_key(|(id, _)| *id);
        let (ids, weights) = weights.into_iter().unzip();
        Self::ascending(ids, weights)
    }

    /// The distribution proportional to the positive `weights` of `ids`, which ascend.
    pub(super) fn ascending(ids: Vec<u32>, mut weights: Vec<f64>) -> Self {
        let total = vocabulary::sum(&weights);
        weights.iter_mut().for_each(|weight| *weight /= total);
        Self { ids, probabilities: weights }
    }

    /// The probability of `token`.
    pub fn probability(&self, token: u32) -> f64 {
        self.ids.binary_search(&token).map_or(0.0, |i| self.probabilities[i])
    }

    /// Draws a token.
    pub fn sample(&self, rng: &mut impl Rng) -> u32 {
        if let [only] = self.ids[..] {
            return only;
        }
        let mut left = rng.random::<f64>();
        for (ids, probabilities) in self.ids.chunks(BLOCK).zip(self.probabilities.chunks(BLOCK)) {
            let of_block = vocabulary::sum(probabilities);
            if left >= of_block {
                left -= of_block;
                continue;
            }
            let found = ids.iter().zip(probabilities).find(|(_, probability)| {
                left -= *probability;
                left < 0.0
            });
            // Rounding: the probabilities, subtracted one by one, are slightly less than their sum.
            return found.map_or(ids[ids.len() - 1], |(id, _)| *id);
        }
        // Rounding: the probabilities sum to slightly less than 1.
        self.ids.last().copied().unwrap_or(0)
    }

    /// The residual `norm(max(0, self - draft))` (Leviathan et al. 2023, Chen et al. 2023). If it is zero everywhere,
    /// the two are equal, and `self` is returned.
    pub fn residual(&self, draft: &Distribution) -> Distribution {
        let mut drafted = draft.ids.iter().zip(&draft.probabilities).peekable();
        let (mut ids, mut weights) = (Vec::new(), Vec::new());
        for (id, probability) in self.ids.iter().zip(&self.probabilities) {
            while drafted.next_if(|(drafted, _)| *drafted < id).is_some() {}
            let left = probability - drafted.next_if(|(drafted, _)| *drafted == id).map_or(0.0, |(_, p)| *p);
            if left > 0.0 {
                ids.push(*id);
                weights.push(left);
            }
        }
        if ids.is_empty() { self.clone() } else { Distribution::ascending(ids, weights) }
    }
}
