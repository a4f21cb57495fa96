//! Where and in which formats a store keeps K and V on the device.

use foretoken_gpu::plan::attention::Zones;
use foretoken_gpu::plan::pages::exact_page_bytes;
use foretoken_gpu::plan::turboquant::supports;
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::{CodeFormat, PageLayout, RotationGroups, Side};

use crate::device::Device;
use crate::device::pages::{Table, Tables};
use crate::kv::{KEqV, KvFormat, KvLayout, KvOptions, PAGE, Retention, RotaryFirst, StoreLayout, first_exact_page};
use crate::{Error, Result};

/// Storage of K, or of V.
pub(super) struct Storage {
    pub(super) channels: usize,
    pub(super) exact: Table,
    pub(super) quantized: Option<(PageLayout, Table)>,
}

/// Formats of a store, checked against the kernels before any allocation.
pub(super) struct StoragePlan {
    pub(super) keys: Option<PageLayout>,
    pub(super) values: Option<PageLayout>,
    pub(super) key_channels: usize, // the rotary ones if K = V
    pub(super) rotary_first: Option<RotaryFirst>,
    pub(super) element: ElementType,
    pub(super) zones: Option<Zones>,
}

impl StoragePlan {
    /// # Errors
    /// If the device has no kernels for the heads or the formats.
    pub(super) fn new(device: &dyn Device, layout: &KvLayout, index: usize, options: &KvOptions) -> Result<Self> {
        let store = &layout.stores[index];
        let refuse = |problem: String| {
            let layer = layout.store_of_layer.iter().position(|of| *of == index).unwrap_or(index);
            Error::Device { device: device.name(), problem: format!("K and V of layer {layer}: {problem}") }
        };
        if !matches!(store.head_dim, 64 | 128 | 256 | 512) {
            let problem = format!("no kernels for heads of {}; supported are 64, 128, 256 and 512", store.head_dim);
            return Err(refuse(format!("{problem}; use the CPU")));
        }
        let pairs = layout.inverse_frequencies.len();
        let rotary_first = || match options.k_eq_v {
            KEqV::Derived => RotaryFirst::of(store, pairs),
            KEqV::Stored => None,
        };
        let layout_of = |format: CodeFormat, side, width| -> Result<PageLayout> {
            let layout = RotationGroups::of(width).map(|groups| PageLayout::new(format, side, groups));
            layout.filter(|layout| supports(*layout)).ok_or_else(|| {
                let name = format.name();
                refuse(format!("no kernels for {name} of {width} channels; use tqc2 to tqc6, turbo2 to turbo4 or f16"))
            })
        };
        let plan = match options.formats(layout, index) {
            (KvFormat::Exact(key), KvFormat::Exact(value)) if key == value => {
                let rotary_first = rotary_first();
                let key_channels = rotary_first.as_ref().map_or(store.head_dim, RotaryFirst::rotary_channels);
                Self { keys: None, values: None, key_channels, rotary_first, element: key, zones: None }
            }
            (KvFormat::Quantized(key), KvFormat::Quantized(value)) => {
                let (rotary_first, width) = (rotary_first(), store.head_dim);
                let key_channels = rotary_first.as_ref().map_or(width, RotaryFirst::rotary_channels);
                let (format, side) = if rotary_first.is_some() { (key, Side::KEqV) } else { (value, Side::Values) };
                Self {
                    keys: Some(layout_of(key, Side::Keys, key_channels)?),
                    values: Some(layout_of(format, side, width)?),
                    key_channels,
                    rotary_first,
                    element: options.exact.element,
                    zones: Some(Zones { head: options.exact.head, tail: options.exact.tail }),
                }
            }
            (key, value) => {
                let problem = format!("no kernels for keys in {key} with values in {value}");
                return Err(refuse(format!("{problem}; use one exact format for both, or quantized formats for both")));
            }
        };
        Ok(plan)
    }

    /// Storage of K and of V, with tables for `context` positions, which are added to `tables`.
    pub(super) fn sides(
        &self,
        store: &StoreLayout,
        options: &KvOptions,
        context: usize,
        tables: &mut Tables,
    ) -> [Storage; 2] {
        let retention = store.window.map_or(Retention::All, |window| Retention::window(window, options.max_round_rows));
        let exact = self.zones.map_or(retention, |_| Retention::zones(options.exact, options.max_round_rows));
        let mut table = |retention: Retention, page_bytes| {
            let slots = retention.held(context.div_ceil(PAGE)).max(1);
            // A ring is read through its whole table; tables are aligned to 16 bytes.
            let len = retention.ring().map_or(slots, |(pinned, newest)| pinned + newest).next_multiple_of(2);
            tables.add(len, retention, page_bytes)
        };
        [(self.key_channels, self.keys), (store.head_dim, self.values)].map(|(channels, layout)| Storage {
            channels,
            exact: table(exact, exact_page_bytes(self.element, store.num_kv_heads, channels)),
            quantized: layout.map(|layout| (layout, table(retention, store.num_kv_heads * layout.bytes()))),
        })
    }
}

impl Storage {
    /// The tables, and the number of pages in each after positions below `end` were written.
    pub(super) fn held(&self, end: usize, zones: Option<Zones>) -> impl Iterator<Item = (&Table, usize)> {
        let quantized_pages = zones.map_or(0, |zones| first_exact_page(end, zones.tail));
        let quantized = self.quantized.iter().map(move |(_, table)| (table, table.retention.held(quantized_pages)));
        [(&self.exact, self.exact.retention.held(end.div_ceil(PAGE)))].into_iter().chain(quantized)
    }

    pub(super) fn bytes_at(&self, end: usize, zones: Option<Zones>) -> usize {
        self.held(end, zones).map(|(table, held)| held.saturating_mul(table.page_bytes)).fold(0, usize::saturating_add)
    }
}
