//! The mixture of experts: `experts.cpp`. [`route`], [`sort_route`] after more than [`BLOCK_ROWS`] rows,
//! [`super::matmul::matmul_buckets`] over gate and up, the gated activation, `matmul_buckets` over down (whose rows are
//! entries), [`mix`].

use super::matmul::{Buckets, LARGEST_BUCKET};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};

/// Entries of a call, at most: they are `rows * top_k`.
pub const MAX_ENTRIES: usize = 4096;
/// Experts, at most.
pub const MAX_EXPERTS: usize = 256;
/// Experts of a row, at most.
pub const MAX_EXPERTS_PER_ROW: usize = 16;

/// Rows that a block of [`route`] chooses experts for. So many are sorted in the same launch.
pub const BLOCK_ROWS: usize = 16;

/// A route; an entry is a row of one expert, and entries are in order of expert, then row.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// Buckets of up to `largest` entries of one expert, at most [`max_buckets`].
    pub buckets: Buckets,
    /// `(rows, top_k)`: the entries of a row, in order of the experts.
    pub entries: DeviceSlice<i32>,
    /// `(rows, top_k)`: their weights.
    pub weights: DeviceSlice<f32>,
}

/// Buckets of up to `largest` entries, at most: of every expert's, all but the last are full.
pub fn max_buckets(entries: usize, experts: usize, largest: usize) -> usize {
    entries.min(experts + entries / largest.max(1))
}

/// Parameters of the routing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RouteParams {
    scores: u64,
    scale: u64,
    matrices: u64,
    starts: u64,
    count: u64,
    rows_of: u64,
    entries: u64,
    weights: u64,
    rows: i32,
    experts: i32,
    top_k: i32,
    largest: i32,
}

// SAFETY: the `RouteParams` of experts.cpp.
unsafe impl Params for RouteParams {}

/// Softmax over the experts; the largest `top_k` renormalised to sum 1, each times its expert's scale. Of more than
/// [`BLOCK_ROWS`] rows, [`sort_route`] completes the route.
///
/// * `scores`: `(rows, experts)`; `scale`: `(experts)`.
///
/// # Errors
/// If there are more than [`MAX_ENTRIES`], [`MAX_EXPERTS`] or [`MAX_EXPERTS_PER_ROW`], or a slice is too short.
pub fn route(
    scores: DeviceSlice<f32>,
    scale: DeviceSlice<f32>,
    (rows, experts, top_k): (usize, usize, usize),
    route: &Route,
) -> Result<Launch<RouteParams>, LaunchError> {
    let (entries, largest) = (rows.saturating_mul(top_k), route.buckets.largest);
    if entries == 0 || entries > MAX_ENTRIES || experts > MAX_EXPERTS || top_k > MAX_EXPERTS_PER_ROW.min(experts) {
        let supported = format!("at most {MAX_EXPERTS_PER_ROW} of {MAX_EXPERTS}, and {MAX_ENTRIES} entries");
        return Err(LaunchError(format!("{top_k} of {experts} experts for {rows} rows; supported are {supported}")));
    }
    if !(1..=LARGEST_BUCKET).contains(&largest) {
        return Err(LaunchError(format!("buckets of {largest} entries; 1 to {LARGEST_BUCKET} are supported")));
    }
    let most = max_buckets(entries, experts, largest);
    let rows_of = route.buckets.rows.ok_or_else(|| LaunchError("a route requires the entries' rows".into()))?;
    let params = RouteParams {
        scores: scores.checked("the router's scores", rows * experts)?,
        scale: scale.checked("the experts' scales", experts)?,
        matrices: route.buckets.matrices.checked("the buckets' matrices", most)?,
        starts: route.buckets.starts.checked("the buckets' starts", most + 1)?,
        count: route.buckets.count.checked("the number of buckets", 1)?,
        rows_of: rows_of.checked("the entries' rows", entries)?,
        entries: route.entries.checked("the rows' entries", entries)?,
        weights: route.weights.checked("the rows' weights", entries)?,
        rows: rows as i32,
        experts: experts as i32,
        top_k: top_k as i32,
        largest: largest as i32,
    };
    let grid = [rows.div_ceil(BLOCK_ROWS) as u32, 1, 1];
    Ok(Launch { kernel: "route", grid, threads: 512, shared: 0, params })
}

/// Sorts the entries after a launch of [`route`](fn@route); `None` for up to [`BLOCK_ROWS`] rows, which that launch
/// sorts itself.
pub fn sort_route(route: &Launch<RouteParams>) -> Option<Launch<RouteParams>> {
    let is_sorted = route.grid[0] == 1;
    (!is_sorted).then_some(Launch { kernel: "sort_route", grid: [1, 1, 1], threads: 1024, ..*route })
}

/// An expert that every row is routed to.
#[derive(Clone, Copy, Debug)]
pub struct SharedExpert {
    /// `(rows, width)`: its results.
    pub x: DeviceSlice<f32>,
    /// `(rows)`: its weight is the sigmoid.
    pub gate: DeviceSlice<f32>,
}

/// Parameters of the mixing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MixParams {
    parts: u64,
    entries: u64,
    weights: u64,
    shared: u64,
    gate: u64,
    y: u64,
    width: i32,
    top_k: i32,
}

// SAFETY: the `MixParams` of experts.cpp.
unsafe impl Params for MixParams {}

/// `y[row] = sum of weight * parts[entry]` over the row's entries, in order of the experts; then
/// plus the shared expert's, if there is one.
///
/// * `parts`: `(rows * top_k, width)`; `y`: `(rows, width)`.
///
/// # Errors
/// If a slice is too short.
pub fn mix(
    parts: DeviceSlice<f32>,
    route: &Route,
    (rows, top_k, width): (usize, usize, usize),
    shared: Option<SharedExpert>,
    y: DeviceSlice<f32>,
) -> Result<Launch<MixParams>, LaunchError> {
    let params = MixParams {
        parts: parts.checked("the experts' results", rows * top_k * width)?,
        entries: route.entries.checked("the rows' entries", rows * top_k)?,
        weights: route.weights.checked("the rows' weights", rows * top_k)?,
        shared: optional(shared.map(|shared| shared.x), "the shared expert's results", rows * width)?,
        gate: optional(shared.map(|shared| shared.gate), "the shared expert's gates", rows)?,
        y: y.checked("y", rows * width)?,
        width: dimension("width", width)?,
        top_k: dimension("choices", top_k)?,
    };
    let grid = [blocks("width", width.div_ceil(256))?, blocks("rows", rows)?, 1];
    Ok(Launch { kernel: "mix", grid, threads: 256, shared: 0, params })
}
