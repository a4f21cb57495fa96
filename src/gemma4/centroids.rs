//! The centroid head: tokens are grouped by centroid, and only the groups of the best centroids are scored.

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::{Isa, vocabulary};

use super::config::{AssistantConfig, CentroidConfig};
use crate::Result;
use crate::checkpoint::{Loader, token_ordering};
use crate::nn::{F32View, Input, Linear, Weight, multiply};

/// `masked_embedding` of an assistant: `num_centroids` groups of equally many tokens.
pub(super) struct CentroidHead {
    pub(super) centroids: Linear,        // (num_centroids, hidden)
    pub(super) token_ordering: Vec<u32>, // (num_centroids, tokens per centroid): the ids under each centroid
    pub(super) table: Weight,            // (num_centroids, tokens per centroid, hidden): their rows of the embedding
    pub(super) top_k: usize,
    isa: Isa,
}

impl CentroidHead {
    pub(super) fn load(loader: &mut Loader, config: &AssistantConfig, centroids: &CentroidConfig) -> Result<Self> {
        let (count, vocab, hidden) = (centroids.num_centroids, config.text.vocab_size, config.text.hidden_size);
        let token_ordering = ordering(loader, vocab)?;
        Ok(Self {
            centroids: loader.linear("masked_embedding.centroids.weight", count, hidden)?,
            // Rows in centroid order, so that a group is contiguous.
            table: loader.reordered("model.embed_tokens.weight", [count, vocab / count, hidden], &token_ordering)?,
            token_ordering,
            top_k: centroids.top_k,
            isa: loader.isa(),
        })
    }

    /// The ids that are scored for state `n` `(1, hidden)`, and their scores: `embedding[id] . n` for the ids under the
    /// `top_k` centroids with the largest dot product. No row over the whole vocabulary is computed.
    pub(super) fn forward(&self, n: &Tensor) -> Result<(Vec<u32>, Vec<f32>)> {
        let ranks = self.centroids.forward(n)?;
        let mut best = Vec::new();
        vocabulary::top_k(&F32View::new(&ranks)?, self.top_k, &mut best);
        let group = self.table.outputs();
        let ids = |centroid: &u32| &self.token_ordering[*centroid as usize * group..(*centroid as usize + 1) * group];
        let n = F32View::new(n)?;
        let input = Input::new(&n, 1);
        let jobs: Vec<_> = best.iter().map(|centroid| (self.table.matrix(*centroid as usize), &input)).collect();
        Ok((best.iter().flat_map(ids).copied().collect(), multiply(self.isa, &jobs).concat()))
    }
}

/// The ids in centroid order.
fn ordering(loader: &mut Loader, vocab_size: usize) -> Result<Vec<u32>> {
    let name = "masked_embedding.token_ordering";
    let tensor = loader.tensor(name, &[vocab_size])?;
    token_ordering(&tensor).map_err(|problem| loader.error(name, problem))
}
