//! K and V on the device: pages that are allocated as they are needed, named by tables there.
//!
//! What is kept, and how a query reads it, is `crate::kv`'s: pages of 128 positions, rings for windows, exact zones around
//! codes; rollback is forgetting a length, which the caller has. One thing differs: where K and V come from one vector, the
//! rotating channels of K are kept beside V in exact formats too.

mod file;

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use foretoken_kernels::ElementType;
use foretoken_kernels::gpu::Span;
use foretoken_kernels::gpu::attend::{CodedKv, ExactKv, Queries, Unfinished, Zones, coded, combine, exact};
use foretoken_kernels::gpu::codes::{encode, supports};
use foretoken_kernels::gpu::pages::exact_page_bytes;
use foretoken_kernels::gpu::rows::{Destination, Domain, HeadNorm, Heads, Order, Results, Rotary, Steps, Words, rows};
use foretoken_kernels::turbo::{CodeFormat, Groups, PageLayout, Side};

use super::pages::{Arena, Table, no_room};
use super::{Buffer, Device, Work, part};
use crate::kv::{
    Keep, KeysOfValues, KvFormat, KvLayout, KvOptions, PAGE, Sharing, StoreLayout, first_exact_page, no_numbers,
};
use crate::{Error, Result};
use file::Derived;

/// No position.
pub(crate) const NO_FAULT: u32 = u32::MAX;

/// Pages per split of attention: fixed, because it decides the order of summation.
const SPLIT_PAGES: usize = 4;

/// Bytes of unfinished softmaxes beyond which rows are attended in turn.
const MOST_UNFINISHED: usize = 64 << 20;

/// Rows that are attended at once however much room they take.
const FEWEST_ROWS: usize = 16;

/// The K and V of a sequence.
pub(crate) struct DeviceKv {
    stores: Vec<Store>,
    store_of_layer: Vec<usize>,
    inverse_frequencies: Vec<f32>, // of keys that are made of values
    /// Addresses of all pages: each table has a run of it.
    tables: Buffer<u64>,
    addresses: Vec<u64>,
    written: bool, // whether the tables say what the addresses do
    /// Where the words begin that say, for K and V of every store, the first position that had no numbers.
    faults: u64,
    arena: Arena,
    reserved: usize,
}

/// The K and V of one layer.
struct Store {
    heads: usize,
    head_dim: usize,
    window: Option<usize>,
    order: Order,
    query_weight: Option<Buffer<f32>>, // (head_dim), where K and V share
    derived: Option<Derived>,
    keys: Kept,
    values: Kept,
    element: ElementType,
    zones: Option<Zones>,
}

/// The rows of K, or of V.
struct Kept {
    channels: usize,
    exact: Table,
    codes: Option<(PageLayout, Table)>,
}

/// Room for a pass's queries and what attention leaves.
pub(crate) struct Room {
    pub rows: Buffer<f32>,        // (rows, heads, head_dim)
    pub words: Buffer<u32>,       // a quarter of it
    pub word_scales: Buffer<f32>, // a 128th, and no less than one per head
    unfinished: RefCell<Option<UnfinishedRoom>>,
    grown: Cell<usize>, // times
}

/// Softmaxes and their sums of values.
type UnfinishedRoom = (Buffer<[f64; 2]>, Buffer<f32>);

impl Room {
    /// For `len` elements of queries.
    pub fn new(device: &dyn Device, len: usize) -> Result<Self> {
        Ok(Self {
            rows: Buffer::new(device, len)?,
            words: Buffer::new(device, len.div_ceil(4))?,
            word_scales: Buffer::new(device, len.div_ceil(64))?,
            unfinished: RefCell::new(None),
            grown: Cell::new(0),
        })
    }

    /// How often there was too little room for unfinished softmaxes: what was recorded before names memory that is gone.
    pub fn grown(&self) -> usize {
        self.grown.get()
    }

    /// Room for `slots` unfinished softmaxes over `width` channels, grown if it is too small.
    fn unfinished(&self, device: &dyn Device, slots: usize, width: usize) -> Result<(Span<[f64; 2]>, Span<f32>)> {
        let mut room = self.unfinished.borrow_mut();
        if let Some((running, output)) = &*room
            && running.len() >= slots
            && output.len() >= slots * width
        {
            return Ok((running.span(), output.span()));
        }
        // What is too small goes first: both need not fit.
        self.grown.set(self.grown.get() + 1);
        let (had, wide) = room.take().map_or((0, 0), |(running, output)| (running.len(), output.len()));
        let grown = (slots.max(had), (slots * width).max(wide));
        let (running, output) = room.insert((Buffer::new(device, grown.0)?, Buffer::new(device, grown.1)?));
        Ok((running.span(), output.span()))
    }
}

