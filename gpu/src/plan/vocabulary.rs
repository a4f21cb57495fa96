//! Top-k, argmax, and a row's largest logits for sampling: `vocabulary.cpp`. With
//! [`super::matmul::matmul_buckets`] between them, they are the centroid head: a centroid is a bucket, and its
//! tokens' rows of the embedding are the bucket's matrix.

use super::segments::Segments;
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};

/// Upper bound of a [`top_k`]'s elements.
pub const MAX_TOP_K: usize = 4096;

/// Elements of a row per block of [`argmax_parts`].
const PER_BLOCK: usize = 4096;

/// Written by [`argmax`] if an element is NaN, the largest that is not suppressed is infinite, or all are suppressed.
pub const NO_ID: u32 = u32::MAX;

/// Parameters of [`top_k`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TopParams {
    x: u64,
    indices: u64,
    n: i32,
    padded: i32,
    k: i32,
}

// SAFETY: the `TopParams` of vocabulary.cpp.
unsafe impl Params for TopParams {}

/// Indices of the `k` largest of each row's `n` elements, largest first, the lower index first among equals:
/// [`foretoken_kernels::vocabulary::top_k`]. `x`: `(rows, n)`, `indices`: `(rows, k)`.
///
/// # Errors
/// If `k > n`, there are more than [`MAX_TOP_K`], or a slice is too short.
pub fn top_k(
    x: DeviceSlice<f32>,
    rows: usize,
    n: usize,
    indices: DeviceSlice<i32>,
    k: usize,
) -> Result<Launch<TopParams>, LaunchError> {
    if n == 0 || k > n || n > MAX_TOP_K {
        return Err(LaunchError(format!("top {k} of {n}; at most {MAX_TOP_K} elements are supported")));
    }
    let padded = n.next_power_of_two();
    let params = TopParams {
        x: x.checked("x", rows * n)?,
        indices: indices.checked("the indices", rows * k)?,
        n: n as i32,
        padded: padded as i32,
        k: k as i32,
    };
    let threads = (padded / 2).clamp(32, 1024) as u32;
    Ok(Launch { kernel: "top_k", grid: [blocks("rows", rows)?, 1, 1], threads, shared: 0, params })
}

/// Rows of scores.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// `(rows, n)`, rows `stride` apart.
    pub x: DeviceSlice<f32>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub n: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// `cap * tanh(x / cap)` is compared; `x` if `None`.
    pub cap: Option<f32>,
    /// Ids that are never chosen.
    pub suppressed: Option<DeviceSlice<u32>>,
    /// The ids of elements that are not in order of id.
    pub grouped: Option<Grouped>,
}

/// Element `i` of a row has the id `ordering[groups[row][i / len] * len + i % len]`.
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// `(rows, n / len)`: each row's groups in order, none twice, all within `ordering`.
    pub groups: DeviceSlice<i32>,
    /// All ids, group by group: at least `n`.
    pub ordering: DeviceSlice<u32>,
    /// Ids per group.
    pub len: usize,
}

/// Where [`argmax`] writes.
#[derive(Clone, Copy, Debug)]
pub enum Chosen {
    /// `(rows)`.
    Ids(DeviceSlice<u32>),
    /// To the states of the sequences, one per row.
    Draft {
        /// The sequences.
        segments: Segments,
        /// Index of the draft.
        index: usize,
    },
}

/// Parameters of [`argmax_parts`] and [`argmax`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ArgmaxParams {
    x: u64,
    suppressed: u64,
    groups: u64,
    ordering: u64,
    partial: u64,
    ids: u64,
    segments: u64,
    n: i32,
    stride: i32,
    num_suppressed: i32,
    group: i32,
    blocks: i32,
    draft: i32,
    cap: f32,
}

// SAFETY: the `ArgmaxParams` of vocabulary.cpp.
unsafe impl Params for ArgmaxParams {}

impl Scores {
    /// Elements of `partial`, the results of [`argmax_parts`].
    pub const fn partial_len(rows: usize, n: usize) -> usize {
        rows * n.div_ceil(PER_BLOCK)
    }

    fn params(&self, partial: DeviceSlice<[u32; 2]>, chosen: &Chosen) -> Result<ArgmaxParams, LaunchError> {
        let Self { x, rows, n, stride, cap, suppressed, grouped } = *self;
        if rows == 0 || n == 0 || stride < n {
            return Err(LaunchError(format!(
                "argmax of {rows} rows of {n}, {stride} apart: rows must not overlap or be empty"
            )));
        }
        let (ids, segments, draft) = match chosen {
            Chosen::Ids(ids) => (ids.checked_unaligned("the ids", rows)?, 0, 0),
            Chosen::Draft { segments, index } if segments.count >= rows => {
                (0, segments.address()?, dimension("the draft", *index)?)
            }
            Chosen::Draft { segments, .. } => {
                return Err(LaunchError(format!("drafts of {rows} rows for {} sequences", segments.count)));
            }
        };
        let group = grouped.map_or(1, |grouped| grouped.len.max(1));
        if !n.is_multiple_of(group) {
            return Err(LaunchError(format!("argmax of {n} scores in groups of {group}: not a multiple")));
        }
        let num_suppressed = suppressed.map_or(0, DeviceSlice::len);
        Ok(ArgmaxParams {
            x: x.checked("the scores", (rows - 1) * stride + n)?,
            suppressed: optional(suppressed, "the suppressed ids", num_suppressed)?,
            groups: optional(grouped.map(|grouped| grouped.groups), "the groups", rows * (n / group))?,
            ordering: optional(grouped.map(|grouped| grouped.ordering), "the ordering", n)?,
            partial: partial.checked("the partial results", Self::partial_len(rows, n))?,
            ids,
            segments,
            n: dimension("n", n)?,
            stride: dimension("the stride", stride)?,
            num_suppressed: dimension("suppressed ids", num_suppressed)?,
            group: dimension("the group", group)?,
            blocks: n.div_ceil(PER_BLOCK) as i32,
            draft,
            cap: cap.unwrap_or(0.0),
        })
    }
}

