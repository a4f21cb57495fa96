//! K = V: layers whose K and V come from one projection.
//!
//! V is the normalized vector; K is V times the key norm's weight, rotated at its position. So only
//! V is stored, as far as its format allows:
//!
//! * Exact formats store V and compute K while reading. [`AngleTable`] holds cosines and sines once for all layers and
//!   heads: 512 bytes per position, against tens of KiB of V.
//! * Quantized formats store V and K's rotary channels ([`RotaryFirst`]). For the other channels the key weight moves
//!   into the query, and quantized V serves as K: 640 values per token instead of 1024 where 128 of 512 channels
//!   rotate. Rotary channels come first, so that they fill whole rotation groups.

use foretoken_kernels::attention::KvRows;
use foretoken_kernels::{Elements, Isa, rope};

use super::exact::out_of_memory;
use super::layout::{PAGE, StoreLayout};
use super::pool::{PagePool, SharedPage, page_mut};
use crate::Result;
use crate::nn::{Rotary, cast, cast_mut, row_blocks};

/// Cosines and sines of every position. A clone shares the pages, which are written once.
#[derive(Clone)]
pub(super) struct AngleTable {
    inverse_frequencies: Vec<f32>,
    pages: Vec<SharedPage>, // (2, PAGE, rotating pairs) of f32
    isa: Isa,
}

impl AngleTable {
    pub(super) fn new(inverse_frequencies: Vec<f32>, isa: Isa) -> Self {
        Self { inverse_frequencies, pages: Vec::new(), isa }
    }

    /// Extends the table to the positions below `end`.
    ///
    /// # Errors
    /// If the pool is exhausted.
    pub(super) fn reserve(&mut self, pool: &PagePool, end: usize) -> Result<()> {
        while self.pages.len() < end.div_ceil(PAGE) {
            let rotary = Rotary::new(self.inverse_frequencies.clone(), self.isa);
            let angles = rotary.angles((self.pages.len() * PAGE..).take(PAGE));
            let mut page = pool.take(self.page_bytes()).ok_or_else(|| out_of_memory(end))?;
            let (cos, sin) = page_mut(&mut page).split_at_mut(self.page_bytes() / 2);
            cast_mut(cos).copy_from_slice(angles.cos());
            cast_mut(sin).copy_from_slice(angles.sin());
            self.pages.push(page);
        }
        Ok(())
    }

    /// Frees the pages of the positions from `end` on.
    pub(super) fn trim(&mut self, end: usize) {
        self.pages.truncate(end.div_ceil(PAGE));
    }

    /// Computes the keys of page `page` of the sequence from its values, both `(len, head_dim)`. `weight` `(head_dim)`
    /// is the key norm's. In f32 the bits equal those of the layer's own K.
    pub(super) fn keys(&self, page: usize, values: Elements<'_>, weight: &[f32], keys: &mut [f32]) {
        let pairs = self.inverse_frequencies.len();
        let (cos, sin) = self.pages[page].as_slice().split_at(self.page_bytes() / 2);
        let (cos, sin) = (cast(cos), cast(sin));
        let angles = ..keys.len() / weight.len() * pairs;
        rope::k_eq_v(self.isa, values, weight, &cos[angles], &sin[angles], keys);
    }

    /// All pages in memory.
    pub(super) fn held_pages(&self) -> &[SharedPage] {
        &self.pages
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * self.page_bytes()
    }

    /// Bytes after positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        end.div_ceil(PAGE).saturating_mul(self.page_bytes())
    }

    fn page_bytes(&self) -> usize {
        2 * PAGE * self.inverse_frequencies.len() * size_of::<f32>()
    }
}

/// Channel order of a K = V layer with the rotary channels first, and the query weight that lets V serve as K.
#[derive(Clone)]
pub(crate) struct RotaryFirst {
    /// `order[i]` is the model's channel at index `i`.
    order: Vec<usize>,
    /// Rotary channels: the first of `order`.
    rotary_channels: usize,
    /// Factor of each query channel, rotary first: 1 for rotary channels, the key norm's weight for the others.
    weight: Vec<f32>,
}

impl RotaryFirst {
    /// The order for a store with `pairs` rotary pairs; `None` if K != V, or the rotary channels
    /// are not a whole number of rotation groups.
    pub(crate) fn of(store: &StoreLayout, pairs: usize) -> Option<Self> {
        let (width, rotary_channels) = (store.head_dim, 2 * pairs);
        let weight = store.k_eq_v.as_ref()?;
        // Rotation groups have 128 channels where `head_dim` allows.
        if rotary_channels == 0 || rotary_channels >= width || !rotary_channels.is_multiple_of(128) {
            return None;
        }
        let rotates = |channel: &usize| channel % (width / 2) < pairs;
        let mut order: Vec<usize> = (0..width).filter(rotates).collect();
        order.extend((0..width).filter(|channel| !rotates(channel)));
        let weight =
            order.iter().enumerate().map(|(i, channel)| if i < rotary_channels { 1.0 } else { weight[*channel] });
        Some(Self { rotary_channels, weight: weight.collect(), order })
    }