/// Where rows stand on the device.
#[derive(Clone, Copy)]
pub(crate) struct Standing {
    pub at: Span<[i32; 2]>,
    pub rows: usize,
    /// The first row's position, and where the last row's sight ends: what `at` says.
    pub first: usize,
    pub end: usize,
    /// As far as the rows may stand when the pass is replayed: it is recorded for all places up to there.
    pub horizon: Option<usize>,
}

impl Standing {
    /// `count` of the rows, from `first` on. Rows that stand together all see as far; others see one position further each.
    fn part(&self, first: usize, count: usize) -> Self {
        let at = part(self.at, first, count);
        if self.end == self.first {
            return Self { at, rows: count, ..*self };
        }
        let position = self.first + first;
        Self { at, rows: count, first: position, end: position + count, horizon: self.horizon }
    }

    /// Splits that the queries need, wherever they may stand: more are harmless.
    fn splits(&self, queries: &Queries) -> usize {
        match (self.horizon, queries.window) {
            (None, _) => queries.splits(self.first, self.end),
            (Some(horizon), None) => queries.splits(0, horizon),
            // A window and the rows behind its first, where they meet one split more than they fill.
            (Some(horizon), Some(window)) => {
                let split = SPLIT_PAGES * PAGE;
                ((window + self.rows - 1).div_ceil(split) + 1).min(horizon.div_ceil(split))
            }
        }
    }
}

/// What a layer makes of a projection before it is kept or asks.
#[derive(Clone, Copy)]
pub(crate) struct Shaped {
    pub x: Span<f32>, // (rows, heads * head_dim)
    pub norm: HeadNorm,
    pub rotary: Option<Rotary>,
}

impl DeviceKv {
    /// An empty cache with room in its tables for `context` positions. `faults` are [`DeviceKv::faults`] words.
    ///
    /// # Errors
    /// If the kernels do not read a format, or the device has no memory for the tables.
    pub fn new(
        device: Arc<dyn Device>,
        layout: &KvLayout,
        options: &KvOptions,
        context: usize,
        faults: Span<u32>,
    ) -> Result<Self> {
        let mut entries = 0;
        let stores = layout.stores.iter().enumerate().map(|(i, store)| {
            let kept = Plan::new(&*device, layout, i, options)?;
            Store::new(&*device, store, kept, options, context, &mut entries)
        });
        let stores = stores.collect::<Result<Vec<_>>>()?;
        let tables = Buffer::new(&*device, entries)?;
        let arena = Arena { device, pieces: Vec::new(), used: 0 };
        let store_of_layer = layout.store_of_layer.clone();
        let addresses = vec![0; entries];
        Ok(Self {
            stores,
            store_of_layer,
            inverse_frequencies: layout.inverse_frequencies.clone(),
            tables,
            addresses,
            written: true,
            faults: faults.address(),
            arena,
            reserved: 0,
        })
    }

    /// Bytes once positions below `end` were written.
    ///
    /// # Errors
    /// If the kernels do not read a format.
    pub fn bytes_at(device: &dyn Device, layout: &KvLayout, options: &KvOptions) -> Result<impl Fn(usize) -> usize> {
        let mut entries = 0;
        let stores = layout.stores.iter().enumerate().map(|(i, store)| {
            let plan = Plan::new(device, layout, i, options)?;
            let sides = plan.sides(store, options, 0, &mut entries);
            Ok((sides, plan.zones))
        });
        let stores = stores.collect::<Result<Vec<_>>>()?;
        Ok(move |end: usize| {
            let of = |(sides, zones): &([Kept; 2], Option<Zones>)| {
                sides.iter().map(|kept| kept.bytes_at(end, *zones)).fold(0, usize::saturating_add)
            };
            stores.iter().map(of).fold(0, usize::saturating_add)
        })
    }

    /// How many words say where K or V were no numbers. They begin as [`NO_FAULT`].
    pub fn faults(layout: &KvLayout) -> usize {
        2 * layout.stores.len()
    }

