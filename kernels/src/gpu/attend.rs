//! Attention over pages: `attend_exact.cpp`, `attend_coded.cpp`, `combine.cpp`.
//!
//! One launch per part that a layer has, exact and coded, each leaving an unfinished softmax per split and query; then one
//! that merges them. Splits lie fixed in the sequence.

use super::codes::{self, FormatParams};
use super::pages::{Pages, PagesParams};
use super::rows::{Domain, Order};
use super::{Launch, Params, Span, Unfit, blocks, dimension};
use crate::ElementType;
use crate::turbo::{PageLayout, Side};

/// The positions around a query that are read exactly, where there are codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zones {
    /// The first ones of the sequence.
    pub head: usize,
    /// The newest ones, rounded to whole pages as the CPU does.
    pub tail: usize,
}

/// The queries of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Queries {
    /// `(rows, heads, head_dim)`, in the domain and order of the store.
    pub rows: Span<f32>,
    /// `(rows)`: position, and the first position that must not be seen. Neither falls from row to row.
    pub at: Span<[i32; 2]>,
    /// Rows.
    pub count: usize,
    /// Query heads.
    pub heads: usize,
    /// K/V heads: they divide the heads.
    pub kv_heads: usize,
    /// Width.
    pub head_dim: usize,
    /// Positions that a query sees, its own among them.
    pub window: Option<usize>,
    /// Exact zones; none without codes.
    pub zones: Option<Zones>,
    /// Pages per split: the same for a session's life, since it decides the order of summation.
    pub split_pages: usize,
}

/// Room for unfinished softmaxes.
#[derive(Clone, Copy, Debug)]
pub struct Unfinished {
    /// `(parts, splits, rows * heads)` of maximum and sum.
    pub running: Span<[f64; 2]>,
    /// `(parts, splits, rows * heads, head_dim)`.
    pub output: Span<f32>,
    /// Splits that the queries' positions can reach, from the first that any sees: more is harmless.
    pub splits: usize,
}

/// Which kernel fills a part of [`Unfinished`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Exact,
    Coded,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct QueriesParams {
    rows: u64,
    at: u64,
    running: u64,
    output: u64,
    count: i32,
    heads: i32,
    kv_heads: i32,
    window: i32,
    exact_head: i32,
    exact_tail: i32,
    split_pages: i32,
}

impl Queries {
    fn parts(&self) -> usize {
        if self.zones.is_some() { 2 } else { 1 }
    }

    /// Splits from the first that a query at `first` sees to the last below `end`.
    pub fn splits(&self, first: usize, end: usize) -> usize {
        let split = self.split_pages * crate::turbo::PAGE_TOKENS;
        let start = self.window.map_or(0, |window| (first + 1).saturating_sub(window));
        end.div_ceil(split).saturating_sub(start / split).max(1)
    }

    fn params(&self, room: &Unfinished, part: Part) -> Result<QueriesParams, Unfit> {
        if self.kv_heads == 0 || self.count == 0 || self.heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            let (rows, heads, kv) = (self.count, self.heads, self.kv_heads);
            return Err(Unfit(format!("attention of {rows} rows of {heads} heads over {kv} K/V heads")));
        }
        if self.split_pages == 0 {
            return Err(Unfit("splits of no pages".into()));
        }
        let all = self.count * self.heads;
        let slots = self.parts() * room.splits * all;
        dimension("the queries' size", all * self.head_dim)?;
        let skip = if part == Part::Coded { room.splits * all } else { 0 };
        let window = self.window.map_or(Ok(0), |window| dimension("the window", window))?;
        Ok(QueriesParams {
            rows: self.rows.holding("the queries", all * self.head_dim)?,
            at: self.at.holding("the queries' positions", self.count)?,
            running: room.running.holding("the unfinished softmaxes", slots)? + 16 * skip as u64,
            output: room.output.holding("the unfinished outputs", slots * self.head_dim)?
                + 4 * (skip * self.head_dim) as u64,
            count: self.count as i32,
            heads: self.heads as i32,
            kv_heads: self.kv_heads as i32,
            window,
            exact_head: self.zones.map_or(Ok(0), |zones| dimension("the exact head", zones.head))?,
            exact_tail: self.zones.map_or(Ok(-1), |zones| dimension("the exact tail", zones.tail))?,
            split_pages: dimension("the pages of a split", self.split_pages)?,
        })
    }

    fn grid(&self, splits: usize, columns: usize) -> Result<[u32; 3], Unfit> {
        let tiles = (self.count * (self.heads / self.kv_heads)).div_ceil(columns);
        Ok([dimension("splits", splits.max(1))? as u32, blocks("K/V heads", self.kv_heads)?, blocks("queries", tiles)?])
    }
}

