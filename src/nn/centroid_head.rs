//! The centroid head: tokens are grouped by centroid, and only the groups of the best centroids are scored.

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::{Isa, vocabulary};

use super::{F32View, Input, Job, Linear, Weight, multiply, tensor};
use crate::Result;

/// Scores of an output head.
#[derive(Clone, Debug)]
pub struct Scores {
    /// The scored ids; `None` means all, in order.
    pub ids: Option<Vec<u32>>,
    /// `(1, scored)`: their logits.
    pub logits: Tensor,
}

/// A head over `num_centroids` equally sized groups of tokens.
pub struct CentroidHead {
    /// `(num_centroids, hidden)`.
    pub centroids: Linear,
    /// The ids under each centroid: `(num_centroids, tokens per centroid)`.
    pub token_ordering: Vec<u32>,
    /// Their rows of the embedding: `(num_centroids, tokens per centroid, hidden)`.
    pub table: Weight,
    /// Centroids whose groups are scored.
    pub top_k: usize,
    isa: Isa,
}

impl CentroidHead {
    /// A head computed with `isa`.
    pub fn new(centroids: Linear, token_ordering: Vec<u32>, table: Weight, top_k: usize, isa: Isa) -> Self {
        Self { centroids, token_ordering, table, top_k, isa }
    }

    /// Scores `embedding[id] . n`, for every row of `n` `(rows, hidden)`, of the ids under the `top_k` centroids with
    /// the row's largest dot products. No row over the whole vocabulary is computed.
    ///
    /// # Errors
    /// Candle's, if the shape does not fit.
    pub fn forward(&self, n: &Tensor) -> Result<Vec<Scores>> {
        let ranks = self.centroids.forward(n)?;
        let (ranks, states) = (F32View::new(&ranks)?, F32View::new(n)?);
        let best = ranks.chunks_exact(self.centroids.weight().outputs()).map(|ranks| {
            let mut best = Vec::new();
            vocabulary::top_k(ranks, self.top_k, &mut best);
            best
        });
        let best: Vec<Vec<u32>> = best.collect();
        let inputs: Vec<_> = states.chunks_exact(n.dim(1)?).map(|state| Input::new(state, (1, state.len()))).collect();
        let group = self.table.outputs();
        let ids = |centroid: &u32| &self.token_ordering[*centroid as usize * group..(*centroid as usize + 1) * group];
        let groups = best.iter().zip(&inputs).flat_map(|(best, input)| best.iter().map(move |group| (*group, input)));
        let jobs: Vec<_> =
            groups.map(|(group, input)| Job::product(self.table.matrix(group as usize), input)).collect();
        let mut products = multiply(self.isa, &jobs).into_iter();
        let scores = best.iter().map(|best| -> Result<_> {
            let logits: Vec<f32> = products.by_ref().take(best.len()).flatten().collect();
            let scored = logits.len();
            Ok(Scores { ids: Some(best.iter().flat_map(ids).copied().collect()), logits: tensor(logits, (1, scored))? })
        });
        scores.collect()
    }
}
