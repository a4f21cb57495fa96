//! Attention over pages: `attend_exact.cpp`, `attend_f16.cpp`, `attend_quantized.cpp`,
//! `attend_mixed.cpp`, `combine.cpp`.
//!
//! One launch for the exact pages of a layer and one for its quantized pages, each writing a partial softmax per split
//! and query; then one that merges them. Split boundaries are fixed positions of the sequence.

use super::H200_BLOCKS;
use super::matmul::ActivationsParams;
use super::pages::{Pages, PagesParams, of_head_dim};
use super::rows::{Domain, Order};
use super::segments::{Place, Segments};
use super::turboquant::{self, FormatParams};
use crate::launch::{DeviceSlice, Launch, LaunchError, MAX_BLOCKS, Params, blocks, dimension};
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::{PageLayout, Side};

/// The positions that a query reads exactly in a quantized store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zones {
    /// Number of first positions of the sequence.
    pub head: usize,
    /// Number of last positions, rounded to whole pages as on the CPU.
    pub tail: usize,
}

/// The queries of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// `(count, heads, head_dim)`, in the domain and channel order of the store.
    pub rows: DeviceSlice<f32>,
    /// Of all rows of the pass. In a segment, positions and ends are non-decreasing.
    pub places: DeviceSlice<Place>,
    /// The sequences.
    pub segments: Segments,
    /// The first of these rows in the pass.
    pub first: usize,
    /// Rows.
    pub count: usize,
    /// Query heads.
    pub heads: usize,
    /// K/V heads, a divisor of the query heads.
    pub kv_heads: usize,
    /// Width.
    pub head_dim: usize,
    /// Positions that a query sees, its own included; `None`: no window.
    pub window: Option<usize>,
    /// Exact zones; `None` if all pages are exact.
    pub zones: Option<Zones>,
    /// Pages per split. A constant of a session, because it decides the order of summation.
    pub split_pages: usize,
}

/// Memory for the partial softmaxes of all splits.
#[derive(Clone, Copy, Debug)]
pub struct SplitPartials {
    /// `(kinds, splits, rows * heads)` of maximum and sum; the kinds of pages are exact and, with zones, quantized.
    pub softmax: DeviceSlice<[f32; 2]>,
    /// `(kinds, splits, rows * heads, head_dim)`: weighted sums, not normalised.
    pub output: DeviceSlice<f32>,
    /// Splits from the first that any query sees to the last, or an upper bound.
    pub splits: usize,
}

/// Columns of a tile of exact pages.
const EXACT_COLUMNS: usize = 8;

/// Splits that one warp merges: one per lane.
const FEW_SPLITS: usize = 32;

/// The pages that a launch attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageKind {
    Exact,
    Quantized,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct QueriesParams {
    rows: u64,
    places: u64,
    segments: u64,
    softmax: u64,
    output: u64,
    first: i32,
    count: i32,
    heads: i32,
    kv_heads: i32,
    window: i32,
    exact_head: i32,
    exact_tail: i32,
    split_pages: i32,
    tiles: i32,
}

impl QueriesParams {
    /// Rows and heads.
    pub(super) fn shape(&self) -> (u32, i32) {
        (self.count as u32, self.heads)
    }
}

impl Queries {
    fn page_kinds(&self) -> usize {
        if self.zones.is_some() { 2 } else { 1 }
    }

    /// Number of splits from the first that a query at `first` sees to the last that begins before `end`.
    pub fn splits(&self, first: usize, end: usize) -> usize {
        let split = self.split_pages.max(1) * foretoken_kernels::attention::turboquant::PAGE_TOKENS;
        let start = self.window.map_or(0, |window| (first + 1).saturating_sub(window));
        end.div_ceil(split).saturating_sub(start / split).max(1)
    }

