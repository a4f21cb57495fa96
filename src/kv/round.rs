//! Rounds: rows are staged, then committed or rolled back.
//!
//! Invariants: a query of a round reads the same rows as without speculation; after `commit(n)` the cache equals one to
//! which only those `n` rows were appended; `commit` cannot fail; dropping a round rolls it back.
//!
//! Rollback copies nothing, even in a ring: a ring holds a window and a whole round, so staged rows
//! overwrite only positions outside every window.

use std::any::Any;

use candle_core::Tensor;

use super::attend::{attend, attend_sequences};
use super::cache::KvCache;
use super::recurrent::Recurrent;
use crate::nn::F32View;
use crate::{Error, Result};

/// The cache operations of a decoder layer.
pub trait KvAccess {
    /// Appends the K and V of this pass's rows, `(rows, num_kv_heads, head_dim)` each, to the layer's store.
    ///
    /// # Errors
    /// If the access is read-only, the layer has no store, or the shapes are not the store's.
    fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()>;

    /// The attention of `q` `(rows, heads, head_dim)` over the rows visible to each: `(rows, heads * head_dim)`.
    ///
    /// # Errors
    /// If the layer has no store, or the shapes are not the store's.
    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor>;

    /// The positions of the rows that have queries.
    fn positions(&self) -> Vec<usize>;

    /// Restricts the rest of the pass to queries of `rows`, ascending.
    ///
    /// # Errors
    /// If the access is that of one sequence, all of whose rows have queries.
    fn narrow(&mut self, rows: &[usize]) -> Result<()> {
        Err(Error::argument("rows", format!("{rows:?} cannot be selected in a single round; use a batch")))
    }

    /// Calls `stage` with the rounds of the pass, in order of their rows.
    ///
    /// # Errors
    /// Those of `stage`; or if the access is read-only.
    fn for_rounds(&mut self, stage: &mut dyn FnMut(&mut Round<'_>) -> Result<()>) -> Result<()> {
        let _ = stage;
        Err(Error::argument("kv", "is read-only, but the model stages rows"))
    }
}

impl KvCache {
    /// Begins a round of `rows` new positions.
    ///
    /// # Errors
    /// If `rows` is 0, more than a round may stage, or more than the context has left.
    pub fn begin_round(&mut self, rows: usize) -> Result<Round<'_>> {
        if rows == 0 || rows > self.max_round_rows {
            let limit = self.max_round_rows;
            return Err(Error::argument("rows", format!("must be from 1 to {limit}, the cache's limit, not {rows}")));
        }
        let needed = self.len.saturating_add(rows);
        if needed > self.max_context {
            return Err(Error::Context { needed, limit: self.max_context });
        }
        // Here or on a device, in each layer.
        self.written = self.written.max(self.len + rows);
        Ok(Round { cache: self, recurrent: None, rows, is_whole: false })
    }

    /// How many keys the queries of `rows` staged rows, or of the next position, read in `layer`; 0 without a store,
    /// which `attend` reports.
    fn visible_keys(&self, layer: usize, rows: usize) -> usize {
        let at = self.len..self.len + rows;
        self.layout.store_of(layer).map_or(0, |store| self.stores[store].visible(at).len())
    }

    /// The committed rows, for queries at the next position.
    pub fn committed(&self) -> Committed<'_> {
        Committed { cache: self }
    }
}

/// Staged rows: visible to this round's queries, not yet committed.
#[must_use = "dropping a round rolls it back; commit it"]
pub struct Round<'a> {
    cache: &'a mut KvCache,
    pub(super) recurrent: Option<&'a mut dyn Recurrent>, // the sequence's, once it has begun the round
    rows: usize,
    pub(super) is_whole: bool, // committed whole or not at all
}

impl Round<'_> {
    /// The recurrent state, if the sequence has one of this type.
    pub fn recurrent_mut<R: Recurrent>(&mut self) -> Option<&mut R> {
        let recurrent: &mut dyn Any = self.recurrent.as_deref_mut()?;
        recurrent.downcast_mut()
    }

    /// The same round, for a pass to stage rows in.
    pub(crate) fn reborrow(&mut self) -> Round<'_> {
        // Not `as_deref_mut`: the object's own lifetime must be shortened as well.
        let recurrent = self.recurrent.as_mut().map(|recurrent| &mut **recurrent as &mut dyn Recurrent);
        Round { cache: self.cache, recurrent, rows: self.rows, is_whole: self.is_whole }
    }

    /// Position of the first staged row.
    pub fn position(&self) -> usize {
        self.cache.len
    }

    /// Rows staged.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Commits the first `keep` rows.
    ///
    /// # Panics
    /// If fewer were staged, or the round must be committed whole.
    pub fn commit(self, keep: usize) {
        assert!(self.can_commit(keep), "commit: {keep} of {} rows", self.rows);
        self.cache.len += keep;
        if let Some(recurrent) = self.recurrent {
            recurrent.commit(keep);
        }
    }

    /// Whether all rows are committed or none.
    pub(crate) fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether the first `keep` rows can be committed.
    pub(crate) fn can_commit(&self, keep: usize) -> bool {
        keep == 0 || keep == self.rows || (keep < self.rows && !self.is_whole)
    }

    /// How many keys the round's queries read in `layer`.
    pub(super) fn visible_keys(&self, layer: usize) -> usize {
        self.cache.visible_keys(layer, self.rows)
    }

    /// The attention of `q` `(rows.len(), heads, head_dim)`, the queries of the round's `rows`.
    ///
    /// # Errors
    /// If the shapes are not the store's.
    pub(super) fn attend_rows(&self, layer: usize, q: &Tensor, rows: &[usize]) -> Result<Tensor> {
        let store = &self.cache.stores[self.cache.layout.store_of(layer)?];
        if q.dims().first() != Some(&rows.len()) {
            let problem = format!("attend: queries {:?} of {} rows", q.dims(), rows.len());
            return Err(candle_core::Error::Msg(problem).into());
        }
        attend(self.cache, store, q, |row| {
            let position = self.cache.len + rows[row];
            position..position + 1
        })
    }
}

