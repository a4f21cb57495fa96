//! Rounds: rows are staged, then committed or forgotten.
//!
//! Three facts hold. During a round every query sees exactly what plain decoding would show it. After `commit(n)` the
//! cache equals one that only ever saw those `n` rows. `commit` cannot fail, and forgetting it rolls back.
//!
//! Rollback costs nothing, on a ring either: staged rows overwrite positions that are older than any window, because a
//! ring holds a window and a whole round.

use candle_core::Tensor;

use super::{KvCache, attend};
use crate::nn::F32View;
use crate::{Error, Result};

/// The largest magnitude that every format holds: that of `f16`. Normalized K and V stay far below it.
const LARGEST: f32 = 65504.0;

/// What a layer does with the cache.
pub trait KvAccess {
    /// Adds the K and V of this pass's rows, `(rows, num_kv_heads, head_dim)` each, to a layer's own store.
    ///
    /// # Errors
    /// If the access is read-only or the shapes are not the store's.
    fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()>;

    /// The attention of `q` `(rows, heads, head_dim)` over what each row may see: `(rows, heads * head_dim)`.
    ///
    /// # Errors
    /// If the shapes are not the store's.
    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor>;
}

/// New rows that are staged: visible to this round's queries, not yet kept.
#[must_use = "dropping a round rolls it back; commit it to keep its rows"]
pub struct Round<'a> {
    cache: &'a mut KvCache,
    rows: usize,
}

impl<'a> Round<'a> {
    pub(super) fn new(cache: &'a mut KvCache, rows: usize) -> Self {
        Self { cache, rows }
    }

    /// Position of the first staged row.
    pub fn position(&self) -> usize {
        self.cache.len
    }

    /// Rows staged.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Keeps the first `keep` rows.
    ///
    /// # Panics
    /// If fewer were staged.
    pub fn commit(self, keep: usize) {
        assert!(keep <= self.rows, "commit: {keep} of {} rows", self.rows);
        self.cache.len += keep;
    }
}

impl KvAccess for Round<'_> {
    fn append(&mut self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let KvCache { layout, stores, angles, arena, isa, len: first, .. } = &mut *self.cache;
        let store = &mut stores[layout.store_of_layer[layer]];
        let shape = [self.rows, store.layout.num_kv_heads, store.layout.head_dim];
        for (tensor, name) in [(k, "K"), (v, "V")] {
            if tensor.dims() != shape {
                let problem = format!("{name} of layer {layer} is {:?}, the store takes {shape:?}", tensor.dims());
                return Err(candle_core::Error::Msg(problem).into());
            }
        }
        let (k, v) = (F32View::new(k)?, F32View::new(v)?);
        for (rows, name) in [(&k, "K"), (&v, "V")] {
            if let Some(at) = rows.iter().position(|x| x.is_nan() || x.abs() > LARGEST) {
                let (position, value) = (*first + at / (shape[1] * shape[2]), rows[at]);
                return Err(no_numbers(name, layer, position, &format!("the value {value}")));
            }
        }
        if store.derives_keys() {
            angles.reserve(arena, *first + self.rows)?;
        }
        store.write(arena, *isa, *first, &k, &v)
    }

    /// `q` holds the newest rows of the round: all of them, or the last few where the others' results are not wanted.
    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor> {
        let (rows, _, _) = q.dims3()?;
        let end = self.cache.len + self.rows;
        let store = &self.cache.stores[self.cache.layout.store_of_layer[layer]];
        attend::attend(self.cache, store, q, |row| {
            let position = end - rows + row;
            position..position + 1
        })
    }
}

/// The error for K or V (`name`) that cannot be kept.
pub(crate) fn no_numbers(name: &str, layer: usize, position: usize, what: &str) -> Error {
    let cause = "the checkpoint is damaged, or not the model that its configuration says";
    Error::Input(format!("{name} of layer {layer} at position {position} has {what}: {cause}"))
}

/// The committed rows, read by queries that all stand at one position: that of the next row.
///
/// Layers are counted in stores here, because the reader is another model than the writer.
#[derive(Clone, Copy)]
pub struct Committed<'a> {
    cache: &'a KvCache,
}

impl<'a> Committed<'a> {
    pub(super) fn new(cache: &'a KvCache) -> Self {
        Self { cache }
    }

    /// The position at which the queries stand.
    pub fn position(self) -> usize {
        self.cache.len
    }

    /// The attention of `q` `(rows, heads, head_dim)` over the committed rows of the store that the target's layer
    /// `layer` reads.
    ///
    /// # Errors
    /// If the shape is not the store's.
    pub fn attend(self, layer: usize, q: &Tensor) -> Result<Tensor> {
        let store = &self.cache.stores[self.cache.layout.store_of_layer[layer]];
        let position = self.cache.len;
        attend::attend(self.cache, store, q, |_| position..position)
    }
}

/// A [`Committed`] view as the layers of a drafter use it: its layer `i` reads the target's layer `donors[i]`.
pub struct Borrowed<'a> {
    /// The view.
    pub committed: Committed<'a>,
    /// For each layer of the drafter, the target's layer whose K and V it reads.
    pub donors: &'a [usize],
}

impl KvAccess for Borrowed<'_> {
    fn append(&mut self, layer: usize, _: &Tensor, _: &Tensor) -> Result<()> {
        Err(Error::Input(format!("layer {layer} of a drafter has no K and V of its own")))
    }

    fn attend(&self, layer: usize, q: &Tensor) -> Result<Tensor> {
        self.committed.attend(self.donors[layer], q)
    }
}