    /// Rows of one launch, at most. A kernel has a block in z per tile of the longest segment and per segment, counted
    /// here in the smallest tiles; a merge of splits has one per query.
    pub fn max_rows(&self) -> usize {
        let group = (self.heads / self.kv_heads.max(1)).max(1);
        let of_merge = MAX_BLOCKS / self.heads.max(1);
        let of_tiles = MAX_BLOCKS / self.segments.count.max(1) * EXACT_COLUMNS / group;
        // A longest segment that fits does not limit the rows of the others.
        let most = if self.segments.longest <= of_tiles { of_merge } else { of_merge.min(of_tiles) };
        most.max(1)
    }

    /// Columns of the longest segment: rows times heads of a K/V head's group.
    fn columns(&self) -> usize {
        self.segments.longest.min(self.count) * (self.heads / self.kv_heads.max(1))
    }

    /// `columns`: those of a tile.
    pub(super) fn params(
        &self,
        partials: &SplitPartials,
        kind: PageKind,
        columns: usize,
    ) -> Result<QueriesParams, LaunchError> {
        if self.kv_heads == 0 || self.count == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let (rows, heads, kv) = (self.count, self.heads, self.kv_heads);
            return Err(LaunchError(format!(
                "unsupported attention: {rows} rows of {heads} heads over {kv} K/V heads"
            )));
        }
        if self.split_pages == 0 {
            return Err(LaunchError("a split must have at least one page".into()));
        }
        if partials.splits == 0 {
            return Err(LaunchError("there must be at least one split".into()));
        }
        let all = self.count * self.heads;
        let slots = self.page_kinds() * partials.splits * all;
        dimension("the queries' size", all * self.head_dim)?;
        let skip = if kind == PageKind::Quantized { partials.splits * all } else { 0 };
        let window = self.window.map_or(Ok(0), |window| dimension("the window", window))?;
        Ok(QueriesParams {
            rows: self.rows.checked("the queries", all * self.head_dim)?,
            places: self.places.checked("the rows' places", self.first + self.count)?,
            segments: self.segments.address()?,
            softmax: partials.softmax.checked("the partial softmaxes", slots)? + 8 * skip as u64,
            output: partials.output.checked("the partial outputs", slots * self.head_dim)?
                + 4 * (skip * self.head_dim) as u64,
            first: dimension("the first row", self.first)?,
            count: self.count as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            window,
            exact_head: self.zones.map_or(Ok(0), |zones| dimension("the exact head", zones.head))?,
            exact_tail: self.zones.map_or(Ok(-1), |zones| dimension("the exact tail", zones.tail))?,
            split_pages: dimension("the pages of a split", self.split_pages)?,
            tiles: dimension("tiles", self.columns().div_ceil(columns))?,
        })
    }

    pub(super) fn grid(&self, splits: usize, columns: usize) -> Result<[u32; 3], LaunchError> {
        let tiles = self.segments.count * self.columns().div_ceil(columns);
        Ok([dimension("splits", splits)? as u32, blocks("K/V heads", self.kv_heads)?, blocks("queries", tiles)?])
    }
}

/// Exact keys and values.
#[derive(Clone, Copy, Debug)]
pub struct ExactKv {
    /// `(kv_heads, 128, rotary_channels)`.
    pub keys: Pages,
    /// `(kv_heads, 128, head_dim)`.
    pub values: Pages,
    /// Element type of both.
    pub element: ElementType,
    /// Channels of the keys: `head_dim`, or for `attention_k_eq_v` the rotary ones; the other channels are the values'.
    pub rotary_channels: usize,
}

/// Parameters of the kernels over exact pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExactParams {
    queries: QueriesParams,
    keys: PagesParams,
    values: PagesParams,
    rotary_channels: i32,
}

// SAFETY: the `Params` of attend_exact.cpp.
unsafe impl Params for ExactParams {}

pub(super) fn check_rotary_channels(channels: usize, head_dim: usize) -> Result<(), LaunchError> {
    if channels == head_dim || (channels > 0 && channels < head_dim && channels.is_multiple_of(128)) {
        return Ok(());
    }
    Err(LaunchError(format!("keys have {channels} of {head_dim} channels; supported: all, or a multiple of 128")))
}

