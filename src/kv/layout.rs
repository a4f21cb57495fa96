//! Which stores of K and V a model needs, and which of them each layer reads.

use foretoken_kernels::attention::turboquant::PAGE_TOKENS;

use crate::{Error, Result};

/// Positions per page. Pages are the unit of allocation, of quantization, and of summation in attention: see
/// [`attend`](super::attend).
pub(crate) const PAGE: usize = PAGE_TOKENS;

/// The K/V of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreLayout {
    /// K/V heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a query sees, including its own; `None` sees all.
    pub window: Option<usize>,
    /// The key norm's weight `(head_dim)` if the layer's K is its V, normed and rotated: see [`KEqV`](super::KEqV).
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

    /// # Errors
    /// If a layer has no heads, heads of no channels or a window of 0, or K = V with weights or frequencies that do not
    /// match its heads.
    pub(super) fn check(&self) -> Result<()> {
        for StoreLayout { num_kv_heads, head_dim, window, k_eq_v } in &self.stores {
            if *window == Some(0) {
                let problem = "of a layer is 0, must be at least 1: a query sees its own position";
                return Err(Error::argument("window", problem));
            }
            if *num_kv_heads == 0 || *head_dim == 0 {
                let problem = format!("has {num_kv_heads} K/V heads of {head_dim} channels, must be at least 1 of 1");
                return Err(Error::argument("layout", problem));
            }
            let (pairs, most) = (self.inverse_frequencies.len(), head_dim / 2);
            if let Some(weight) = k_eq_v.as_ref().filter(|weight| weight.len() != *head_dim || pairs > most) {
                let found = format!("{} key weights and {pairs} rotary pairs", weight.len());
                let problem = format!("has {found} for K = V, must be {head_dim} and at most {most}");
                return Err(Error::argument("layout", problem));
            }
        }
        Ok(())
    }

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
