//! The K and V of one layer.

use std::ops::Range;

use foretoken_kernels::attention::turboquant::{CodeFormat, RotationGroups, Side};
use foretoken_kernels::attention::{KvBlock, KvRows};
use foretoken_kernels::{Elements, Isa};

use super::exact::{ExactRows, NotFinite, not_finite};
use super::format::{ExactZones, KvFormat};
use super::k_eq_v::{AngleTable, RotaryFirst};
use super::layout::{PAGE, StoreLayout};
use super::options::{KEqV, KvOptions};
use super::pool::{PagePool, SharedPage};
use super::quantized::QuantizedPages;
use super::ring::{Retention, first_exact_page, visible};
use crate::Result;

/// The K and V of one layer. A clone shares the pages.
#[derive(Clone)]
pub(super) struct Store {
    pub layout: StoreLayout,
    keys: Keys,
    values: Storage,
    zones: ExactZones,
}

/// Source of the keys.
#[derive(Clone)]
enum Keys {
    /// Stored as K.
    Stored(Storage),
    /// K = V, exact: computed from V while reading, with this key norm weight (see `k_eq_v`).
    FromValues(Vec<f32>),
    /// K = V, quantized: the rotary channels are stored, quantized V serves for the others (see `k_eq_v`).
    RotaryStored(RotaryFirst, Storage),
}

/// Storage of K, or of V.
#[derive(Clone)]
struct Storage {
    exact: ExactRows,
    /// What is between the exact head and tail; `None` if all is exact.
    quantized: Option<QuantizedPages>,
}

/// How a query reads a key: exact in the head and tail zones, quantized between them, if the store is quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    Exact,
    Quantized,
}

impl Store {
    /// # Errors
    /// If the format does not support the head width.
    pub(super) fn new(
        layout: &StoreLayout,
        rotating_pairs: usize,
        (key, value): (KvFormat, KvFormat),
        options: &KvOptions,
    ) -> Result<Self> {
        let storage = |width, format, side| Storage::new(layout, width, format, side, options);
        let width = layout.head_dim;
        let stored = || -> Result<Keys> { Ok(Keys::Stored(storage(width, key, Side::Keys)?)) };
        let (keys, values) = match (&layout.k_eq_v, key, value, options.k_eq_v) {
            (Some(weight), KvFormat::Exact(k), KvFormat::Exact(v), KEqV::Recomputed) if k == v => {
                (Keys::FromValues(weight.clone()), storage(width, value, Side::Values)?)
            }
            (Some(_), KvFormat::Quantized(_), KvFormat::Quantized(_), KEqV::Recomputed) => {
                match RotaryFirst::of(layout, rotating_pairs) {
                    // V serves as K, so it takes the key format.
                    Some(rotary_first) => {
                        let rotary = storage(rotary_first.rotary_channels(), key, Side::Keys)?;
                        (Keys::RotaryStored(rotary_first, rotary), storage(width, key, Side::KEqV)?)
                    }
                    None => (stored()?, storage(width, value, Side::Values)?),
                }
            }
            _ => (stored()?, storage(width, value, Side::Values)?),
        };
        Ok(Self { layout: layout.clone(), keys, values, zones: options.exact })
    }

    /// Key format (`None` if no keys are stored) and value format.
    pub(super) fn formats(&self) -> (Option<KvFormat>, KvFormat) {
        (self.stored_keys().map(Storage::format), self.values.format())
    }

    fn stored_keys(&self) -> Option<&Storage> {
        match &self.keys {
            Keys::Stored(keys) | Keys::RotaryStored(_, keys) => Some(keys),
            Keys::FromValues(_) => None,
        }
    }

    /// Whether keys are computed from values while reading.
    pub(super) fn derives_keys(&self) -> bool {
        matches!(self.keys, Keys::FromValues(_))
    }

