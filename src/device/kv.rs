//! K and V on the device: pages allocated on demand, and page tables in device memory, of the same layout for all
//! sequences with the same options, so that one launch serves the rows of several.
//!
//! The layout is `crate::kv`'s: pages of 128 positions, rings for windows, an exact head and tail around
//! quantized pages. Rollback is a smaller length, held by the caller. One difference: with K = V, K's
//! rotary channels are stored in exact formats as well.

mod cache;
mod file;
mod recomputed_keys;
mod storage;

use std::ops::Range;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::attention::{
    ExactKv, QuantizedKv, Queries, SplitPartials, Zones, combine, exact, has_exact, has_quantized, quantized,
};
use foretoken_gpu::plan::attention_mixed::{KvPages, MixedKv, mixed};
use foretoken_gpu::plan::rows::{
    HeadNorm, Heads, KvDestination, Order, QuantizedQueries, Results, Rotary, Steps, rows,
};
use foretoken_gpu::plan::segments::{Place, Segments};
use foretoken_gpu::plan::turboquant::{encode, scale_group};

use super::Device;
use super::buffer::{Buffer, subslice};
use super::launcher::Launcher;
use super::pages::{Table, Tables};
use super::queue::Queue;
use super::temporaries::Temporary;
use crate::Result;
use crate::kv::{KvLayout, KvOptions, PAGE, StoreLayout, first_exact_page, not_finite};
pub(crate) use cache::DeviceKv;
use recomputed_keys::RecomputedKeys;
use storage::{Storage, StoragePlan};

/// Value of a fault word without a fault.
pub(crate) const NO_FAULT: u32 = u32::MAX;

/// Pages per split of attention over all positions, and in windows, which have few pages: a split is a thread
/// block. Fixed: they determine the order of summation.
const SPLIT_PAGES: usize = 2;
const WINDOW_SPLIT_PAGES: usize = 1;

/// Bytes of the split partials of one launch, at most; more rows are attended in several launches.
const MAX_PARTIAL_BYTES: usize = 64 << 20;

/// Rows per launch that memory limits: a multiple of this, if that many fit. Every launch reads K and V once.
const ROWS_AT_ONCE: usize = 16;

/// How sequences store K and V: formats and page tables. Sequences of one plan share launches.
pub(crate) struct KvPlan {
    id: u64,
    stores: Vec<Store>,
    store_of_layer: Vec<usize>,
    inverse_frequencies: Vec<f32>, // of layers with K = V
    tables: Tables,                // of a sequence
    options: KvOptions,            // without limits
    context: usize,                // positions that tables hold
}

/// The K and V of one layer.
struct Store {
    heads: usize,
    head_dim: usize,
    window: Option<usize>,
    order: Order,
    query_weight: Option<Buffer<f32>>, // (head_dim), if K = V
    recomputed_keys: Option<RecomputedKeys>,
    keys: Storage,
    values: Storage,
    zones: Option<Zones>,
}

/// The host's copy of a sequence's rows in a pass.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub first: usize,
    pub rows: usize,
    /// The first row's position, and the first position masked for the last row.
    pub position: usize,
    pub end: usize,
}

/// Rows of a pass, and their positions.
pub(crate) struct PassRows {
    pub places: DeviceSlice<Place>,
    pub rows: usize,
    pub segments: Segments,
    pub spans: Vec<Span>,
    /// Upper bound of positions when the recorded pass is replayed; `None` if it is not recorded.
    pub horizon: Option<usize>,
}

impl Span {
    /// The part that is in rows `first..first + count` of the pass. Rows at one constant position share a mask; each of
    /// several consecutive rows sees one position more than the row before.
    fn part(&self, first: usize, count: usize) -> Option<Self> {
        let start = self.first.max(first);
        let rows = (self.first + self.rows).min(first + count).checked_sub(start).filter(|rows| *rows > 0)?;
        if self.end == self.position {
            return Some(Self { first: start, rows, ..*self });
        }
        let position = self.position + start - self.first;
        Some(Self { first: start, rows, position, end: position + rows })
    }
}

impl PassRows {
    /// Splits that the queries need at any position up to the horizon; more are harmless.
    fn splits(&self, queries: &Queries) -> usize {
        match (self.horizon, queries.window) {
            (None, _) => {
                let parts = self.spans.iter().filter_map(|span| span.part(queries.first, queries.count));
                parts.map(|part| queries.splits(part.position, part.end)).max().unwrap_or(1)
            }
            (Some(horizon), None) => queries.splits(0, horizon),
            // The window and the rows after the first; they may straddle one split more than they fill.
            (Some(horizon), Some(window)) => {
                let split = queries.split_pages * PAGE;
                ((window + self.segments.longest - 1).div_ceil(split) + 1).min(horizon.div_ceil(split))
            }
        }
    }