    /// The error that the words say, if they do: the first layer's.
    ///
    /// # Errors
    /// If K or V were no numbers, or too large.
    pub fn check(&self, faults: &[u32]) -> Result<()> {
        let layers = self.store_of_layer.iter().enumerate();
        let found = layers.flat_map(|(layer, store)| [(layer, "K", 2 * store), (layer, "V", 2 * store + 1)]);
        match found.map(|(layer, name, at)| (layer, name, faults[at])).find(|(.., position)| *position != NO_FAULT) {
            None => Ok(()),
            Some((layer, name, position)) => Err(no_numbers(name, layer, position as usize, "no number that fits f16")),
        }
    }

    /// Bytes that are allocated.
    pub fn bytes(&self) -> usize {
        self.arena.pieces.iter().map(Buffer::len).sum()
    }

    /// Allocates the pages of positions below `end`, and names them on the device.
    ///
    /// # Errors
    /// If the device has no more memory: what was allocated before stays as it was.
    pub fn reserve(&mut self, end: usize) -> Result<()> {
        for store in &mut self.stores {
            let coded = store.zones.map_or(0, |zones| first_exact_page(end, zones.tail));
            for kept in [&mut store.keys, &mut store.values] {
                let tables =
                    [Some((&mut kept.exact, end.div_ceil(PAGE))), kept.codes.as_mut().map(|(_, t)| (t, coded))];
                for (table, pages) in tables.into_iter().flatten() {
                    while table.held < table.keep.held(pages).min(table.slots) {
                        let address =
                            self.arena.take(table.page_bytes).map_err(|error| no_room(error, end, self.reserved))?;
                        self.addresses[table.start + table.held] = address;
                        table.held += 1;
                        self.written = false;
                    }
                }
            }
        }
        if !self.written {
            self.tables.write(0, &self.addresses)?;
            self.written = true;
        }
        self.reserved = self.reserved.max(end);
        Ok(())
    }

    /// Keeps the rows of a layer's own K and V, and codes the pages that have left the tail.
    pub fn append(&self, work: &Work, layer: usize, (k, v): (Shaped, Shaped), standing: &Standing) -> Result<()> {
        let store = &self.stores[self.store_of_layer[layer]];
        let (order, domain, heads) = (store.order, store.domain(), store.heads);
        for (i, (kept, shaped)) in [(&store.keys, k), (&store.values, v)].into_iter().enumerate() {
            let pages = kept.exact.pages(&self.tables);
            let steps = Steps { norm: Some(shaped.norm), rotary: shaped.rotary, order, weight: None, domain };
            let fault = Span::new(self.faults + 4 * (2 * self.store_of_layer[layer] + i) as u64, 1);
            let to = Destination { pages, element: store.element, at: standing.at, fault };
            let results = Results { kept: kept.channels, rows: None, words: None, store: Some(to) };
            let heads = Heads { x: shaped.x, rows: standing.rows, heads, head_dim: store.head_dim };
            work.run(rows(&heads, &steps, &results))?;
        }
        let Some((first, count)) = store.leaving(standing.first, standing.end) else { return Ok(()) };
        for kept in [&store.keys, &store.values] {
            let Some((layout, codes)) = &kept.codes else { continue };
            let (from, to) = (kept.exact.pages(&self.tables), codes.pages(&self.tables));
            work.run(encode(*layout, (&from, store.element), &to, (first, count), heads))?;
        }
        Ok(())
    }

    /// Whether rows from `first` to `end` make pages leave a tail and be coded: which pages, is said by the host.
    pub fn codes_pages(&self, first: usize, end: usize) -> bool {
        self.stores.iter().any(|store| store.leaving(first, end).is_some())
    }