/// Whether [`exact`] has a kernel.
pub fn has_exact(head_dim: usize, key: ElementType, value: ElementType) -> bool {
    matches!(head_dim, 64 | 128 | 256 | 512) && key == value
}

/// Whether [`quantized`] has a kernel: for a scale per 128 channels in both.
pub fn has_quantized(key: PageLayout, value: PageLayout) -> bool {
    let fits = |layout| turboquant::check(layout).is_ok() && turboquant::scale_group(layout) == 128;
    fits(key) && fits(value)
}

/// Attention over the exact pages.
///
/// # Errors
/// If there is no kernel for the width, or a slice is too short.
pub fn exact(queries: &Queries, kv: &ExactKv, partials: &SplitPartials) -> Result<Launch<ExactParams>, LaunchError> {
    check_rotary_channels(kv.rotary_channels, queries.head_dim)?;
    if !has_exact(queries.head_dim, kv.element, kv.element) {
        let width = queries.head_dim;
        return Err(LaunchError(format!(
            "heads of {width} need the kernels of `attention_mixed`, or are not supported"
        )));
    }
    let kernel = match kv.element {
        ElementType::F16 if queries.head_dim >= 256 => f16_kernel(queries, partials.splits),
        element => exact_kernel(element, queries.head_dim),
    };
    let params = ExactParams {
        queries: queries.params(partials, PageKind::Exact, kernel.columns)?,
        keys: kv.keys.params()?,
        values: kv.values.params()?,
        rotary_channels: kv.rotary_channels as i32,
    };
    let (grid, threads) = (queries.grid(partials.splits, kernel.columns)?, kernel.threads);
    Ok(Launch { kernel: kernel.name, grid, threads, shared: kernel.shared, params })
}

/// A kernel over exact pages.
struct ExactKernel {
    name: &'static str,
    threads: u32,
    /// Columns of a tile.
    columns: usize,
    /// See [`Launch::shared`].
    shared: u32,
}

/// The kernel of attend_f16.cpp. The shared memory is what it asserts.
fn f16_kernel(queries: &Queries, splits: usize) -> ExactKernel {
    let columns = queries.columns();
    let blocks = splits * queries.kv_heads * queries.segments.count * columns.div_ceil(EXACT_COLUMNS);
    let wide = columns > 2 * EXACT_COLUMNS && blocks > H200_BLOCKS;
    let (name, columns, shared) = match (queries.head_dim, wide) {
        (256, true) => ("attend_f16_256_32", 32, 67_328),
        (256, false) => ("attend_f16_256", EXACT_COLUMNS, 0),
        (_, true) => ("attend_f16_512_24", 24, 75_072),
        (_, false) => ("attend_f16_512", EXACT_COLUMNS, 0),
    };
    ExactKernel { name, threads: 256, columns, shared }
}

/// The kernel of attend_exact.cpp.
fn exact_kernel(element: ElementType, head_dim: usize) -> ExactKernel {
    let name = match (element, head_dim) {
        (ElementType::F32, 64) => "attend_f32_64",
        (ElementType::F32, 128) => "attend_f32_128",
        (ElementType::F32, 256) => "attend_f32_256",
        (ElementType::F32, _) => "attend_f32_512",
        (ElementType::F16, 64) => "attend_f16_64",
        (ElementType::F16, _) => "attend_f16_128",
        (ElementType::Bf16, 64) => "attend_bf16_64",
        (ElementType::Bf16, 128) => "attend_bf16_128",
        (ElementType::Bf16, 256) => "attend_bf16_256",
        (ElementType::Bf16, _) => "attend_bf16_512",
    };
    ExactKernel { name, threads: 512, columns: EXACT_COLUMNS, shared: 0 }
}

/// Quantized keys and values.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedKv {
    /// Pages of `key_layout`.
    pub keys: Pages,
    /// Pages of `value_layout`.
    pub values: Pages,
    /// Keys of all channels; for `attention_k_eq_v` of the rotary ones, in the values' format.
    pub key_layout: PageLayout,
    /// Values; for `attention_k_eq_v` of [`Side::KEqV`].
    pub value_layout: PageLayout,
    /// `(rows, heads, head_dim / 4)`: the queries in 8 bits, see [`super::rows::QuantizedQueries`].
    pub query_words: DeviceSlice<u32>,
    /// `(rows, heads, head_dim / 128)`.
    pub query_scales: DeviceSlice<f32>,
}