/// Exact keys and values.
#[derive(Clone, Copy, Debug)]
pub struct ExactKv {
    /// `(kv_heads, 128, own)`.
    pub keys: Pages,
    /// `(kv_heads, 128, head_dim)`.
    pub values: Pages,
    /// Of both.
    pub element: ElementType,
    /// Channels of the keys: `head_dim`, or where K and V share, those that rotate; the others are the values'.
    pub own: usize,
}

/// Parameters of the kernels over exact pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ExactParams {
    queries: QueriesParams,
    keys: PagesParams,
    values: PagesParams,
    own: i32,
}

// SAFETY: the `Params` of attend_exact.cpp.
unsafe impl Params for ExactParams {}

fn check_own(own: usize, head_dim: usize) -> Result<(), Unfit> {
    if own == head_dim || (own > 0 && own < head_dim && own.is_multiple_of(128)) {
        return Ok(());
    }
    Err(Unfit(format!("keys with {own} channels of their own, of {head_dim}: all, or a multiple of 128")))
}

/// Attends the keys that are read exactly.
///
/// # Errors
/// If there is no kernel for the width, or a span is too short.
pub fn exact(queries: &Queries, kv: &ExactKv, room: &Unfinished) -> Result<Launch<ExactParams>, Unfit> {
    check_own(kv.own, queries.head_dim)?;
    let kernel = match (kv.element, queries.head_dim) {
        (ElementType::F32, 64) => "attend_f32_64",
        (ElementType::F32, 128) => "attend_f32_128",
        (ElementType::F32, 256) => "attend_f32_256",
        (ElementType::F32, 512) => "attend_f32_512",
        (ElementType::F16, 64) => "attend_f16_64",
        (ElementType::F16, 128) => "attend_f16_128",
        (ElementType::F16, 256) => "attend_f16_256",
        (ElementType::F16, 512) => "attend_f16_512",
        (ElementType::Bf16, 64) => "attend_bf16_64",
        (ElementType::Bf16, 128) => "attend_bf16_128",
        (ElementType::Bf16, 256) => "attend_bf16_256",
        (ElementType::Bf16, 512) => "attend_bf16_512",
        (_, width) => return Err(Unfit(format!("no kernels for heads of {width}; 64, 128, 256 and 512 have some"))),
    };
    let params = ExactParams {
        queries: queries.params(room, Part::Exact)?,
        keys: kv.keys.params()?,
        values: kv.values.params()?,
        own: kv.own as i32,
    };
    Ok(Launch { kernel, grid: queries.grid(room.splits, 8)?, block: [256, 1, 1], params })
}

/// Coded keys and values.
#[derive(Clone, Copy, Debug)]
pub struct CodedKv {
    /// Pages of `key_layout`.
    pub keys: Pages,
    /// Pages of `value_layout`.
    pub values: Pages,
    /// Keys of all channels; or where K and V share, of those that rotate, and then in the values' format.
    pub key_layout: PageLayout,
    /// Values, or both.
    pub value_layout: PageLayout,
    /// `(rows, heads, head_dim / 4)`: the queries' bytes, see [`super::rows::Words`].
    pub words: Span<u32>,
    /// `(rows, heads, head_dim / 128)`.
    pub word_scales: Span<f32>,
}

