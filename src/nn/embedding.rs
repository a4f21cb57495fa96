//! Embedding tables.

use candle_core::Tensor;

use super::{Weight, row_blocks, tensor};
use crate::{Error, Result};

/// A table `(vocabulary, width)` in the checkpoint's type, and a scale for its rows.
#[derive(Clone)]
pub struct Embedding {
    weight: Weight,
    scale: f32,
}

impl Embedding {
    /// A table whose rows are multiplied by `scale`.
    pub fn new(weight: Weight, scale: f32) -> Self {
        Self { weight, scale }
    }

    /// The table, unscaled (the tied output head).
    pub fn weight(&self) -> &Weight {
        &self.weight
    }

    /// The factor of every row.
    pub fn scale(&self) -> f32 {
        self.scale
    }

    /// The scaled rows of `ids`: `(ids, width)`.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn forward(&self, ids: &[u32]) -> Result<Tensor> {
        let (vocabulary, width) = (self.weight.outputs(), self.weight.inputs());
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocabulary) {
            return Err(Error::argument("ids", format!("token id {id} is outside the vocabulary of {vocabulary}")));
        }
        let rows = row_blocks(ids.len(), width, |first, rows| {
            for (id, row) in ids[first..].iter().zip(rows.chunks_exact_mut(width)) {
                self.weight.row(*id as usize, row);
                row.iter_mut().for_each(|x| *x *= self.scale);
            }
        });
        tensor(rows, (ids.len(), width))
    }
}