/// Parameters of the kernels over quantized pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QuantizedParams {
    queries: QueriesParams,
    words: u64,
    word_scales: u64,
    keys: PagesParams,
    values: PagesParams,
    key: FormatParams,
    value: FormatParams,
    rotary_channels: i32,
    key_bytes: i32,
    value_bytes: i32,
}

// SAFETY: the `Params` of attend_quantized.cpp.
unsafe impl Params for QuantizedParams {}

/// Attention over the quantized pages.
///
/// # Errors
/// If there are no kernels for a layout, the layouts are incompatible, or a slice is too short.
pub fn quantized(
    queries: &Queries,
    kv: &QuantizedKv,
    partials: &SplitPartials,
) -> Result<Launch<QuantizedParams>, LaunchError> {
    let (key, value, width) = (kv.key_layout, kv.value_layout, queries.head_dim);
    if !has_quantized(key, value) {
        let names = [key, value].map(|layout| format!("{} of {} channels", layout.format().name(), layout.head_dim()));
        return Err(LaunchError(format!("pages of {} need the kernels of `attention_mixed`", names.join(" and "))));
    }
    check_rotary_channels(key.head_dim(), width)?;
    let side = if key.head_dim() == width { Side::Values } else { Side::KEqV };
    let formats_fit = side == Side::Values || key.format() == value.format();
    if value.head_dim() != width || key.side() != Side::Keys || value.side() != side || !formats_fit {
        return Err(LaunchError("the layouts of keys and values are incompatible".into()));
    }
    if queries.zones.is_none() {
        return Err(LaunchError("quantized pages require exact zones".into()));
    }
    let columns = if queries.columns() <= 8 { 8 } else { 16 };
    let kernel = match (width, columns) {
        (128, 8) => "attend_quantized_128_8",
        (128, _) => "attend_quantized_128_16",
        (256, 8) => "attend_quantized_256_8",
        (256, _) => "attend_quantized_256_16",
        (_, 8) => "attend_quantized_512_8",
        (_, _) => "attend_quantized_512_16",
    };
    let all = queries.count * queries.heads;
    let params = QuantizedParams {
        queries: queries.params(partials, PageKind::Quantized, columns)?,
        words: kv.query_words.checked("the quantized queries", all * width / 4)?,
        word_scales: kv.query_scales.checked_unaligned("the quantized queries' scales", all * width / 128)?,
        keys: kv.keys.params()?,
        values: kv.values.params()?,
        key: FormatParams::new(key),
        value: FormatParams::new(value),
        rotary_channels: key.head_dim() as i32,
        key_bytes: key.bytes() as i32,
        value_bytes: value.bytes() as i32,
    };
    Ok(Launch { kernel, grid: queries.grid(partials.splits, columns)?, threads: 256, shared: 0, params })
}

/// Parameters of the kernels that merge.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CombineParams {
    pub(super) queries: QueriesParams,
    pub(super) y: u64,
    pub(super) out: ActivationsParams, // of `y`
    pub(super) block: i32,             // inputs of a block of activations; 0: not quantized
    pub(super) splits: i32,
    pub(super) stores: i32,
    pub(super) rotated: i32,
    pub(super) k_eq_v_pairs: i32,
}

// SAFETY: the `Params` of combine.cpp.
unsafe impl Params for CombineParams {}