    /// Rows of one launch from row `first` on, of the queries `of` a first row and a number of rows: as many as
    /// [`rows_at_once`] allows with the splits that these rows need. A row's partials take `per_split` bytes per split.
    fn rows_of_launch(
        &self,
        first: usize,
        of: impl Fn(usize, usize) -> Queries,
        (per_split, partial_bytes): (usize, usize),
    ) -> usize {
        let fits = |count: usize| {
            let queries = of(first, count);
            count <= rows_at_once(per_split * self.splits(&queries), partial_bytes, queries.max_rows())
        };
        let all = self.rows - first;
        if fits(all) {
            return all;
        }
        // A binary search: more rows need as many splits or more.
        let (mut fitting, mut too_many) = (1, all);
        while fitting + 1 < too_many {
            let count = usize::midpoint(fitting, too_many);
            (fitting, too_many) = if fits(count) { (count, too_many) } else { (fitting, count) };
        }
        fitting
    }
}

/// A projection of q, k or v, with the head norm and rotation to apply.
#[derive(Clone, Copy)]
pub(crate) struct Projection {
    pub x: DeviceSlice<f32>, // (rows, heads * stride)
    pub stride: usize,       // from head to head
    pub norm: Option<HeadNorm>,
    pub rotary: Option<Rotary>,
}

