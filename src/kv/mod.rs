//! The KV cache: it owns every byte of K and V, and attention is one of its operations, so nobody else sees them.
//!
//! * [`KvCache`] holds the rows of every layer that computes K and V; KV-shared layers and the drafter read a donor's.
//! * [`Round`] stages new rows; [`Round::commit`] keeps the first of them, dropping it keeps none.
//! * [`Committed`] is the drafter's read-only view: committed rows, one constant position.

mod attend;
mod round;
mod rows;

pub use round::{Borrowed, Committed, KvAccess, Round};

use foretoken_kernels::{ElementType, Isa};

use crate::{Error, Result};
use rows::Rows;

/// Positions per page. Pages are the unit of allocation and, because their boundaries are fixed in the sequence, the
/// tiles that attention is summed over: see [`attend`].
pub(crate) const PAGE: usize = 128;

/// The K/V of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreLayout {
    /// K/V heads.
    pub num_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Positions that a query sees, its own included; `None` sees all.
    pub window: Option<usize>,
}

/// The K/V of a model: one store per layer that computes its own, and which store every layer reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// The stores.
    pub stores: Vec<StoreLayout>,
    /// For each layer of the target, the store that it reads (its own, or its donor's).
    pub store_of_layer: Vec<usize>,
}

/// How rows are kept, and how many.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvOptions {
    /// Type of the keys. Default: f16.
    pub key: ElementType,
    /// Type of the values. Default: f16.
    pub value: ElementType,
    /// Positions that fit. Default: what the model was made for.
    pub max_context: Option<usize>,
    /// Rows that one round may stage (a prefill chunk, a verify batch). Sliding layers keep this many rows beyond their
    /// window, so that a round can be rolled back. Default: 512.
    pub max_round_rows: usize,
}

impl Default for KvOptions {
    fn default() -> Self {
        Self { key: ElementType::F16, value: ElementType::F16, max_context: None, max_round_rows: 512 }
    }
}

/// The K and V of every committed position.
pub struct KvCache {
    layout: KvLayout,
    stores: Vec<Store>,
    len: usize,
    max_context: usize,
    max_round_rows: usize,
    isa: Isa,
}

struct Store {
    layout: StoreLayout,
    keys: Rows,
    values: Rows,
}

impl KvCache {
    /// An empty cache; `default_context` holds where the options name no limit.
    ///
    /// # Errors
    /// If an option is zero.
    pub fn new(layout: KvLayout, options: &KvOptions, default_context: usize, isa: Isa) -> Result<Self> {
        let max_context = options.max_context.unwrap_or(default_context);
        if max_context == 0 || options.max_round_rows == 0 {
            return Err(Error::Input("the context and the rows of a round must be at least 1".into()));
        }
        let stores = layout.stores.iter().map(|layout| {
            // A ring needs the window of the oldest query and the rows of one round; whole pages keep page boundaries
            // fixed in the sequence.
            let pages = layout.window.map(|window| (window - 1).saturating_add(options.max_round_rows).div_ceil(PAGE));
            Store {
                keys: Rows::new(options.key, layout.num_kv_heads, layout.head_dim, pages),
                values: Rows::new(options.value, layout.num_kv_heads, layout.head_dim, pages),
                layout: layout.clone(),
            }
        });
        let stores = stores.collect();
        Ok(Self { layout, stores, len: 0, max_context, max_round_rows: options.max_round_rows, isa })
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

    /// Bytes of K and V held.
    pub fn bytes(&self) -> usize {
        self.stores.iter().map(|store| store.keys.bytes() + store.values.bytes()).sum()
    }

    /// Bytes that one more position adds once the sliding windows are full.
    pub fn bytes_per_token(&self) -> usize {
        let full = self.stores.iter().filter(|store| store.layout.window.is_none());
        full.map(|store| store.keys.bytes_per_position() + store.values.bytes_per_position()).sum()
    }

    /// Whether two caches hold bit-equal rows at every position that a future query can see.
    pub fn same_rows(&self, other: &Self) -> bool {
        self.len == other.len
            && self.layout == other.layout
            && self.stores.iter().zip(&other.stores).all(|(a, b)| {
                let oldest = a.layout.window.map_or(0, |window| (self.len + 1).saturating_sub(window));
                (oldest..self.len)
                    .all(|position| a.keys.position_eq(&b.keys, position) && a.values.position_eq(&b.values, position))
            })
    }
}
