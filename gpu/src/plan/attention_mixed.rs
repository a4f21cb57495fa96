//! Attention over pages of any formats of K and V: `attend_mixed.cpp`.

use super::attention::{PageKind, Queries, QueriesParams, SplitPartials, check_rotary_channels};
use super::pages::{Pages, PagesParams, element_number, of_head_dim};
use super::turboquant::{self, FormatParams};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params};
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::{PageLayout, Side};

/// Pages of K or of V that one launch reads.
#[derive(Clone, Copy, Debug)]
pub enum KvPages {
    /// `(kv_heads, 128, head_dim)` of this type.
    Exact(Pages, ElementType),
    /// Pages of this layout.
    Quantized(Pages, PageLayout),
}

/// Keys and values.
#[derive(Clone, Copy, Debug)]
pub struct MixedKv {
    /// Exact, or of [`Side::Keys`]: all channels or, if the values are of [`Side::KEqV`], the rotary ones.
    pub keys: KvPages,
    /// Exact, or of [`Side::Values`], or of [`Side::KEqV`] in a format without a mean.
    pub values: KvPages,
    /// For quantized keys, `(rows, heads, head_dim / 4)`: see [`super::rows::QuantizedQueries`].
    pub query_words: DeviceSlice<u32>,
    /// For quantized keys, `(rows, heads, scale groups)`.
    pub query_scales: DeviceSlice<f32>,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SideParams {
    pages: PagesParams,
    format: FormatParams,
    element: i32,
    channels: i32,
    bytes: i32,
}

/// Parameters of the kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MixedParams {
    queries: QueriesParams,
    words: u64,
    word_scales: u64,
    keys: SideParams,
    values: SideParams,
    quantized: i32,
}

// SAFETY: the `Params` of attend_mixed.cpp.
unsafe impl Params for MixedParams {}

/// Columns of a tile.
const COLUMNS: usize = 8;

/// The kernel's number of a quantized side, after those of the element types.
const QUANTIZED: i32 = 3;

impl KvPages {
    fn layout(&self) -> Option<PageLayout> {
        match self {
            Self::Exact(..) => None,
            Self::Quantized(_, layout) => Some(*layout),
        }
    }

    fn params(&self, head_dim: usize) -> Result<SideParams, LaunchError> {
        Ok(match *self {
            Self::Exact(pages, element) => SideParams {
                pages: pages.params()?,
                format: FormatParams::NONE,
                element: element_number(element),
                channels: head_dim as i32,
                bytes: 0,
            },
            Self::Quantized(pages, layout) => SideParams {
                pages: pages.params()?,
                format: FormatParams::new(layout),
                element: QUANTIZED,
                channels: layout.head_dim() as i32,
                bytes: layout.bytes() as i32,
            },
        })
    }
}

impl MixedKv {
    fn check(&self, head_dim: usize) -> Result<(), LaunchError> {
        let (key, value) = (self.keys.layout(), self.values.layout());
        key.into_iter().chain(value).try_for_each(turboquant::check)?;
        key.map_or(Ok(()), |key| check_rotary_channels(key.head_dim(), head_dim))?;
        let all_keys = key.is_none_or(|key| key.head_dim() == head_dim);
        let fits = match value {
            None => all_keys,
            Some(value) if all_keys => value.side() == Side::Values,
            Some(value) => value.side() == Side::KEqV && key.is_some_and(|key| key.format() == value.format()),
        };
        let value_fits = value.is_none_or(|value| value.head_dim() == head_dim && value.mean() == 0);
        if fits && value_fits && key.is_none_or(|key| key.side() == Side::Keys) {
            return Ok(());
        }
        Err(LaunchError("the layouts of keys and values are incompatible".into()))
    }
}

/// Attention over the positions that are read quantized, if K or V is, else over those that are read exactly.
///
/// [`exact`](super::attention::exact) and [`quantized`](super::attention::quantized) are faster
/// where they have a kernel.
///
/// # Errors
/// If there is no kernel for the width or a layout, the layouts are incompatible, or a slice is too short.
pub fn mixed(queries: &Queries, kv: &MixedKv, partials: &SplitPartials) -> Result<Launch<MixedParams>, LaunchError> {
    let width = queries.head_dim;
    let kernel = of_head_dim!("attend_mixed", width)?;
    kv.check(width)?;
    let (key, value) = (kv.keys.layout(), kv.values.layout());
    let kind = if key.or(value).is_some() { PageKind::Quantized } else { PageKind::Exact };
    if kind == PageKind::Quantized && queries.zones.is_none() {
        return Err(LaunchError("quantized pages require exact zones".into()));
    }
    let all = queries.count * queries.heads;
    let scales = key.map_or(0, |key| all * width / turboquant::scale_group(key));
    let params = MixedParams {
        queries: queries.params(partials, kind, COLUMNS)?,
        words: kv.query_words.checked("the quantized queries", key.map_or(0, |_| all * width / 4))?,
        word_scales: kv.query_scales.checked_unaligned("the quantized queries' scales", scales)?,
        keys: kv.keys.params(width)?,
        values: kv.values.params(width)?,
        quantized: (kind == PageKind::Quantized).into(),
    };
    Ok(Launch { kernel, grid: queries.grid(partials.splits, COLUMNS)?, threads: 256, shared: 0, params })
}