impl KvPlan {
    /// A plan whose tables hold `context` positions.
    ///
    /// # Errors
    /// If no kernel supports a format, or the device is out of memory.
    pub fn new(device: &dyn Device, layout: &KvLayout, options: &KvOptions, context: usize, id: u64) -> Result<Self> {
        let mut tables = Tables::default();
        let stores = layout.stores.iter().enumerate().map(|(i, store)| {
            let plan = StoragePlan::new(device, layout, i, options)?;
            Store::new(device, store, plan, options, context, &mut tables)
        });
        let stores = stores.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            id,
            stores,
            store_of_layer: layout.store_of_layer.clone(),
            inverse_frequencies: layout.inverse_frequencies.clone(),
            tables,
            options: options.without_limits(),
            context,
        })
    }

    /// Whether all rows that a query at `position` reads remain after positions below `written` were written.
    pub fn holds(&self, position: usize, written: usize) -> bool {
        self.stores.iter().all(|store| {
            let oldest = store.window.map_or(0, |window| (position + 1).saturating_sub(window));
            [&store.keys, &store.values].into_iter().all(|side| side.holds(oldest..position, written, store.zones))
        })
    }

    /// Identifies it among all plans of its models.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Rows of a pass, at most.
    pub fn max_rows(&self) -> usize {
        self.options.max_round_rows
    }

    /// Positions that its tables hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether it is the plan of these options.
    pub fn is_of(&self, options: &KvOptions, context: usize) -> bool {
        self.context == context && self.options == options.without_limits()
    }

    /// A function from an end position to the bytes allocated once positions below it were written.
    ///
    /// # Errors
    /// If no kernel supports a format.
    pub fn bytes_at(device: &dyn Device, layout: &KvLayout, options: &KvOptions) -> Result<impl Fn(usize) -> usize> {
        let mut tables = Tables::default();
        let stores = layout.stores.iter().enumerate().map(|(i, store)| {
            let plan = StoragePlan::new(device, layout, i, options)?;
            let sides = plan.sides(store, options, 0, &mut tables);
            Ok((sides, plan.zones))
        });
        let stores = stores.collect::<Result<Vec<_>>>()?;
        Ok(move |end: usize| {
            let of = |(sides, zones): &([Storage; 2], Option<Zones>)| {
                sides.iter().map(|storage| storage.bytes_at(end, *zones)).fold(0, usize::saturating_add)
            };
            stores.iter().map(of).fold(0, usize::saturating_add)
        })
    }

    /// The storage of K and of V of every store, and its exact zones.
    fn sides(&self) -> impl Iterator<Item = (&Storage, Option<Zones>)> {
        self.stores.iter().flat_map(|store| [&store.keys, &store.values].map(|side| (side, store.zones)))
    }

    /// The tables, and the number of pages in each after positions below `end` were written.
    fn held(&self, end: usize) -> impl Iterator<Item = (&Table, usize)> {
        self.sides().flat_map(move |(side, zones)| side.held(end, zones))
    }

    /// The tables, and the pages in each that a pass over positions `first..end` writes.
    fn written(&self, first: usize, end: usize) -> impl Iterator<Item = (&Table, Range<usize>)> {
        self.sides().flat_map(move |(side, zones)| {
            let leaving =
                zones.map_or(0..0, |Zones { tail, .. }| first_exact_page(first, tail)..first_exact_page(end, tail));
            let quantized = side.quantized.iter().map(move |(_, table)| (table, leaving.clone()));
            [(&side.exact, first / PAGE..end.div_ceil(PAGE))].into_iter().chain(quantized)
        })
    }

    /// Whether the pages that leave an exact tail in a pass of `rows` rows were complete before it.
    pub fn completes_pages_before(&self, rows: usize) -> bool {
        self.stores.iter().all(|store| store.zones.is_none_or(|zones| rows <= zones.tail))
    }

    /// Quantizes the pages that leave the exact tail in a pass. `tables` are those of each segment.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn quantize_pages(&self, queue: &Queue, spans: &[Span], tables: &[DeviceSlice<u64>]) -> Result<()> {
        self.stores.iter().try_for_each(|store| store.quantize_pages(queue, spans, tables))
    }

    /// Stores the rows of a layer's K and V; unless the pass is recorded, then quantizes the pages that left the exact
    /// tail. `tables` are those of each segment; `faults` has [`fault_words`].
    pub fn append(
        &self,
        queue: &Queue,
        layer: usize,
        (k, v): (Projection, Projection),
        pass: &PassRows,
        (tables, faults): (&[DeviceSlice<u64>], DeviceSlice<u32>),
    ) -> Result<()> {
        let store = &self.stores[self.store_of_layer[layer]];
        let (order, heads) = (store.order, store.heads);
        for (i, (storage, projection)) in [(&store.keys, k), (&store.values, v)].into_iter().enumerate() {
            let domain = storage.domain();
            let steps = Steps { norm: projection.norm, rotary: projection.rotary, order, weight: None, domain };
            let to = KvDestination {
                pages: storage.exact.pages(),
                element: storage.element,
                places: pass.places,
                segments: pass.segments,
                fault: subslice(faults, 2 * self.store_of_layer[layer] + i, 1),
            };
            let results = Results { channels: storage.channels, rows: None, quantized: None, store: Some(to) };
            let heads =
                Heads { x: projection.x, rows: pass.rows, heads, head_dim: store.head_dim, stride: projection.stride };
            queue.launcher.run(rows(&heads, &steps, &results))?;
        }
        if pass.horizon.is_some() { Ok(()) } else { store.quantize_pages(queue, &pass.spans, tables) }
    }

    /// The attention of `heads` query heads per row over the store that the target's layer `layer` reads: `y` is
    /// `(rows, heads * head_dim)`.
    pub fn attend(
        &self,
        queue: &Queue,
        layer: usize,
        q: Projection,
        heads: usize,
        pass: &PassRows,
        y: DeviceSlice<f32>,
    ) -> Result<()> {
        let store = &self.stores[self.store_of_layer[layer]];
        let (head_dim, domain, launcher) = (store.head_dim, store.values.domain(), &queue.launcher);
        let prepared = store.prepare_queries(queue, q, heads, pass.rows)?;
        let query_rows = prepared.rows.slice();

        let parts = if store.zones.is_some() { 2 } else { 1 };
        let of = |first: usize, count: usize| Queries {
            rows: subslice(query_rows, first * heads * head_dim, count * heads * head_dim),
            places: pass.places,
            segments: pass.segments,
            first,
            count,
            heads,
            kv_heads: store.heads,
            head_dim,
            window: store.window,
            zones: store.zones,
            split_pages: if store.window.is_some() { WINDOW_SPLIT_PAGES } else { SPLIT_PAGES },
        };
        let bytes = (parts * heads * (4 * head_dim + 8), queue.partial_bytes);
        let mut first = 0;
        while first < pass.rows {
            let count = pass.rows_of_launch(first, of, bytes);
            let queries = of(first, count);
            let splits = pass.splits(&queries);
            let slots = parts * splits * count * heads;
            let (softmax, output) = (queue.take::<[f32; 2]>(slots)?, queue.take(slots * head_dim)?);
            let partials = SplitPartials { softmax: softmax.slice(), output: output.slice(), splits };
            let sides = [&store.keys, &store.values];
            store.attend_pages(launcher, &queries, sides.map(Storage::exact_pages), &prepared, &partials)?;
            if store.zones.is_some() {
                store.attend_pages(launcher, &queries, sides.map(Storage::quantized_pages), &prepared, &partials)?;
            }
            let y = subslice(y, first * heads * head_dim, count * heads * head_dim);
            launcher.run(combine(&queries, &partials, domain, store.order, y))?;
            first += count;
        }
        Ok(())
    }
}