/// Merges the partials of [`exact`] and, with zones, [`quantized`]: `y` is `(rows, heads,
/// head_dim)`, not rotated, in the model's channel order.
///
/// # Errors
/// If there is no kernel for the width, or a slice is too short.
pub fn combine(
    queries: &Queries,
    partials: &SplitPartials,
    domain: Domain,
    order: Order,
    y: DeviceSlice<f32>,
) -> Result<Launch<CombineParams>, LaunchError> {
    let kernel = if partials.splits <= FEW_SPLITS {
        of_head_dim!("combine_few", queries.head_dim)?
    } else {
        of_head_dim!("combine", queries.head_dim)?
    };
    let all = queries.count * queries.heads;
    let params = CombineParams {
        queries: queries.params(partials, PageKind::Exact, EXACT_COLUMNS)?,
        y: y.checked("y", all * queries.head_dim)?,
        out: ActivationsParams::NONE,
        block: 0,
        splits: dimension("splits", partials.splits)?,
        stores: queries.page_kinds() as i32,
        rotated: (domain == Domain::Rotated).into(),
        k_eq_v_pairs: order.pairs(queries.head_dim)?,
    };
    let warps = if partials.splits <= FEW_SPLITS { 1 } else { 8 };
    let threads = 32 * warps * queries.head_dim.div_ceil(128) as u32;
    Ok(Launch { kernel, grid: [blocks("queries", all)?, 1, 1], threads, shared: 0, params })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A pass of decoding sequences and a chunk of a prompt, over pages of `width` channels.
    fn pass(segments: usize, longest: usize, width: usize) -> Queries {
        Queries {
            rows: DeviceSlice::new(0, usize::MAX / 4),
            places: DeviceSlice::new(0, 1 << 20),
            segments: Segments { slice: DeviceSlice::new(0, segments), count: segments, longest },
            first: 0,
            count: segments - 1 + longest,
            heads: 16,
            kv_heads: 1,
            head_dim: width,
            window: None,
            zones: None,
            split_pages: 2,
        }
    }

    fn planned(queries: &Queries, element: ElementType) -> Result<(), LaunchError> {
        let partials = SplitPartials {
            softmax: DeviceSlice::new(0, usize::MAX / 8),
            output: DeviceSlice::new(0, usize::MAX / 4),
            splits: 3,
        };
        let (pages, rotary_channels) = (Pages::all(0), queries.head_dim);
        exact(queries, &ExactKv { keys: pages, values: pages, element, rotary_channels }, &partials)?;
        let y = DeviceSlice::new(0, usize::MAX / 4);
        combine(queries, &partials, Domain::Unrotated, Order::Model, y).map(drop)
    }

    #[test]
    fn max_rows_fit_the_grid() {
        // Tiles of 101 segments, as many for each as for the longest; blocks that merge all queries of one segment.
        for (segments, longest, width) in [(101, 400, 512), (101, 400, 128), (1, 5000, 64), (300, 16, 256)] {
            let pass = pass(segments, longest, width);
            let most = pass.max_rows();
            for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
                for first in (0..pass.count).step_by(most) {
                    let part = Queries { first, count: most.min(pass.count - first), ..pass };
                    planned(&part, element).unwrap_or_else(|error| panic!("{segments} {longest} {width}: {error}"));
                }
            }
        }
        assert!(planned(&pass(101, 400, 512), ElementType::F32).is_err(), "without a limit");
        assert!(planned(&pass(1, 5000, 64), ElementType::F32).is_err(), "without a limit");
        let decoding = pass(300, 16, 256);
        assert!(decoding.max_rows() >= decoding.count, "a limit where none is necessary");
    }

    #[test]
    fn splits_without_pages_are_an_error() {
        let queries = Queries { split_pages: 0, ..pass(1, 1, 64) };
        assert_eq!(queries.splits(0, 300), 3); // as with one page
        let error = planned(&queries, ElementType::F32).expect_err("splits without pages");
        assert!(error.to_string().contains("a split must have at least one page"), "{error}");
    }

    #[test]
    fn no_splits_are_an_error() {
        let partials = SplitPartials { softmax: DeviceSlice::new(0, 0), output: DeviceSlice::new(0, 0), splits: 0 };
        let y = DeviceSlice::new(0, 16 * 64);
        let launch = combine(&pass(1, 1, 64), &partials, Domain::Unrotated, Order::Model, y);
        let error = launch.expect_err("no memory for a split");
        assert!(error.to_string().contains("at least one split"), "{error}");
    }
}
