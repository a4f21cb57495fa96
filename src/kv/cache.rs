//! The K and V of the committed positions of a sequence.

use foretoken_kernels::Isa;

use super::format::KvFormat;
use super::k_eq_v::AngleTable;
use super::layout::{KvLayout, PAGE};
use super::options::KvOptions;
use super::pool::{HeldPage, PagePool, SharedPage};
use super::store::Store;
use crate::{Error, Result};

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
    pub(super) layout: KvLayout,
    pub(super) stores: Vec<Store>,
    pub(super) len: usize,
    pub(super) written: usize, // positions below it may have been written, committed or not
    pub(super) max_context: usize,
    pub(super) max_round_rows: usize,
    pub(super) angles: AngleTable,
    pub(super) pool: PagePool,
    pub(super) isa: Isa,
}

impl KvCache {
    /// An empty cache with its own page pool. `default_context` applies if the options set no `max_context`.
    ///
    /// # Errors
    /// If an option is out of its range, heads of this width cannot be quantized, or the context does not fit memory.
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
        // An empty table, if no keys are derived.
        let derives_keys = stores.iter().any(Store::derives_keys);
        let frequencies = if derives_keys { layout.inverse_frequencies.clone() } else { Vec::new() };
        let angles = AngleTable::new(frequencies, isa);
        let (pool, max_round_rows) = (pool.clone(), options.max_round_rows);
        let memory = [options.memory, pool.available()].into_iter().flatten().min();
        let memory = memory.or_else(|| pool.available_memory());
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

    /// Truncates to the first `len` positions. This requires that no row that a query there reads was overwritten: a
    /// ring retains the rows of one round beyond its window, and so does an exact tail.
    ///
    /// # Errors
    /// If there are fewer positions, or such a row was overwritten. Nothing changes then.
    pub fn rewind(&mut self, len: usize) -> Result<()> {
        let problem = format!("{} positions cannot be truncated to {len}", self.len);
        if len > self.len {
            return Err(Error::argument("len", problem));
        }
        if !self.can_rewind(len) {
            let problem = format!("{problem}: rows of a sliding window were overwritten; start a new session");
            return Err(Error::argument("len", problem));
        }
        self.len = len;
        if len == 0 {
            // No row is read that was written before.
            self.written = 0;
        }
        Ok(())
    }

    /// Whether [`KvCache::rewind`] to `len` positions is possible.
    pub(crate) fn can_rewind(&self, len: usize) -> bool {
        len <= self.len && self.stores.iter().all(|store| store.holds(len, self.written))
    }

    /// Frees the pages that only rows after the committed ones took.
    pub(crate) fn trim(&mut self) {
        self.stores.iter_mut().for_each(|store| store.trim(self.len));
        self.angles.trim(self.len);
    }

    /// The layers' stores.
    pub(crate) fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Committed positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Positions below it were written, committed or not, since the cache was last empty.
    pub(crate) fn written(&self) -> usize {
        self.written
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
        self.pages().map(|page| page.as_slice().len()).sum()
    }

    /// Its pages, including those shared with forks.
    pub(crate) fn held_pages(&self) -> impl Iterator<Item = HeldPage> {
        self.pages().map(|page| HeldPage::of(page, page.as_slice().len()))
    }

    fn pages(&self) -> impl Iterator<Item = &SharedPage> {
        self.stores.iter().flat_map(Store::held_pages).chain(self.angles.held_pages())
    }

    /// Bytes after positions below `end` were written.
    pub fn bytes_at(&self, end: usize) -> usize {
        self.written_bytes(end).saturating_add(self.angles.bytes_at(end))
    }

    /// An upper bound of the page bytes that a round of `rows` rows takes, including copies of shared pages.
    pub(crate) fn bytes_of_round(&self, rows: usize) -> usize {
        let end = self.len.saturating_add(rows).min(self.max_context);
        if end <= self.len {
            return 0;
        }
        let angles = self.angles.bytes_at(end).saturating_sub(self.angles.bytes());
        self.stores.iter().map(|store| store.bytes_to_reserve(self.len..end)).sum::<usize>() + angles
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

#[cfg(test)]
mod tests {
    use foretoken_kernels::attention::turboquant::CodeFormat;

    use super::*;
    use crate::kv::StoreLayout;

    /// With every page shared by a fork or none, at positions around the ends of pages and of the exact tail.
    #[test]
    fn a_round_takes_no_more_than_its_bound() {
        let store = StoreLayout { num_kv_heads: 1, head_dim: 16, window: None, k_eq_v: None };
        let layout = KvLayout { stores: vec![store], store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        for format in [KvFormat::Exact(crate::ElementType::F16), CodeFormat::Tqc5.into()] {
            let options = KvOptions { key: format, value: format, ..KvOptions::default() };
            let lengths = [126, 128, 510, 638];
            let rounds = lengths.iter().flat_map(|len| [1, 4, 128, 130, 256].map(|rows| (*len, rows)));
            for ((len, rows), is_shared) in rounds.flat_map(|round| [(round, true), (round, false)]) {
                let pool = PagePool::new(None);
                let mut cache = KvCache::in_pool(layout.clone(), &options, 4096, Isa::best(), &pool).expect("a cache");
                let write = |cache: &mut KvCache, rows: usize| {
                    let zeros = vec![0.0; rows * 16];
                    let written = cache.stores[0].write(&pool, Isa::best(), 0, cache.len, &zeros, &zeros);
                    written.expect("pages");
                    cache.len += rows;
                };
                write(&mut cache, len);
                let fork = is_shared.then(|| cache.fork());
                let (bound, before) = (cache.bytes_of_round(rows) as u64, pool.held());
                write(&mut cache, rows);
                let taken = pool.held() - before;
                assert_eq!(taken, bound, "{format}: {rows} rows after {len}, shared: {is_shared}");
                drop(fork);
            }
        }
    }

    /// The rows of later rounds are those of a cache that had no such round.
    #[test]
    fn a_dropped_round_has_no_pages_once_they_are_freed() {
        let store = StoreLayout { num_kv_heads: 1, head_dim: 16, window: None, k_eq_v: None };
        let layout = KvLayout { stores: vec![store], store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        let write = |cache: &mut KvCache, rows: usize, keep: usize| {
            let x: Vec<f32> = (0..16 * rows).map(|i| ((16 * cache.len + i) as f32).sin()).collect();
            let pool = cache.pool.clone();
            cache.stores[0].write(&pool, Isa::best(), 0, cache.len, &x, &x).expect("pages");
            cache.len += keep;
        };
        for format in [KvFormat::Exact(crate::ElementType::F16), CodeFormat::Tqc5.into()] {
            let options = KvOptions { key: format, value: format, ..KvOptions::default() };
            for len in [1, 126, 128, 510, 640, 700] {
                let [mut freed, mut fresh] = [(); 2].map(|()| {
                    let mut cache = KvCache::new(layout.clone(), &options, 4096, Isa::best()).expect("a cache");
                    write(&mut cache, len, len);
                    cache
                });
                write(&mut freed, 300, 0);
                freed.trim();
                assert_eq!(freed.bytes(), fresh.bytes(), "{format}: {len} rows");
                write(&mut freed, 200, 200);
                write(&mut fresh, 200, 200);
                assert!(freed.same_rows(&fresh), "{format}: rows after {len}");
            }
        }
    }
}