    /// Width of the stored keys.
    pub(crate) fn rotary_channels(&self) -> usize {
        self.rotary_channels
    }

    /// Factor of each query channel, rotary first.
    pub(crate) fn query_weight(&self) -> &[f32] {
        &self.weight
    }

    /// The rotary channels of `keys` `(n, width)`: `(n, rotary_channels)`.
    pub(crate) fn rotary_keys(&self, keys: &[f32]) -> Vec<f32> {
        self.first_channels(keys, self.rotary_channels)
    }

    /// `values` `(n, width)`, rotary channels first.
    pub(crate) fn reorder(&self, values: &[f32]) -> Vec<f32> {
        self.first_channels(values, self.order.len())
    }

    /// The first `channels` in this order of `rows` `(n, width)`: `(n, channels)`.
    fn first_channels(&self, rows: &[f32], channels: usize) -> Vec<f32> {
        let width = self.order.len();
        row_blocks(rows.len() / width, channels, |first, reordered| {
            let rows = rows[first * width..].chunks_exact(width);
            for (row, reordered) in rows.zip(reordered.chunks_exact_mut(channels)) {
                reordered.iter_mut().zip(&self.order).for_each(|(x, channel)| *x = row[*channel]);
            }
        })
    }

    /// `queries` `(n, width)`, rotary channels first, times [`RotaryFirst::query_weight`].
    pub(super) fn reorder_queries(&self, queries: &[f32]) -> Vec<f32> {
        let mut queries = self.reorder(queries);
        for row in queries.chunks_exact_mut(self.order.len()) {
            row.iter_mut().zip(&self.weight).for_each(|(x, weight)| *x *= weight);
        }
        queries
    }

    /// Restores the model's channel order of `results` `(n, width)`.
    pub(crate) fn restore(&self, results: &mut [f32]) {
        let mut row_copy = vec![0.0; self.order.len()];
        for row in results.chunks_exact_mut(self.order.len()) {
            row_copy.copy_from_slice(row);
            self.order.iter().zip(&row_copy).for_each(|(channel, x)| row[*channel] = *x);
        }
    }

    /// Keys of exact rows, for queries of [`RotaryFirst::reorder_queries`]: `rotary` `(n, rotary_channels)`, then the
    /// other channels of `values` `(n, width)`.
    pub(super) fn join_keys(&self, rotary: KvRows<'_>, values: KvRows<'_>, keys: &mut [f32]) {
        let (KvRows::Exact(rotary), KvRows::Exact(values)) = (rotary, values) else { return };
        let (width, channels) = (self.order.len(), self.rotary_channels);
        for (i, key) in keys.chunks_exact_mut(width).enumerate() {
            values.slice(i * width..(i + 1) * width).widen(key);
            rotary.slice(i * channels..(i + 1) * channels).widen(&mut key[..channels]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reordered_scores_and_values_equal_the_models() {
        let width = 512;
        let weight: Vec<f32> = (0..width).map(|i| 0.5 + (i % 7) as f32).collect();
        let store = StoreLayout { num_kv_heads: 1, head_dim: width, window: None, k_eq_v: Some(weight.clone()) };
        let rotary_first = RotaryFirst::of(&store, 64).expect("K = V with whole rotation groups");
        let value: Vec<f32> = (0..width).map(|i| ((i * 31) % 101) as f32 / 50.0 - 1.0).collect();
        let query: Vec<f32> = (0..width).map(|i| ((i * 17) % 89) as f32 / 44.0 - 1.0).collect();
        // One rotation for all rotary pairs.
        let mut key: Vec<f32> = value.iter().zip(&weight).map(|(v, w)| v * w).collect();
        (0..64).for_each(|i| {
            (key[i], key[i + 256]) = (0.6 * key[i] - 0.8 * key[i + 256], 0.6 * key[i + 256] + 0.8 * key[i])
        });
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();

        let mut reordered_key = rotary_first.reorder(&value);
        reordered_key[..128].copy_from_slice(&rotary_first.rotary_keys(&key));
        assert!((dot(&rotary_first.reorder_queries(&query), &reordered_key) - dot(&query, &key)).abs() < 1e-3);
        let mut restored = rotary_first.reorder(&value);
        rotary_first.restore(&mut restored);
        assert_eq!(restored, value);
        assert!(RotaryFirst::of(&store, 8).is_none() && RotaryFirst::of(&store, 256).is_none());
        assert!(RotaryFirst::of(&StoreLayout { k_eq_v: None, ..store }, 64).is_none());
    }
}