    /// Whether exact keys need the caller's buffer: see [`Store::block`].
    pub(super) fn assembles_keys(&self) -> bool {
        !matches!(self.keys, Keys::Stored(_))
    }

    /// The channel order if quantized V serves as K.
    pub(super) fn rotary_first(&self) -> Option<&RotaryFirst> {
        match &self.keys {
            Keys::RotaryStored(rotary_first, _) => Some(rotary_first),
            Keys::Stored(_) | Keys::FromValues(_) => None,
        }
    }

    /// Quantization of the stored keys.
    pub(super) fn key_quantization(&self) -> Option<(CodeFormat, RotationGroups)> {
        self.stored_keys()?.quantization()
    }

    /// Quantization of the values.
    pub(super) fn value_quantization(&self) -> Option<(CodeFormat, RotationGroups)> {
        self.values.quantization()
    }

    /// Quantization of the values if they serve as keys (K = V).
    pub(super) fn values_as_keys(&self) -> Option<(CodeFormat, RotationGroups)> {
        self.rotary_first().and(self.value_quantization())
    }

    /// The readings that occur within a page.
    pub(super) fn readings(&self) -> &'static [Reading] {
        if self.is_quantized() { &[Reading::Exact, Reading::Quantized] } else { &[Reading::Exact] }
    }

    fn is_quantized(&self) -> bool {
        self.key_quantization().or(self.value_quantization()).is_some()
    }

    /// K and V of one head in page `page` of the sequence: the first `len` rows if exact, the whole page if quantized.
    /// `assembled` `(PAGE, head_dim)` receives exact keys that are not stored as such ([`Store::assembles_keys`]).
    pub(super) fn block<'a>(
        &'a self,
        reading: Reading,
        (page, head, len): (usize, usize, usize),
        angles: &AngleTable,
        assembled: &'a mut [f32],
    ) -> KvBlock<'a> {
        let values = self.values.rows(reading, page, head, len);
        let head_dim = self.layout.head_dim;
        let keys = match (&self.keys, values) {
            (Keys::Stored(keys), _) => keys.rows(reading, page, head, len),
            (Keys::RotaryStored(_, rotary), KvRows::Quantized(values)) => match rotary.rows(reading, page, head, len) {
                KvRows::Quantized(rotary) => KvRows::KEqV { rotary, values },
                other => other,
            },
            (Keys::FromValues(weight), KvRows::Exact(rows)) => {
                let keys = &mut assembled[..rows.len()];
                angles.keys(page, rows, weight, keys);
                KvRows::Exact(Elements::F32(keys))
            }
            (Keys::RotaryStored(rotary_first, rotary), values) => {
                let keys = &mut assembled[..len * head_dim];
                rotary_first.join_keys(rotary.rows(reading, page, head, len), values, keys);
                KvRows::Exact(Elements::F32(keys))
            }
            (Keys::FromValues(_), values) => values,
        };
        KvBlock { keys, values, head_dim }
    }

    /// The positions visible to a query at `at.start`, up to `at.end`: see [`visible`].
    pub(super) fn visible(&self, at: Range<usize>) -> Range<usize> {
        visible(self.layout.window, at)
    }

    /// The rows of `page`, counted from its first, that are visible to a query ([`Store::visible`]) and that it reads
    /// by `reading`. They depend only on the query's position, so a row's bits do not depend on its batch.
    pub(super) fn visible_in_page(&self, reading: Reading, page: usize, at: Range<usize>) -> Range<usize> {
        let in_page = |position: usize| position.clamp(page * PAGE, (page + 1) * PAGE) - page * PAGE;
        let quantized_from = match page {
            _ if !self.is_quantized() || page >= first_exact_page(at.start, self.zones.tail) => PAGE,
            0 => self.zones.head,
            _ => 0,
        };
        let visible = self.visible(at);
        let (start, end) = (in_page(visible.start), in_page(visible.end));
        let end = end.max(start);
        match reading {
            Reading::Exact => start.min(quantized_from)..end.min(quantized_from),
            Reading::Quantized => start.max(quantized_from)..end.max(quantized_from),
        }
    }

    /// Bytes after positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        self.storages().map(|storage| storage.bytes_at(end)).fold(0, usize::saturating_add)
    }

    /// An upper bound of the bytes that [`Store::reserve`] takes.
    pub(super) fn bytes_to_reserve(&self, positions: Range<usize>) -> usize {
        self.storages().map(|storage| storage.bytes_to_reserve(positions.clone())).sum()
    }

    fn storages(&self) -> impl Iterator<Item = &Storage> {
        self.stored_keys().into_iter().chain([&self.values])
    }

    fn storages_mut(&mut self) -> impl Iterator<Item = &mut Storage> {
        let keys = match &mut self.keys {
            Keys::Stored(keys) | Keys::RotaryStored(_, keys) => Some(keys),
            Keys::FromValues(_) => None,
        };
        keys.into_iter().chain([&mut self.values])
    }

    /// Writes the K and V of `layer` at the positions from `first` on, `(n, num_kv_heads, head_dim)` each.
    ///
    /// # Errors
    /// If the pool is exhausted; or if what is stored of K or V is not finite.
    pub(super) fn write(
        &mut self,
        pool: &PagePool,
        isa: Isa,
        layer: usize,
        first: usize,
        k: &[f32],
        v: &[f32],
    ) -> Result<()> {
        let end = first + k.len() / (self.layout.num_kv_heads * self.layout.head_dim);
        self.reserve(pool, first..end)?;
        let failed = |what| move |NotFinite { position, value }| not_finite(what, layer, position, Some(value));
        let values = match &mut self.keys {
            Keys::Stored(keys) => {
                keys.write(isa, first, k).map_err(failed("K"))?;
                self.values.write(isa, first, v)
            }
            Keys::FromValues(_) => self.values.write(isa, first, v),
            Keys::RotaryStored(rotary_first, keys) => {
                keys.write(isa, first, &rotary_first.rotary_keys(k)).map_err(failed("K"))?;
                self.values.write(isa, first, &rotary_first.reorder(v))
            }
        };
        values.map_err(failed("V"))
    }

    /// Allocates pages for `positions` and makes them unique.
    ///
    /// # Errors
    /// If the pool is exhausted.
    pub(super) fn reserve(&mut self, pool: &PagePool, positions: Range<usize>) -> Result<()> {
        self.storages_mut().try_for_each(|storage| storage.reserve(pool, positions.clone()))
    }

    /// Frees the pages that only positions from `end` on took.
    pub(super) fn trim(&mut self, end: usize) {
        self.storages_mut().for_each(|Storage { exact, quantized }| {
            exact.trim(end);
            quantized.iter_mut().for_each(|pages| pages.trim(end));
        });
    }

    /// Whether all rows that a query at `position` reads remain after positions below `written` were written.
    pub(super) fn holds(&self, position: usize, written: usize) -> bool {
        let visible = self.visible(position..position);
        self.storages().all(|Storage { exact, quantized }| match quantized {
            None => exact.holds(visible.clone(), written),
            Some(pages) => pages.holds(exact, visible.clone(), written),
        })
    }

    /// The pages of the positions below `end`: keys, then values.
    pub(super) fn pages(&self, end: usize) -> impl Iterator<Item = &SharedPage> {
        self.storages().flat_map(move |Storage { exact, quantized }| {
            exact.pages(end).iter().chain(quantized.iter().flat_map(move |pages| pages.pages(end)))
        })
    }

    /// All pages in memory.
    pub(super) fn held_pages(&self) -> impl Iterator<Item = &SharedPage> {
        self.storages().flat_map(|Storage { exact, quantized }| {
            exact.held_pages().iter().chain(quantized.iter().flat_map(QuantizedPages::held_pages))
        })
    }

    /// As [`Store::pages`], writable.
    pub(super) fn pages_mut(&mut self, end: usize) -> impl Iterator<Item = &mut SharedPage> {
        self.storages_mut().flat_map(move |Storage { exact, quantized }| {
            exact.pages_mut(end).iter_mut().chain(quantized.iter_mut().flat_map(move |pages| pages.pages_mut(end)))
        })
    }

    /// Whether both hold the same bits at the positions visible to queries at `end` or later.
    pub(super) fn same(&self, other: &Self, end: usize) -> bool {
        let oldest = self.visible(end..end).start;
        let mut pairs = self.storages().zip(other.storages());
        self.storages().count() == other.storages().count() && pairs.all(|(a, b)| a.same(b, oldest..end))
    }
}

