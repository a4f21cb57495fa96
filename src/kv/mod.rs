//! The KV cache. It owns all K and V; attention is one of its operations, so no other module depends on the layout.
//!
//! * [`KvCache`] holds the rows of every layer that computes K and V; KV-shared layers and the drafter read a donor's.
//! * [`SequenceState`] is what a round can roll back: the cache, and the recurrent state of a model that has one.
//! * [`Round`] stages new rows; [`Round::commit`] commits the first of them, dropping the round rolls all back.
//! * [`Committed`] is the drafter's read-only view: committed rows, one constant position.
//! * [`Batch`] holds the rounds of several sequences, for one pass of the model.
//! * [`PagePool`] is the memory that the sequences of an engine share.

mod attend;
mod batch;
mod exact;
mod file;
mod format;
mod k_eq_v;
mod options;
mod pool;
mod quantized;
mod ring;
mod round;
mod state;
mod store;

pub use batch::{Batch, BatchKv};
pub use format::{ExactZones, KvFormat, KvPreset};
pub use options::{KEqV, KvOptions, LayerFormat, available_memory};
pub use pool::PagePool;
pub use round::{Borrowed, Committed, KvAccess, Round};
pub use state::{Recurrent, SequenceState};

pub use foretoken_kernels::attention::turboquant::CodeFormat;

pub(crate) use k_eq_v::RotaryFirst;
pub(crate) use options::SMALLER;
pub(crate) use ring::{Retention, first_exact_page};
pub(crate) use round::not_finite;

use foretoken_kernels::Isa;

use crate::{Error, Result};
use k_eq_v::AngleTable;
use store::Store;

/// Positions per page. Pages are the unit of allocation, of quantization, and of summation in attention: see
/// [`attend`].
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
    fn store_of(&self, layer: usize) -> Result<usize> {
        let store = self.store_of_layer.get(layer).copied().filter(|store| *store < self.stores.len());
        store.ok_or_else(|| {
            Error::argument("layer", format!("{layer} has no K and V; name one whose store is in the layout"))
        })
    }
}

/// A position beyond any window or exact zone: bytes that grow here grow with the context.
const FAR: usize = 1 << 30;

/// Storage of the K and V of one layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreReport {
    /// The layer that computes them.
    pub layer: usize,
    /// Format of the keys; `None` if they are computed from the values (K = V).
    pub key: Option<KvFormat>,
    /// Format of the values.
    pub value: KvFormat,
    /// Bytes per additional position once windows and exact zones are full: 0 for a sliding layer.
    pub bytes_per_token: f64,
}

/// The K and V of every committed position.
pub struct KvCache {
    layout: KvLayout,
    stores: Vec<Store>,
    len: usize,
    written: usize, // positions below it have been written, committed or not
    max_context: usize,
    max_round_rows: usize,
    angles: AngleTable,
    pool: PagePool,
    isa: Isa,
}

impl KvCache {
    /// An empty cache with its own page pool. `default_context` applies if the options set no `max_context`.
    ///
    /// # Errors
    /// If an option is out of its range, or the context does not fit memory.
    pub fn new(layout: KvLayout, options: &KvOptions, default_context: usize, isa: Isa) -> Result<Self> {
        Self::in_pool(layout, options, default_context, isa, &PagePool::new(None))
    }

    /// An empty cache whose pages come from `pool`; else as [`KvCache::new`].
    ///
    /// # Errors
    /// As [`KvCache::new`].
    pub fn in_pool(
        layout: KvLayout,
        options: &KvOptions,
        default_context: usize,
        isa: Isa,
        pool: &PagePool,
    ) -> Result<Self> {
        options.check(&layout)?;
        let pairs = layout.inverse_frequencies.len();
        let store = |(i, store)| Store::new(store, pairs, options.formats(&layout, i), options);
        let stores: Vec<_> = layout.stores.iter().enumerate().map(store).collect::<Result<_>>()?;
        let angles = AngleTable::new(layout.inverse_frequencies.clone(), isa);
        let (pool, max_round_rows) = (pool.clone(), options.max_round_rows);
        let memory = [options.memory, pool.available()].into_iter().flatten().min();
        let mut cache = Self { layout, stores, len: 0, written: 0, max_context: 0, max_round_rows, angles, pool, isa };
        let limited = KvOptions { memory, ..options.clone() };
        cache.max_context = limited.context(default_context, |context| cache.bytes_at(context))?;
        Ok(cache)
    }

    /// A copy of the committed rows. Pages are shared, and copied on write.
    pub fn fork(&self) -> Self {
        Self {
            layout: self.layout.clone(),
            stores: self.stores.clone(),
            angles: self.angles.clone(),
            pool: self.pool.clone(),
            ..*self
        }
    }

    /// Truncates to the first `len` positions. This requires that no row that a query there reads was overwritten: a ring retains
    /// the rows of one round beyond its window, and so does an exact tail.
    ///
    /// # Errors
    /// If there are fewer positions, or such a row was overwritten. Nothing changes then.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        if len > self.len || !self.stores.iter().all(|store| store.holds(len, self.written)) {
            let problem = format!("{} positions cannot be truncated to {len}", self.len);
            return Err(Error::argument(
                "len",
                format!("{problem}: rows of a sliding window were overwritten; start a new session"),
            ));
        }
        self.len = len;
        if len == 0 {
            // No row is read that was written before.
            self.written = 0;
        }
        Ok(())
    }

    /// The layers' stores.
    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Committed positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is committed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Maximum number of positions.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    pub(crate) fn set_max_context(&mut self, positions: usize) {
        self.max_context = positions;
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
            return Err(Error::argument("rows", format!("must be from 1 to {limit}, the cache's limit, not {rows}")));
        }
        if self.len + rows > self.max_context {
            return Err(Error::Context { needed: self.len + rows, limit: self.max_context });
        }
        Ok(Round::new(self, rows))
    }

    /// The committed rows, for queries at the next position.
    pub fn committed(&self) -> Committed<'_> {
        Committed::new(self)
    }

    /// Storage of every store.
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

    /// Bytes allocated for K and V.
    pub fn bytes(&self) -> usize {
        self.stores.iter().map(Store::bytes).sum::<usize>() + self.angles.bytes()
    }

    /// Bytes after positions below `end` were written.
    pub fn bytes_at(&self, end: usize) -> usize {
        let derives_keys = self.stores.iter().any(Store::derives_keys);
        let angles = if derives_keys { self.angles.bytes_at(end) } else { 0 };
        self.stores.iter().map(|store| store.bytes_at(end)).fold(angles, usize::saturating_add)
    }

    /// An upper bound of the page bytes that a round of `rows` rows takes, including copies of shared pages.
    pub(crate) fn bytes_of_round(&self, rows: usize) -> usize {
        let pages = if rows > 0 { rows.div_ceil(PAGE) + 1 } else { 0 };
        self.stores.iter().map(|store| store.bytes_at(PAGE)).sum::<usize>() * pages
    }

    /// Bytes per additional position once sliding windows and exact zones are full; rounded up.
    pub fn bytes_per_token(&self) -> usize {
        (self.bytes_at(FAR + PAGE) - self.bytes_at(FAR)).div_ceil(PAGE)
    }

    /// Whether two caches hold the same bits at every position that a future query can see.
    pub fn same_rows(&self, other: &Self) -> bool {
        let mut stores = self.stores.iter().zip(&other.stores);
        self.len == other.len && self.layout == other.layout && stores.all(|(a, b)| a.same(b, self.len))
    }
}