/// Number of fault words of a pass: for K and V of every store, the first position with NaN or infinity. Their initial
/// value is [`NO_FAULT`].
pub(crate) fn fault_words(layout: &KvLayout) -> usize {
    2 * layout.stores.len()
}

/// Checks the fault words of a pass.
///
/// # Errors
/// The first layer's K or V that is NaN, infinite, or too large.
pub(crate) fn check_faults(store_of_layer: &[usize], faults: &[u32]) -> Result<()> {
    let layers = store_of_layer.iter().enumerate().filter(|(_, store)| **store != KvLayout::NO_STORE);
    let found = layers.flat_map(|(layer, store)| [(layer, "K", 2 * store), (layer, "V", 2 * store + 1)]);
    match found.map(|(layer, name, at)| (layer, name, faults[at])).find(|(.., position)| *position != NO_FAULT) {
        None => Ok(()),
        Some((layer, name, position)) => Err(not_finite(name, layer, position as usize, None)),
    }
}

/// Rows of one launch, from 1 to `most`, if the split partials of a row take `per_row` bytes: as many as fit in
/// [`MAX_PARTIAL_BYTES`]; up to [`ROWS_AT_ONCE`], whose partials take more at depth, as many as fit in `partial_bytes`.
/// A row's bits do not depend on it: splits are at fixed positions.
fn rows_at_once(per_row: usize, partial_bytes: usize, most: usize) -> usize {
    let many = (MAX_PARTIAL_BYTES / per_row).min(most) / ROWS_AT_ONCE * ROWS_AT_ONCE;
    match many {
        0 => (partial_bytes.max(MAX_PARTIAL_BYTES) / per_row).clamp(1, ROWS_AT_ONCE).min(most),
        many => many,
    }
}

/// The queries of a pass, as a store's keys are: f32, and for quantized keys also as i8 with scales.
struct PreparedQueries {
    rows: Temporary<f32>,  // (rows, heads, head_dim)
    words: Temporary<u32>, // 4 i8 each
    scales: Temporary<f32>,
}

impl Store {
    fn new(
        device: &dyn Device,
        layout: &StoreLayout,
        plan: StoragePlan,
        options: &KvOptions,
        context: usize,
        tables: &mut Tables,
    ) -> Result<Self> {
        let [keys, values] = plan.sides(layout, options, context, tables);
        let weight = layout.k_eq_v.clone().filter(|_| plan.recomputes_keys);
        let rotary_first = plan.rotary_first.as_ref();
        Ok(Self {
            heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            window: layout.window,
            order: rotary_first
                .map_or(Order::Model, |rotary_first| Order::RotaryFirst(rotary_first.rotary_channels() / 2)),
            query_weight: rotary_first
                .map(|rotary_first| Buffer::of(device, rotary_first.query_weight()))
                .transpose()?,
            keys,
            values,
            zones: plan.zones,
            recomputed_keys: weight.map(|weight| RecomputedKeys { weight, rotary_first: plan.rotary_first }),
        })
    }

    /// See [`KvPlan::quantize_pages`]. Rows written again quantize their pages again.
    fn quantize_pages(&self, queue: &Queue, spans: &[Span], tables: &[DeviceSlice<u64>]) -> Result<()> {
        let Some(Zones { tail, .. }) = self.zones else { return Ok(()) };
        for (span, tables) in spans.iter().zip(tables) {
            let pages = first_exact_page(span.position, tail)..first_exact_page(span.end, tail);
            for storage in [&self.keys, &self.values].into_iter().filter(|_| !pages.is_empty()) {
                let Some((layout, quantized)) = &storage.quantized else { continue };
                let (from, to) = ((&storage.exact.pages(), storage.element), quantized.pages());
                queue.launcher.run(encode(*layout, *tables, from, &to, pages.clone(), self.heads))?;
            }
        }
        Ok(())
    }

