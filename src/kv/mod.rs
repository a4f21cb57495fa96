//! The KV cache: it owns every byte of K and V, and attention is one of its operations, so nobody else sees them.
//!
//! * [`KvCache`] holds the rows of every layer that computes K and V; KV-shared layers and the drafter read a donor's.
//! * [`Round`] stages new rows; [`Round::commit`] keeps the first of them, dropping it keeps none.
//! * [`Committed`] is the drafter's read-only view: committed rows, one constant position.

mod attend;
mod coded;
mod derived;
mod file;
mod format;
mod options;
mod round;
mod rows;
mod shared;
mod store;

pub use format::{ExactZones, KvFormat, KvPreset};
pub use options::{KeysOfValues, KvOptions, LayerFormat, available_memory};
pub use round::{Borrowed, Committed, KvAccess, Round};

pub use foretoken_kernels::turbo::CodeFormat;

pub(crate) use round::no_numbers;
pub(crate) use rows::Keep;
pub(crate) use shared::Sharing;
pub(crate) use store::first_exact_page;

use foretoken_kernels::Isa;

use crate::nn::Arena;
use crate::{Error, Result};
use derived::AngleTable;
use store::Store;

/// Positions per page. Pages are the unit of allocation and, because their boundaries are fixed in the sequence, the
/// tiles that attention is summed over: see [`attend`].
pub(crate) const PAGE: usize = 128;

/// The K/V of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct StoreLayout {
    /// K/V heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a query sees, its own included; `None` sees all.
    pub window: Option<usize>,
    /// Where the layer's keys are its values, normed with this weight `(head_dim)` and rotated: then V alone needs to be
    /// kept.
    pub key_weight: Option<Vec<f32>>,
}

/// The K/V of a model: one store per layer that computes its own, and which store every layer reads.
#[derive(Clone, Debug, PartialEq)]
pub struct KvLayout {
    /// The stores.
    pub stores: Vec<StoreLayout>,
    /// For each layer of the target, the store that it reads (its own, or its donor's).
    pub store_of_layer: Vec<usize>,
    /// The rotation of keys that are made from values: see [`StoreLayout::key_weight`].
    pub inverse_frequencies: Vec<f32>,
}

/// Further than any window or exact zone: what grows here grows with the text.
const FAR: usize = 1 << 30;

/// How the K and V of one layer are kept.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreReport {
    /// The layer that computes them.
    pub layer: usize,
    /// Format of the keys; `None` where they are made of the values.
    pub key: Option<KvFormat>,
    /// Format of the values.
    pub value: KvFormat,
    /// Bytes that one more position adds in the long run: none in a window.
    pub bytes_per_token: f64,
}

/// The K and V of every committed position.
pub struct KvCache {
    layout: KvLayout,
    stores: Vec<Store>,
    len: usize,
    max_context: usize,
    max_round_rows: usize,
    angles: AngleTable,
    arena: Arena,
    isa: Isa,
}

impl KvCache {
    /// An empty cache; `default_context` holds where the options name no limit.
    ///
    /// # Errors
    /// If an option is out of its range, or the context does not fit memory.
    pub fn new(layout: KvLayout, options: &KvOptions, default_context: usize, isa: Isa) -> Result<Self> {
        options.check(&layout)?;
        let pairs = layout.inverse_frequencies.len();
        let store = |(i, store)| Store::new(store, pairs, options.formats(&layout, i), options);
        let stores: Vec<_> = layout.stores.iter().enumerate().map(store).collect::<Result<_>>()?;
        let angles = AngleTable::new(layout.inverse_frequencies.clone(), isa);
        let (arena, max_round_rows) = (Arena::default(), options.max_round_rows);
        let mut cache = Self { layout, stores, len: 0, max_context: 0, max_round_rows, angles, arena, isa };
        cache.max_context = options.context(default_context, |context| cache.bytes_at(context))?;
        Ok(cache)
    }

    /// Committed positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that fit.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Rows that one round may stage.
    pub fn max_round_rows(&self) -> usize {
        self.max_round_rows
    }

    /// Begins a round of `rows` new positions.
    ///
    /// # Errors
    /// If `rows` is 0, more than a round may stage, or more than the context has left.
    pub fn begin_round(&mut self, rows: usize) -> Result<Round<'_>> {
        if rows == 0 || rows > self.max_round_rows {
            let limit = self.max_round_rows;
            return Err(Error::Input(format!("a round of {rows} rows; the cache was made for 1 to {limit}")));
        }
        if self.len + rows > self.max_context {
            return Err(Error::Context { needed: self.len + rows, limit: self.max_context });
        }
        Ok(Round::new(self, rows))
    }

    /// The committed rows, for queries at the position that follows them.
    pub fn committed(&self) -> Committed<'_> {
        Committed::new(self)
    }

    /// How every store is kept.
    pub fn report(&self) -> Vec<StoreReport> {
        let layer = |index| self.layout.store_of_layer.iter().position(|store| *store == index).unwrap_or(index);
        let report = |(index, store): (usize, &Store)| {
            let (key, value) = store.formats();
            StoreReport {
                layer: layer(index),
                key,
                value,
                bytes_per_token: (store.bytes_at(FAR + PAGE) - store.bytes_at(FAR)) as f64 / PAGE as f64,
            }
        };
        self.stores.iter().enumerate().map(report).collect()
    }

    /// Bytes of K and V held.
    pub fn bytes(&self) -> usize {
        self.stores.iter().map(Store::bytes).sum::<usize>() + self.angles.bytes()
    }

    /// Bytes once positions below `end` were written.
    pub fn bytes_at(&self, end: usize) -> usize {
        let derives = self.stores.iter().any(Store::derives_keys);
        let angles = if derives { self.angles.bytes_at(end) } else { 0 };
        self.stores.iter().map(|store| store.bytes_at(end)).fold(angles, usize::saturating_add)
    }

    /// Bytes that one more position adds in the long run, when sliding windows and exact zones are full; rounded up.
    pub fn bytes_per_token(&self) -> usize {
        (self.bytes_at(FAR + PAGE) - self.bytes_at(FAR)).div_ceil(PAGE)
    }

    /// Whether two caches hold the same, bit by bit, at every position that a future query can see.
    pub fn same_rows(&self, other: &Self) -> bool {
        let mut stores = self.stores.iter().zip(&other.stores);
        self.len == other.len && self.layout == other.layout && stores.all(|(a, b)| a.same(b, self.len))
    }
}