impl KvAccess for Round<'_> {
    fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let KvCache { layout, stores, angles, pool, isa, len: first, .. } = &mut *self.cache;
        let store = &mut stores[layout.store_of(layer)?];
        let shape = [self.rows, store.layout.num_kv_heads, store.layout.head_dim];
        for (tensor, name) in [(k, "K"), (v, "V")] {
            if tensor.dims() != shape {
                let problem = format!("{name} of layer {layer} is {:?}, the store needs {shape:?}", tensor.dims());
                return Err(candle_core::Error::Msg(problem).into());
            }
        }
        let (k, v) = (F32View::new(k)?, F32View::new(v)?);
        if store.derives_keys() {
            angles.reserve(pool, *first + self.rows)?;
        }
        store.write(pool, *isa, layer, *first, &k, &v)
    }

    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor> {
        self.attend_rows(layer, q, &Vec::from_iter(0..self.rows))
    }

    fn positions(&self) -> Vec<usize> {
        Vec::from_iter(self.position()..self.position() + self.rows)
    }

    fn for_rounds(&mut self, stage: &mut dyn FnMut(&mut Round<'_>) -> Result<()>) -> Result<()> {
        stage(self)
    }
}

/// The committed rows, for queries of another model (a drafter) that all have the position of the next row.
#[derive(Clone, Copy)]
pub struct Committed<'a> {
    cache: &'a KvCache,
}

impl<'a> Committed<'a> {
    /// The position of the queries.
    pub fn position(self) -> usize {
        self.cache.len
    }

    /// The attention of `q` `(rows, heads, head_dim)` over the committed rows of the store that the target's layer
    /// `layer` reads.
    ///
    /// # Errors
    /// If the shape is not the store's.
    pub fn attend(self, layer: usize, q: &Tensor) -> Result<Tensor> {
        let store = &self.cache.stores[self.cache.layout.store_of(layer)?];
        let position = self.cache.len;
        attend(self.cache, store, q, |_| position..position)
    }
}

/// [`Committed`] views for the layers of a drafter: its layer `i` reads the target's layer `donors[i]`.
pub struct Borrowed<'a> {
    /// The view of each row of the pass.
    pub committed: Vec<Committed<'a>>,
    /// For each layer of the drafter, the target's layer whose K and V it reads.
    pub donors: &'a [usize],
}

impl KvAccess for Borrowed<'_> {
    fn append(&mut self, layer: usize, _: &Tensor, _: &Tensor) -> Result<()> {
        Err(Error::argument("layer", format!("{layer} of a drafter has no K and V of its own")))
    }

    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor> {
        let donor = self.donors[layer];
        if let [only] = self.committed[..] {
            return only.attend(donor, q);
        }
        let rows: Vec<_> = self.committed.iter().enumerate().collect();
        let keys = |(_, kv): &(usize, &Committed<'_>)| kv.cache.visible_keys(donor, 0);
        attend_sequences(&rows, keys, |(row, kv)| kv.attend(donor, &q.narrow(0, *row, 1)?))
    }

    fn positions(&self) -> Vec<usize> {
        self.committed.iter().map(|kv| kv.position()).collect()
    }
}

#[cfg(test)]
mod tests {
    use foretoken_kernels::Isa;

    use super::*;
    use crate::kv::{KvLayout, KvOptions, StoreLayout};

    #[test]
    fn a_sliding_layer_reads_its_window() {
        let store = |window| StoreLayout { num_kv_heads: 1, head_dim: 16, window, k_eq_v: None };
        let stores = vec![store(Some(512)), store(None)];
        let layout = KvLayout { stores, store_of_layer: vec![0, 1, 0], inverse_frequencies: Vec::new() };
        let mut cache = KvCache::new(layout, &KvOptions::default(), 20_000, Isa::best()).expect("a cache");
        for (len, sliding, full) in [(0, 4, 4), (300, 304, 304), (510, 514, 514), (10_000, 515, 10_004)] {
            cache.len = len;
            let round = cache.begin_round(4).expect("a round");
            assert_eq!([0, 1, 2, 3].map(|layer| round.visible_keys(layer)), [sliding, full, sliding, 0], "after {len}");
        }
        assert_eq!([0, 1].map(|layer| cache.visible_keys(layer, 0)), [511, 10_000]);
    }
}