    /// Normalizes, rotates and quantizes the queries `q` of `rows` rows as the keys of this store are.
    fn prepare_queries(&self, queue: &Queue, q: Projection, heads: usize, row_count: usize) -> Result<PreparedQueries> {
        let len = row_count * heads * self.head_dim;
        // 4 i8 per word; a scale is of at least 32 elements.
        let prepared = PreparedQueries {
            rows: queue.take(len)?,
            words: queue.take(len.div_ceil(4))?,
            scales: queue.take(len.div_ceil(32))?,
        };
        let steps = Steps {
            norm: q.norm,
            rotary: q.rotary,
            order: self.order,
            weight: self.query_weight.as_ref().map(Buffer::slice),
            domain: self.keys.domain(),
        };
        let (words, scales) = (prepared.words.slice(), prepared.scales.slice());
        let format = self.keys.quantized.as_ref().map(|(layout, _)| layout.format());
        let results = Results {
            channels: self.head_dim,
            rows: Some(prepared.rows.slice()),
            quantized: format.map(|format| QuantizedQueries { format, words, scales }),
            store: None,
        };
        queue.launcher.run(rows(
            &Heads { x: q.x, rows: row_count, heads, head_dim: self.head_dim, stride: q.stride },
            &steps,
            &results,
        ))?;
        Ok(prepared)
    }

