//! One set of codes for K and V, where both come from one vector.
//!
//! V is a normalized vector; K is it times the key norm's weight, rotated at its position. Only some channels rotate: for
//! the others the weight moves into the query, and V's codes serve as K's. So the codes of V and those of K's rotating
//! channels are all: 640 values per token instead of 1024 where 128 of 512 channels rotate. The rotating channels come
//! first, so that they fill groups of the transform of their own.

use foretoken_kernels::attend::Rows;

use super::StoreLayout;

/// How a layer's K and V share codes.
pub(crate) struct Sharing {
    /// For each channel of the shared order, the channel of the model.
    order: Vec<usize>,
    /// Rotating channels, the first ones.
    own: usize,
    /// What queries are multiplied with, in the shared order: 1 where channels rotate.
    weight: Vec<f32>,
}

impl Sharing {
    /// The sharing of a store of which `pairs` pairs of channels rotate; `None` where K is not V, or the rotating channels
    /// do not end where a group of the transform does.
    pub(crate) fn of(store: &StoreLayout, pairs: usize) -> Option<Self> {
        let (width, own) = (store.head_dim, 2 * pairs);
        let weight = store.key_weight.as_ref()?;
        // Groups are of 128 as long as they fit.
        if own == 0 || own >= width || !own.is_multiple_of(128) {
            return None;
        }
        let rotates = |channel: &usize| channel % (width / 2) < pairs;
        let mut order: Vec<usize> = (0..width).filter(rotates).collect();
        order.extend((0..width).filter(|channel| !rotates(channel)));
        let weight = order.iter().enumerate().map(|(i, channel)| if i < own { 1.0 } else { weight[*channel] });
        Some(Self { own, weight: weight.collect(), order })
    }

    /// Width of the keys of their own.
    pub(crate) fn own(&self) -> usize {
        self.own
    }

    /// What queries are multiplied with, in the shared order.
    pub(crate) fn weight(&self) -> &[f32] {
        &self.weight
    }

    /// The rotating channels of `keys` `(n, width)`: `(n, own)`.
    pub(crate) fn own_keys(&self, keys: &[f32]) -> Vec<f32> {
        let rows = keys.chunks_exact(self.order.len());
        rows.flat_map(|row| self.order[..self.own].iter().map(|channel| row[*channel])).collect()
    }

    /// `values` `(n, width)` in the shared order.
    pub(crate) fn ordered(&self, values: &[f32]) -> Vec<f32> {
        let rows = values.chunks_exact(self.order.len());
        rows.flat_map(|row| self.order.iter().map(|channel| row[*channel])).collect()
    }

    /// `queries` `(n, width)` in the shared order and with the keys' weight.
    pub(super) fn weighted(&self, queries: &[f32]) -> Vec<f32> {
        let mut queries = self.ordered(queries);
        for row in queries.chunks_exact_mut(self.order.len()) {
            row.iter_mut().zip(&self.weight).for_each(|(x, weight)| *x *= weight);
        }
        queries
    }

    /// Puts results `(n, width)` back in the model's order.
    pub(crate) fn restore(&self, results: &mut [f32]) {
        let mut shared = vec![0.0; self.order.len()];
        for row in results.chunks_exact_mut(self.order.len()) {
            shared.copy_from_slice(row);
            self.order.iter().zip(&shared).for_each(|(channel, x)| row[*channel] = *x);
        }
    }

    /// The keys of exact rows, for queries that are [`Sharing::weighted`]: the own ones, and the values behind them.
    pub(super) fn exact_keys(&self, own: Rows<'_>, values: Rows<'_>, keys: &mut [f32]) {
        let (Rows::Exact(own), Rows::Exact(values)) = (own, values) else { return };
        let width = self.order.len();
        for (i, key) in keys.chunks_exact_mut(width).enumerate() {
            values.slice(i * width..(i + 1) * width).widen(key);
            own.slice(i * self.own..(i + 1) * self.own).widen(&mut key[..self.own]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_and_results_are_those_of_the_model() {
        let width = 512;
        let weight: Vec<f32> = (0..width).map(|i| 0.5 + (i % 7) as f32).collect();
        let store = StoreLayout { num_kv_heads: 1, head_dim: width, window: None, key_weight: Some(weight.clone()) };
        let sharing = Sharing::of(&store, 64).expect("a sharing");
        let value: Vec<f32> = (0..width).map(|i| ((i * 31) % 101) as f32 / 50.0 - 1.0).collect();
        let query: Vec<f32> = (0..width).map(|i| ((i * 17) % 89) as f32 / 44.0 - 1.0).collect();
        // Some rotation of the channels that rotate.
        let mut key: Vec<f32> = value.iter().zip(&weight).map(|(v, w)| v * w).collect();
        (0..64).for_each(|i| {
            (key[i], key[i + 256]) = (0.6 * key[i] - 0.8 * key[i + 256], 0.6 * key[i + 256] + 0.8 * key[i])
        });
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();

        let mut shared_key = sharing.ordered(&value);
        shared_key[..128].copy_from_slice(&sharing.own_keys(&key));
        assert!((dot(&sharing.weighted(&query), &shared_key) - dot(&query, &key)).abs() < 1e-3);
        let mut restored = sharing.ordered(&value);
        sharing.restore(&mut restored);
        assert_eq!(restored, value);
        assert!(Sharing::of(&store, 8).is_none() && Sharing::of(&store, 256).is_none());
        assert!(Sharing::of(&StoreLayout { key_weight: None, ..store }, 64).is_none());
    }
}
