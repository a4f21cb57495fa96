//! The centroid head: tokens are grouped under centroids, and only the groups that fit the state best are scored.

use candle_core::{Module, Tensor};
use foretoken_kernels::{Isa, matmul::dot, vocabulary};

use super::config::{AssistantConfig, CentroidConfig};
use crate::Result;
use crate::checkpoint::{Loader, TensorType};
use crate::nn::{F32View, Linear, Weight};

/// `masked_embedding` of an assistant: `num_centroids` groups of equally many tokens.
pub(super) struct CentroidHead {
    centroids: Linear,        // (num_centroids, hidden)
    token_ordering: Vec<u32>, // (num_centroids, tokens per centroid): the ids under each centroid
    top_k: usize,
    isa: Isa,
}

impl CentroidHead {
    pub(super) fn load(loader: &mut Loader, config: &AssistantConfig, centroids: &CentroidConfig) -> Result<Self> {
        let text = &config.text;
        Ok(Self {
            centroids: loader.linear("masked_embedding.centroids.weight", centroids.num_centroids, text.hidden_size)?,
            token_ordering: token_ordering(loader, text.vocab_size)?,
            top_k: centroids.top_k,
            isa: loader.isa(),
        })
    }

    /// The ids that are scored for state `n` `(1, hidden)`, and their scores: `table[id] . n` for the ids under the
    /// `top_k` centroids with the largest dot product. No row over the vocabulary is made.
    pub(super) fn forward(&self, n: &Tensor, table: &Weight) -> Result<(Vec<u32>, Vec<f32>)> {
        let ranks = self.centroids.forward(n)?;
        let mut best = Vec::new();
        vocabulary::top_k(&F32View::new(&ranks)?, self.top_k, &mut best);
        let group = self.token_ordering.len() / self.centroids.weight().outputs();
        let ids: Vec<u32> = best
            .iter()
            .flat_map(|centroid| &self.token_ordering[*centroid as usize * group..(*centroid as usize + 1) * group])
            .copied()
            .collect();
        let n = F32View::new(n)?;
        let score = |id: &u32| dot(self.isa, &n, table.rows(*id as usize..*id as usize + 1));
        let scores = ids.iter().map(score).collect();
        Ok((ids, scores))
    }
}

/// The ids in the order of their centroids: a permutation of the vocabulary.
fn token_ordering(loader: &mut Loader, vocab_size: usize) -> Result<Vec<u32>> {
    let name = "masked_embedding.token_ordering";
    let tensor = loader.tensor(name, &[vocab_size])?;
    let bytes = tensor.bytes.as_slice();
    let ids: Vec<i64> = match tensor.dtype {
        TensorType::I64 => bytes.as_chunks().0.iter().map(|id| i64::from_le_bytes(*id)).collect(),
        TensorType::I32 => bytes.as_chunks().0.iter().map(|id| i64::from(i32::from_le_bytes(*id))).collect(),
        _ => return Err(loader.error(name, "is not I64 or I32; convert the assistant again")),
    };
    let mut seen = vec![false; vocab_size];
    for id in &ids {
        match usize::try_from(*id).ok().and_then(|id| seen.get_mut(id)) {
            Some(seen) if !*seen => *seen = true,
            _ => {
                let problem = format!("is no permutation of the vocabulary (id {id}); convert the assistant again");
                return Err(loader.error(name, problem));
            }
        }
    }
    Ok(ids.into_iter().map(|id| id as u32).collect())
}
