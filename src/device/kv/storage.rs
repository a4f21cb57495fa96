//! Where and in which formats a store keeps K and V on the device.

use std::ops::Range;

use foretoken_gpu::plan::attention::Zones;
use foretoken_gpu::plan::attention_mixed::KvPages;
use foretoken_gpu::plan::pages::{HEAD_DIMS, exact_page_bytes};
use foretoken_gpu::plan::rows::Domain;
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::{PageLayout, RotationGroups, Side};

use crate::device::Device;
use crate::device::pages::{Table, Tables};
use crate::kv::{KEqV, KvFormat, KvLayout, KvOptions, PAGE, Retention, RotaryFirst, StoreLayout, first_exact_page};
use crate::{Error, Result};

/// Storage of K, or of V.
pub(super) struct Storage {
    pub(super) channels: usize,
    pub(super) element: ElementType, // of exact pages
    pub(super) exact: Table,
    pub(super) quantized: Option<(PageLayout, Table)>,
}

/// Formats of K, or of V.
#[derive(Clone, Copy)]
struct SidePlan {
    channels: usize,
    element: ElementType, // of exact pages
    quantized: Option<PageLayout>,
}

/// Formats of a store, checked against the kernels before any allocation.
pub(super) struct StoragePlan {
    keys: SidePlan, // the rotary channels if `rotary_first`
    values: SidePlan,
    pub(super) rotary_first: Option<RotaryFirst>,
    /// Whether files have no keys: K = V, exact.
    pub(super) recomputes_keys: bool,
    pub(super) zones: Option<Zones>,
}

impl StoragePlan {
    /// # Errors
    /// If the device has no kernels for the heads or the formats.
    pub(super) fn new(device: &dyn Device, layout: &KvLayout, index: usize, options: &KvOptions) -> Result<Self> {
        let store = &layout.stores[index];
        let refuse = |problem: String| {
            let layer = layout.store_of_layer.iter().position(|of| *of == index).unwrap_or(index);
            Error::Device {
                device: device.name(),
                problem: format!("K and V of layer {layer}: {problem}; use the CPU"),
            }
        };
        let width = store.head_dim;
        if !HEAD_DIMS.contains(&width) {
            return Err(refuse(format!("no kernels for heads of {width}")));
        }
        let side = |format, side, channels| -> Result<SidePlan> {
            let format = match format {
                KvFormat::Exact(element) => return Ok(SidePlan { channels, element, quantized: None }),
                KvFormat::Quantized(format) => format,
            };
            // Rotary channels alone have widths that heads do not have.
            let groups = RotationGroups::of(channels).filter(|groups| HEAD_DIMS.contains(&groups.head_dim()));
            let problem = || refuse(format!("no kernels for {} of {channels} channels", format.name()));
            let layout = PageLayout::new(format, side, groups.ok_or_else(problem)?);
            Ok(SidePlan { channels, element: options.exact.element, quantized: Some(layout) })
        };
        let (key, value) = options.formats(layout, index);
        let formats_fit = match (key, value) {
            (KvFormat::Exact(key), KvFormat::Exact(value)) => key == value,
            (KvFormat::Quantized(_), KvFormat::Quantized(_)) => true,
            _ => false,
        };
        let recomputed = store.k_eq_v.is_some() && options.k_eq_v == KEqV::Recomputed && formats_fit;
        let recomputes_keys = recomputed && matches!(key, KvFormat::Exact(_));
        let rotary_first = recomputed.then(|| RotaryFirst::of(store, layout.inverse_frequencies.len())).flatten();
        let key_channels = rotary_first.as_ref().map_or(width, RotaryFirst::rotary_channels);
        let keys = side(key, Side::Keys, key_channels)?;
        let values = match rotary_first {
            // Quantized V that serves as K takes the key format.
            Some(_) => side(key, Side::KEqV, width)?,
            None => side(value, Side::Values, width)?,
        };
        let zones = Zones { head: options.exact.head, tail: options.exact.tail };
        let zones = keys.quantized.or(values.quantized).map(|_| zones);
        Ok(Self { keys, values, rotary_first, recomputes_keys, zones })
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
        let zones = Retention::zones(options.exact, options.max_round_rows);
        let mut table = |retention: Retention, page_bytes| {
            let slots = retention.held(context.div_ceil(PAGE)).max(1);
            // A ring is read through its whole table; tables are aligned to 16 bytes.
            let len = retention.ring().map_or(slots, |(pinned, newest)| pinned + newest).next_multiple_of(2);
            tables.add(len, retention, page_bytes)
        };
        [self.keys, self.values].map(|SidePlan { channels, element, quantized }| Storage {
            channels,
            element,
            exact: table(
                quantized.map_or(retention, |_| zones),
                exact_page_bytes(element, store.num_kv_heads, channels),
            ),
            quantized: quantized.map(|layout| (layout, table(retention, store.num_kv_heads * layout.bytes()))),
        })
    }
}

impl Storage {
    /// What queries read exactly.
    pub(super) fn exact_pages(&self) -> KvPages {
        KvPages::Exact(self.exact.pages(), self.element)
    }

    /// What queries read outside of the exact head and tail of a store of which K or V is quantized.
    pub(super) fn quantized_pages(&self) -> KvPages {
        let quantized = self.quantized.as_ref();
        quantized.map_or(self.exact_pages(), |(layout, table)| KvPages::Quantized(table.pages(), *layout))
    }

    /// The domain of its rows.
    pub(super) fn domain(&self) -> Domain {
        if self.quantized.is_some() { Domain::Rotated } else { Domain::Unrotated }
    }

    /// The tables, and the number of pages in each after positions below `end` were written.
    pub(super) fn held(&self, end: usize, zones: Option<Zones>) -> impl Iterator<Item = (&Table, usize)> {
        let quantized_pages = zones.map_or(0, |zones| first_exact_page(end, zones.tail));
        let quantized = self.quantized.iter().map(move |(_, table)| (table, table.retention.held(quantized_pages)));
        [(&self.exact, self.exact.retention.held(end.div_ceil(PAGE)))].into_iter().chain(quantized)
    }

    /// Whether the rows at `visible` remain after positions below `written` were written, for a query at `visible.end`.
    /// In whole pages where a page may be quantized later.
    pub(super) fn holds(&self, visible: Range<usize>, written: usize, zones: Option<Zones>) -> bool {
        let exact = self.exact.retention;
        let Some(((_, table), Zones { tail, .. })) = self.quantized.as_ref().zip(zones) else {
            return exact.holds(visible, written);
        };
        let (oldest, exact_from) = (visible.start / PAGE * PAGE, first_exact_page(visible.end, tail) * PAGE);
        let quantized = first_exact_page(written, tail) * PAGE;
        exact.holds(oldest.max(exact_from)..visible.end, written)
            && table.retention.holds(oldest..exact_from, quantized)
    }

    pub(super) fn bytes_at(&self, end: usize, zones: Option<Zones>) -> usize {
        self.held(end, zones).map(|(table, held)| held.saturating_mul(table.page_bytes)).fold(0, usize::saturating_add)
    }
}