/// The largest element of each part of a row.
///
/// # Errors
/// If a slice is too short.
pub fn argmax_parts(
    scores: &Scores,
    partial: DeviceSlice<[u32; 2]>,
    chosen: &Chosen,
) -> Result<Launch<ArgmaxParams>, LaunchError> {
    let grid = [blocks("elements", scores.n.div_ceil(PER_BLOCK))?, blocks("rows", scores.rows)?, 1];
    Ok(Launch { kernel: "argmax_parts", grid, threads: 256, shared: 0, params: scores.params(partial, chosen)? })
}

/// The largest of each row's parts, ties by lowest id; or [`NO_ID`].
///
/// # Errors
/// If a slice is too short.
pub fn argmax(
    scores: &Scores,
    partial: DeviceSlice<[u32; 2]>,
    chosen: &Chosen,
) -> Result<Launch<ArgmaxParams>, LaunchError> {
    let grid = [blocks("rows", scores.rows)?, 1, 1];
    Ok(Launch { kernel: "argmax", grid, threads: 32, shared: 0, params: scores.params(partial, chosen)? })
}

/// Elements of a row that [`largest`] keeps.
pub const KEPT: usize = 64;

/// Upper bound of a row's elements for [`largest`].
pub const MAX_KEPT_OF: usize = PER_BLOCK * (MAX_TOP_K / KEPT);

/// Parameters of [`largest_parts`] and [`largest`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LargestParams {
    x: u64,
    suppressed: u64,
    partial: u64,
    best: u64,
    n: i32,
    stride: i32,
    num_suppressed: i32,
    parts: i32,
}

// SAFETY: the `LargestParams` of vocabulary.cpp.
unsafe impl Params for LargestParams {}

/// The results of [`largest_parts`] and [`largest`]: bits of an element, and its id.
#[derive(Clone, Copy, Debug)]
pub struct Largest {
    /// [`Largest::partial_len`].
    pub partial: DeviceSlice<[u32; 2]>,
    /// `(rows, KEPT)`: the largest first, the lower id first among equals, NaN before all, also of suppressed ids.
    /// [`NO_ID`] if there are fewer.
    pub best: DeviceSlice<[u32; 2]>,
}

impl Largest {
    /// Elements of the parts' results.
    pub const fn partial_len(rows: usize, n: usize) -> usize {
        rows * n.div_ceil(PER_BLOCK) * KEPT
    }

    fn params(&self, scores: &Scores) -> Result<LargestParams, LaunchError> {
        let Scores { x, rows, n, stride, suppressed, .. } = *scores;
        if rows == 0 || n == 0 || n > MAX_KEPT_OF || stride < n || scores.grouped.is_some() {
            return Err(LaunchError(format!(
                "the largest of {rows} rows of {n}, {stride} apart: at most {MAX_KEPT_OF} elements in order of id are supported"
            )));
        }
        let num_suppressed = suppressed.map_or(0, DeviceSlice::len);
        Ok(LargestParams {
            x: x.checked("the scores", (rows - 1) * stride + n)?,
            suppressed: optional(suppressed, "the suppressed ids", num_suppressed)?,
            partial: self.partial.checked("the parts' largest", Self::partial_len(rows, n))?,
            best: self.best.checked("the largest", rows * KEPT)?,
            n: n as i32,
            stride: dimension("the stride", stride)?,
            num_suppressed: dimension("suppressed ids", num_suppressed)?,
            parts: n.div_ceil(PER_BLOCK) as i32,
        })
    }
}

/// The largest elements of each part of a row. The soft cap does not change their order and is not applied.
///
/// # Errors
/// If a row is too long, its elements are not in order of id, or a slice is too short.
pub fn largest_parts(scores: &Scores, largest: &Largest) -> Result<Launch<LargestParams>, LaunchError> {
    let grid = [blocks("elements", scores.n.div_ceil(PER_BLOCK))?, blocks("rows", scores.rows)?, 1];
    Ok(Launch { kernel: "largest_parts", grid, threads: 1024, shared: 0, params: largest.params(scores)? })
}

/// The largest of each row's parts.
///
/// # Errors
/// As [`largest_parts`].
pub fn largest(scores: &Scores, largest: &Largest) -> Result<Launch<LargestParams>, LaunchError> {
    let grid = [blocks("rows", scores.rows)?, 1, 1];
    Ok(Launch { kernel: "largest", grid, threads: 1024, shared: 0, params: largest.params(scores)? })
}