/// Parameters of the kernels over coded pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CodedParams {
    queries: QueriesParams,
    words: u64,
    word_scales: u64,
    keys: PagesParams,
    values: PagesParams,
    key: FormatParams,
    value: FormatParams,
    own: i32,
    key_bytes: i32,
    value_bytes: i32,
}

// SAFETY: the `Params` of attend_coded.cpp.
unsafe impl Params for CodedParams {}

/// Attends the keys that are read as codes.
///
/// # Errors
/// If there are no kernels for a layout, the layouts do not go together, or a span is too short.
pub fn coded(queries: &Queries, kv: &CodedKv, room: &Unfinished) -> Result<Launch<CodedParams>, Unfit> {
    let (key, value, width) = (kv.key_layout, kv.value_layout, queries.head_dim);
    codes::check(key)?;
    codes::check(value)?;
    check_own(key.head_dim(), width)?;
    let sides = if key.head_dim() == width { Side::Values } else { Side::Shared };
    let shares = sides == Side::Values || key.format() == value.format();
    if value.head_dim() != width || key.side() != Side::Keys || value.side() != sides || !shares {
        return Err(Unfit("the layouts of keys and values do not go together".into()));
    }
    if queries.zones.is_none() {
        return Err(Unfit("codes without exact zones".into()));
    }
    let columns = queries.count * (queries.heads / queries.kv_heads.max(1));
    let kernel = match (width, columns <= 8) {
        (128, true) => "attend_coded_128_8",
        (128, false) => "attend_coded_128_16",
        (256, true) => "attend_coded_256_8",
        (256, false) => "attend_coded_256_16",
        (_, true) => "attend_coded_512_8",
        (_, false) => "attend_coded_512_16",
    };
    let all = queries.count * queries.heads;
    let params = CodedParams {
        queries: queries.params(room, Part::Coded)?,
        words: kv.words.holding("the queries' bytes", all * width / 4)?,
        word_scales: kv.word_scales.holding("the bytes' scales", all * width / 128)?,
        keys: kv.keys.params()?,
        values: kv.values.params()?,
        key: FormatParams::new(key),
        value: FormatParams::new(value),
        own: key.head_dim() as i32,
        key_bytes: key.bytes() as i32,
        value_bytes: value.bytes() as i32,
    };
    let grid = queries.grid(room.splits, if columns <= 8 { 8 } else { 16 })?;
    Ok(Launch { kernel, grid, block: [256, 1, 1], params })
}

/// Parameters of the kernels that merge.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CombineParams {
    queries: QueriesParams,
    y: u64,
    head_dim: i32,
    splits: i32,
    parts: i32,
    rotated: i32,
    shared_pairs: i32,
}

// SAFETY: the `Params` of combine.cpp.
unsafe impl Params for CombineParams {}

/// Merges what [`exact`], and with zones [`coded`], left: `y` is `(rows, heads, head_dim)` in the model's domain and order.
///
/// # Errors
/// If there is no kernel for the width, or a span is too short.
pub fn combine(
    queries: &Queries,
    room: &Unfinished,
    (domain, order): (Domain, Order),
    y: Span<f32>,
) -> Result<Launch<CombineParams>, Unfit> {
    let kernel = match queries.head_dim {
        64 => "combine_64",
        128 | 256 | 512 => "combine_128",
        width => return Err(Unfit(format!("no kernels for heads of {width}; 64, 128, 256 and 512 have some"))),
    };
    let all = queries.count * queries.heads;
    let params = CombineParams {
        queries: queries.params(room, Part::Exact)?,
        y: y.holding("y", all * queries.head_dim)?,
        head_dim: queries.head_dim as i32,
        splits: dimension("splits", room.splits)?,
        parts: queries.parts() as i32,
        rotated: (domain == Domain::Rotated).into(),
        shared_pairs: order.pairs(queries.head_dim)?,
    };
    let grid = [dimension("queries", all)? as u32, queries.head_dim.div_ceil(128) as u32, 1];
    Ok(Launch { kernel, grid, block: [256, 1, 1], params })
}