    /// The attention of `heads` query heads per row over the store that the target's layer `layer` reads: `y` is
    /// `(rows, heads * head_dim)`.
    pub fn attend(
        &self,
        work: &Work,
        layer: usize,
        (q, heads): (Shaped, usize),
        standing: &Standing,
        (room, y): (&Room, Span<f32>),
    ) -> Result<()> {
        let store = &self.stores[self.store_of_layer[layer]];
        let (head_dim, domain) = (store.head_dim, store.domain());
        let key_format = store.keys.codes.as_ref().map(|(layout, _)| layout.format());
        let (words, scales) = (room.words.span(), room.word_scales.span());
        let steps = Steps {
            norm: Some(q.norm),
            rotary: q.rotary,
            order: store.order,
            weight: store.query_weight.as_ref().map(Buffer::span),
            domain,
        };
        let results = Results {
            kept: head_dim,
            rows: Some(room.rows.span()),
            words: key_format.map(|format| Words { format, words, scales }),
            store: None,
        };
        work.run(rows(&Heads { x: q.x, rows: standing.rows, heads, head_dim }, &steps, &results))?;

        let parts = if store.zones.is_some() { 2 } else { 1 };
        let of = |first: usize, count: usize| Queries {
            rows: part(room.rows.span(), first * heads * head_dim, count * heads * head_dim),
            at: part(standing.at, first, count),
            count,
            heads,
            kv_heads: store.heads,
            head_dim,
            window: store.window,
            zones: store.zones,
            split_pages: SPLIT_PAGES,
        };
        let all = of(0, standing.rows);
        let per_row = parts * standing.splits(&all) * heads * (4 * head_dim + 16);
        let at_once = (MOST_UNFINISHED / per_row / FEWEST_ROWS * FEWEST_ROWS).max(FEWEST_ROWS);
        for first in (0..standing.rows).step_by(at_once) {
            let count = at_once.min(standing.rows - first);
            let queries = of(first, count);
            let splits = standing.part(first, count).splits(&queries);
            let slots = parts * splits * count * heads;
            let (running, output) = room.unfinished(work.device(), slots, head_dim)?;
            let unfinished = Unfinished { running, output, splits };
            let kv = ExactKv {
                keys: store.keys.exact.pages(&self.tables),
                values: store.values.exact.pages(&self.tables),
                element: store.element,
                own: store.keys.channels,
            };
            work.run(exact(&queries, &kv, &unfinished))?;
            if let (Some((key_layout, keys)), Some((value_layout, values))) = (&store.keys.codes, &store.values.codes) {
                let (per_row, scales_per_row) = (heads * head_dim / 4, heads * head_dim / 128);
                let kv = CodedKv {
                    keys: keys.pages(&self.tables),
                    values: values.pages(&self.tables),
                    key_layout: *key_layout,
                    value_layout: *value_layout,
                    words: part(words, first * per_row, count * per_row),
                    word_scales: part(scales, first * scales_per_row, count * scales_per_row),
                };
                work.run(coded(&queries, &kv, &unfinished))?;
            }
            let y = part(y, first * heads * head_dim, count * heads * head_dim);
            work.run(combine(&queries, &unfinished, (domain, store.order), y))?;
        }
        Ok(())
    }
}

/// How a store is kept, before there is one.
struct Plan {
    keys: Option<PageLayout>,
    values: Option<PageLayout>,
    own: usize,
    sharing: Option<Sharing>,
    element: ElementType,
    zones: Option<Zones>,
}

impl Plan {
    fn new(device: &dyn Device, layout: &KvLayout, index: usize, options: &KvOptions) -> Result<Self> {
        let store = &layout.stores[index];
        let refuse = |problem: String| {
            let layer = layout.store_of_layer.iter().position(|of| *of == index).unwrap_or(index);
            Error::Device { device: device.name(), problem: format!("the K and V of layer {layer}: {problem}") }
        };
        if !matches!(store.head_dim, 64 | 128 | 256 | 512) {
            let problem = format!("no kernels for heads of {}; 64, 128, 256 and 512 have some", store.head_dim);
            return Err(refuse(format!("{problem}; use the CPU")));
        }
        let pairs = layout.inverse_frequencies.len();
        let sharing = || match options.keys_of_values {
            KeysOfValues::Derived => Sharing::of(store, pairs),
            KeysOfValues::Stored => None,
        };
        let layout_of = |format: CodeFormat, side, width| -> Result<PageLayout> {
            let layout = Groups::of(width).map(|groups| PageLayout::new(format, side, groups));
            layout.filter(|layout| supports(*layout)).ok_or_else(|| {
                let name = format.name();
                refuse(format!("no kernels for {name} of {width} channels; use tqc2 to tqc6, turbo2 to turbo4 or f16"))
            })
        };
        let plan = match options.formats(layout, index) {
            (KvFormat::Exact(key), KvFormat::Exact(value)) if key == value => {
                let sharing = sharing();
                let own = sharing.as_ref().map_or(store.head_dim, Sharing::own);
                Self { keys: None, values: None, own, sharing, element: key, zones: None }
            }
            (KvFormat::Coded(key), KvFormat::Coded(value)) => {
                let (sharing, width) = (sharing(), store.head_dim);
                let own = sharing.as_ref().map_or(width, Sharing::own);
                let (format, side) = if sharing.is_some() { (key, Side::Shared) } else { (value, Side::Values) };
                Self {
                    keys: Some(layout_of(key, Side::Keys, own)?),
                    values: Some(layout_of(format, side, width)?),
                    own,
                    sharing,
                    element: options.exact.element,
                    zones: Some(Zones { head: options.exact.head, tail: options.exact.tail }),
                }
            }
            (key, value) => {
                let problem = format!("no kernels for keys in {key} beside values in {value}");
                return Err(refuse(format!("{problem}; use one exact format for both, or codes for both")));
            }
        };
        Ok(plan)
    }