    /// Launches the attention of `queries` over the exact or the quantized pages `[keys, values]`, with the
    /// fastest kernel for the formats.
    fn attend_pages(
        &self,
        launcher: &Launcher,
        queries: &Queries,
        [keys, values]: [KvPages; 2],
        prepared: &PreparedQueries,
        partials: &SplitPartials,
    ) -> Result<()> {
        let part = |per_row: usize| (queries.first * per_row, queries.count * per_row);
        let elements = queries.heads * self.head_dim;
        let (first, words) = part(elements / 4);
        let query_words = subslice(prepared.words.slice(), first, words);
        let scales = self.keys.quantized.as_ref().map_or(0, |(layout, _)| elements / scale_group(*layout));
        let (first, scales) = part(scales);
        let query_scales = subslice(prepared.scales.slice(), first, scales);
        match (keys, values) {
            (KvPages::Exact(keys, element), KvPages::Exact(values, of_values))
                if has_exact(self.head_dim, element, of_values) =>
            {
                let kv = ExactKv { keys, values, element, rotary_channels: self.keys.channels };
                launcher.run(exact(queries, &kv, partials))
            }
            (KvPages::Quantized(keys, key_layout), KvPages::Quantized(values, value_layout))
                if has_quantized(key_layout, value_layout) =>
            {
                let kv = QuantizedKv { keys, values, key_layout, value_layout, query_words, query_scales };
                launcher.run(quantized(queries, &kv, partials))
            }
            (keys, values) => {
                launcher.run(mixed(queries, &MixedKv { keys, values, query_words, query_scales }, partials))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use foretoken_kernels::{ElementType, Isa};

    use super::*;
    use crate::Error;
    use crate::device::addresses::Addresses;
    use crate::device::pages::PageMemory;
    use crate::device::temporaries::Temporaries;
    use crate::kv::{CodeFormat, ExactZones, KvCache, LayerFormat, PagePool};

    /// Of windows and of exact zones, in exact and in quantized pages.
    #[test]
    fn rows_remain_where_the_cache_of_the_host_has_them() {
        let store = |window| StoreLayout { num_kv_heads: 1, head_dim: 32, window, k_eq_v: None };
        let stores = vec![store(Some(100)), store(None)];
        let layout = KvLayout { stores, store_of_layer: vec![0, 1], inverse_frequencies: Vec::new() };
        let quantized = |layer| LayerFormat { layer, key: CodeFormat::Tqc5.into(), value: CodeFormat::Tqc4.into() };
        for layers in [vec![], vec![quantized(1)], vec![quantized(0), quantized(1)]] {
            let (key, value) = (ElementType::F16.into(), ElementType::F16.into());
            let exact = ExactZones { head: 20, tail: 10, ..ExactZones::default() };
            let options = KvOptions { key, value, exact, layers, max_round_rows: 40, ..KvOptions::default() };
            let plan = KvPlan::new(&Addresses::default(), &layout, &options, 4096, 0).expect("a plan");
            let mut cache = KvCache::new(layout.clone(), &options, 4096, Isa::best()).expect("a cache");
            let mut lost = 0;
            for written in (0..1000).step_by(37) {
                for position in (0..=written).step_by(9) {
                    cache.set_len(written, written);
                    let remain = plan.holds(position, written);
                    assert_eq!(remain, cache.rewind(position).is_ok(), "{position} of {written}, {:?}", options.layers);
                    lost += usize::from(!remain);
                }
            }
            assert!(lost > 0, "{:?}", options.layers);
        }
    }

    /// Kernels would read the next table's entries.
    #[test]
    fn tables_end_at_their_context() {
        let device: Arc<dyn Device> = Arc::new(Addresses::default());
        let stores = vec![StoreLayout { num_kv_heads: 1, head_dim: 32, window: None, k_eq_v: None }];
        let layout = KvLayout { stores, store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        let plan = KvPlan::new(&*device, &layout, &KvOptions::default(), 300, 0).expect("a plan");
        let memory = Arc::new(PageMemory::new(device.clone(), PagePool::new(None)));
        let launcher = Launcher::new(Temporaries::new(device));
        let mut kv = DeviceKv::new(memory, Arc::new(plan)).expect("tables");
        kv.reserve(&launcher, 0, 300).expect("pages");
        let error = kv.reserve(&launcher, 300, 400).expect_err("no entries");
        assert!(matches!(error, Error::Context { needed: 400, limit: 300 }), "{error}");
    }

    /// Rows of each launch over a pass of sequences with these positions and rows: 32 heads of 512 channels.
    fn launches(sequences: &[(usize, usize)]) -> Vec<usize> {
        let (mut spans, mut rows) = (Vec::new(), 0);
        for (position, count) in sequences {
            spans.push(Span { first: rows, rows: *count, position: *position, end: position + count });
            rows += count;
        }
        let longest = spans.iter().map(|span| span.rows).max().unwrap_or(0);
        let segments = Segments { slice: DeviceSlice::new(0, spans.len()), count: spans.len(), longest };
        let places = DeviceSlice::new(0, rows);
        let of = |first: usize, count: usize| Queries {
            rows: DeviceSlice::new(0, count * 32 * 512),
            places,
            segments,
            first,
            count,
            heads: 32,
            kv_heads: 4,
            head_dim: 512,
            window: None,
            zones: None,
            split_pages: SPLIT_PAGES,
        };
        let pass = PassRows { places, rows, segments, spans, horizon: None };
        let (mut launches, mut first) = (Vec::new(), 0);
        while first < rows {
            launches.push(pass.rows_of_launch(first, of, (32 * (4 * 512 + 8), 0)));
            first += launches[launches.len() - 1];
        }
        launches
    }

    /// A deep sequence does not divide the rows of a shallow prompt.
    #[test]
    fn launches_have_the_splits_of_their_own_rows() {
        let (prompt, deep) = ((0, 512), (128 << 10, 1));
        assert_eq!(launches(&[prompt]), [496, 16]);
        assert_eq!(launches(&[prompt, deep]), [496, 16, 1]);
        assert_eq!(launches(&[deep, prompt]), [1, 496, 16]);
        assert_eq!(launches(&[deep; 3]), [1; 3]);
    }

    #[test]
    fn partials_fit_their_memory_at_any_depth() {
        // 31B, K and V quantized: two stores, 32 heads of 512 channels, splits of 256 positions.
        let per_row = |depth: usize| 2 * depth.div_ceil(SPLIT_PAGES * PAGE) * 32 * (4 * 512 + 8);
        for depth in [1, 4 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10] {
            for partial_bytes in [0, 96 << 20, 512 << 20, 4 << 30] {
                let (per_row, most) = (per_row(depth), 1000);
                let rows = rows_at_once(per_row, partial_bytes, most);
                let bytes = rows * per_row;
                assert!(rows == 1 || bytes <= partial_bytes.max(MAX_PARTIAL_BYTES), "{depth} {partial_bytes}: {rows}");
                assert!(rows > 0 && (rows <= ROWS_AT_ONCE || rows.is_multiple_of(ROWS_AT_ONCE)), "{depth}: {rows}");
            }
        }
        assert_eq!(rows_at_once(per_row(4 << 10), 0, 1000), 16, "as many as 64 MiB hold");
        assert_eq!(rows_at_once(per_row(1), 0, 1000), 496, "as many as 64 MiB hold");
        assert_eq!(rows_at_once(per_row(32 << 10), 0, 1000), 3);
        assert_eq!(rows_at_once(per_row(32 << 10), 512 << 20, 1000), 16);
        assert_eq!(rows_at_once(per_row(1), 0, 324), 320, "what the grid holds");
        assert_eq!(rows_at_once(per_row(1), 0, 5), 5);
    }
}