impl Storage {
    fn new(layout: &StoreLayout, width: usize, format: KvFormat, side: Side, options: &KvOptions) -> Result<Self> {
        let StoreLayout { num_kv_heads, window, .. } = *layout;
        let retention = window.map_or(Retention::All, |window| Retention::window(window, options.max_round_rows));
        let (element, of_exact, quantized) = match format {
            KvFormat::Exact(element) => (element, retention, None),
            KvFormat::Quantized(format) => {
                let pages = QuantizedPages::new(format, side, num_kv_heads, width, retention, options.exact)?;
                let zones = Retention::zones(options.exact, options.max_round_rows);
                (options.exact.element, zones, Some(pages))
            }
        };
        Ok(Self { exact: ExactRows::new(element, num_kv_heads, width, of_exact), quantized })
    }

    fn format(&self) -> KvFormat {
        self.quantization().map_or(self.exact.element().into(), |(format, _)| format.into())
    }

    /// Format and rotation groups, if quantized.
    fn quantization(&self) -> Option<(CodeFormat, RotationGroups)> {
        self.quantized.as_ref().map(QuantizedPages::quantization)
    }

    fn reserve(&mut self, pool: &PagePool, positions: Range<usize>) -> Result<()> {
        self.exact.reserve(pool, positions.clone())?;
        self.quantized.as_mut().map_or(Ok(()), |pages| pages.reserve(pool, positions))
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, already reserved.
    ///
    /// # Errors
    /// At the first value that is not finite in every format.
    fn write(&mut self, isa: Isa, first: usize, rows: &[f32]) -> std::result::Result<(), NotFinite> {
        match &mut self.quantized {
            None => self.exact.write(first, rows),
            Some(pages) => pages.write(isa, &mut self.exact, first, rows),
        }
    }

    /// The first `len` rows of one head in page `page` of the sequence; quantized: the whole page.
    fn rows(&self, reading: Reading, page: usize, head: usize, len: usize) -> KvRows<'_> {
        match (reading, &self.quantized) {
            (Reading::Quantized, Some(pages)) => KvRows::Quantized(pages.page(page, head)),
            _ => self.exact.rows(page, head, len).into(),
        }
    }

    fn bytes_at(&self, end: usize) -> usize {
        let quantized = self.quantized.as_ref().map_or(0, |pages| pages.bytes_at(end));
        self.exact.bytes_at(end).saturating_add(quantized)
    }

    fn bytes_to_reserve(&self, positions: Range<usize>) -> usize {
        let quantized = self.quantized.as_ref().map_or(0, |pages| pages.bytes_to_reserve(positions.clone()));
        self.exact.bytes_to_reserve(positions) + quantized
    }

    /// Whether both hold the same bits at `positions`, as queries from `positions.end` on read them.
    fn same(&self, other: &Self, positions: Range<usize>) -> bool {
        match (&self.quantized, &other.quantized) {
            (None, None) => self.exact.same(&other.exact, positions),
            (Some(a), Some(b)) => a.same(b, [&self.exact, &other.exact], positions),
            _ => false,
        }
    }
}
