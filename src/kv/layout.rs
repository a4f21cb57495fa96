//! Which stores of K and V a model needs, and which of them each layer reads.

use crate::{Error, Result};

/// Positions per page. Pages are the unit of allocation, of quantization, and of summation in attention: see
/// [`attend`](super::attend).
pub(crate) const PAGE: usize = 128;

/// The K/V of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreLayout {
    /// K/V heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a query sees, including its own; `None` sees all.
    pub window: Option<usize>,
    /// The key norm's weight `(head_dim)` if the layer's K is its V, normed and rotated: only V is stored then.
    pub k_eq_v: Option<Vec<f32>>,
}

/// The K/V of a model: one store per layer that computes its own, and which store every layer reads.
#[derive(Clone, Debug, PartialEq)]
pub struct KvLayout {
    /// The stores.
    pub stores: Vec<StoreLayout>,
    /// For each layer of the target, the store that it reads (its own, or its donor's), or [`KvLayout::NO_STORE`].
    pub store_of_layer: Vec<usize>,
    /// Rotary frequencies of the layers with K = V: see [`StoreLayout::k_eq_v`].
    pub inverse_frequencies: Vec<f32>,
}

impl KvLayout {
    /// The store index of a layer without K and V.
    pub const NO_STORE: usize = usize::MAX;

    /// The store that a layer reads.
    ///
    /// # Errors
    /// If it has none.
    pub(super) fn store_of(&self, layer: usize) -> Result<usize> {
        let store = self.store_of_layer.get(layer).copied().filter(|store| *store < self.stores.len());
        store.ok_or_else(|| {
            Error::argument("layer", format!("{layer} has no K and V; name one whose store is in the layout"))
        })
    }
}