    /// K and V as they are kept, with tables for `context` positions from `entries` on.
    fn sides(&self, store: &StoreLayout, options: &KvOptions, context: usize, entries: &mut usize) -> [Kept; 2] {
        let keep = store.window.map_or(Keep::All, |window| Keep::window(window, options.max_round_rows));
        let exact = self.zones.map_or(keep, |_| Keep::zones(options.exact, options.max_round_rows));
        let mut table = |keep: Keep, page_bytes| {
            let slots = keep.held(context.div_ceil(PAGE)).max(1);
            // A ring is read through its whole table, and spans begin at multiples of 16 bytes.
            let len = keep.ring().map_or(slots, |(pinned, newest)| pinned + newest).next_multiple_of(2);
            let start = *entries;
            *entries += len;
            Table { start, slots: len, keep, page_bytes, held: 0 }
        };
        [(self.own, self.keys), (store.head_dim, self.values)].map(|(channels, layout)| Kept {
            channels,
            exact: table(exact, exact_page_bytes(self.element, store.num_kv_heads, channels)),
            codes: layout.map(|layout| (layout, table(keep, store.num_kv_heads * layout.bytes()))),
        })
    }
}

impl Store {
    fn new(
        device: &dyn Device,
        layout: &StoreLayout,
        plan: Plan,
        options: &KvOptions,
        context: usize,
        entries: &mut usize,
    ) -> Result<Self> {
        let [keys, values] = plan.sides(layout, options, context, entries);
        let derives = plan.zones.is_none() && options.keys_of_values == KeysOfValues::Derived;
        let weight = layout.key_weight.clone().filter(|_| derives);
        let sharing = plan.sharing.as_ref();
        Ok(Self {
            heads: layout.num_kv_heads,
            head_dim: layout.head_dim,
            window: layout.window,
            order: sharing.map_or(Order::Model, |sharing| Order::Shared(sharing.own() / 2)),
            query_weight: sharing.map(|sharing| Buffer::of(device, sharing.weight())).transpose()?,
            keys,
            values,
            element: plan.element,
            zones: plan.zones,
            derived: weight.map(|weight| Derived { weight, sharing: plan.sharing }),
        })
    }

    /// The pages, first and count, that are coded when rows from `first` to `end` are written: those that they make leave the
    /// tail. Pages before were coded by the rows before, and rows that are written again code their pages again.
    fn leaving(&self, first: usize, end: usize) -> Option<(usize, usize)> {
        let tail = self.zones?.tail;
        let (first, leaving) = (first_exact_page(first, tail), first_exact_page(end, tail));
        (first < leaving).then(|| (first, leaving - first))
    }

    fn domain(&self) -> Domain {
        if self.zones.is_some() { Domain::Rotated } else { Domain::Plain }
    }
}

impl Kept {
    /// The tables, and how many pages each holds once positions below `end` were written.
    fn held(&self, end: usize, zones: Option<Zones>) -> impl Iterator<Item = (&Table, usize)> {
        let coded = zones.map_or(0, |zones| first_exact_page(end, zones.tail));
        let codes = self.codes.iter().map(move |(_, table)| (table, table.keep.held(coded)));
        [(&self.exact, self.exact.keep.held(end.div_ceil(PAGE)))].into_iter().chain(codes)
    }

    fn bytes_at(&self, end: usize, zones: Option<Zones>) -> usize {
        self.held(end, zones).map(|(table, held)| held.saturating_mul(table.page_bytes)).fold(0, usize::saturating_add)
    }
}
