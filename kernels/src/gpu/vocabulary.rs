//! Choices over scores: `vocabulary.cpp`. With [`super::matmul::matmul_buckets`] between them, top-k and argmax are the
//! centroid head: a centroid is a bucket, and its tokens' rows of the embedding are the bucket's matrix.

use super::{Launch, Params, Span, Unfit, blocks, dimension, optional};

/// Most elements of a [`top_k`].
pub const MOST_RANKED: usize = 4096;

/// Elements of a row per block of [`argmax_parts`].
const PER_BLOCK: usize = 4096;

/// What [`argmax`] writes where no element is a number, or all are suppressed.
pub const NO_ID: u32 = u32::MAX;

/// Parameters of the top-k.
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

/// Indices of the `k` largest of `n` elements, largest first, the lower index first among equals:
/// [`crate::vocabulary::top_k`].
///
/// # Errors
/// If `k > n`, there are more than [`MOST_RANKED`], or a span is too short.
pub fn top_k((x, n): (Span<f32>, usize), (indices, k): (Span<i32>, usize)) -> Result<Launch<TopParams>, Unfit> {
    if n == 0 || k > n || n > MOST_RANKED {
        return Err(Unfit(format!("the {k} largest of {n}; at most {MOST_RANKED} can be ranked")));
    }
    let padded = n.next_power_of_two();
    let params = TopParams {
        x: x.holding("x", n)?,
        indices: indices.holding("the indices", k)?,
        n: n as i32,
        padded: padded as i32,
        k: k as i32,
    };
    let threads = (padded / 2).clamp(32, 1024) as u32;
    Ok(Launch { kernel: "top_k", grid: [1, 1, 1], block: [threads, 1, 1], params })
}

/// Rows of scores.
#[derive(Clone, Copy, Debug)]
pub struct Scores {
    /// `(rows, n)`, rows `stride` apart.
    pub x: Span<f32>,
    /// Rows.
    pub rows: usize,
    /// Elements of a row.
    pub n: usize,
    /// Elements from row to row.
    pub stride: usize,
    /// `cap * tanh(x / cap)` is compared; without, `x`.
    pub cap: Option<f32>,
    /// Ids that cannot win, and how many.
    pub suppressed: Option<(Span<u32>, usize)>,
    /// Where elements are not in order of their ids.
    pub grouped: Option<Grouped>,
}

/// Element `i` has the id `ordering[groups[i / len] * len + i % len]`.
#[derive(Clone, Copy, Debug)]
pub struct Grouped {
    /// Which groups.
    pub groups: Span<i32>,
    /// Ids, group by group.
    pub ordering: Span<u32>,
    /// Ids of a group.
    pub len: usize,
}

/// Parameters of both halves of the argmax.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ArgmaxParams {
    x: u64,
    suppressed: u64,
    groups: u64,
    ordering: u64,
    partial: u64,
    ids: u64,
    n: i32,
    stride: i32,
    num_suppressed: i32,
    group: i32,
    blocks: i32,
    cap: f32,
}

// SAFETY: the `ArgmaxParams` of vocabulary.cpp.
unsafe impl Params for ArgmaxParams {}

impl Scores {
    /// Elements of the room between the two halves.
    pub const fn partial_len(rows: usize, n: usize) -> usize {
        rows * n.div_ceil(PER_BLOCK)
    }

    fn params(&self, partial: Span<[u32; 2]>, ids: Span<u32>) -> Result<ArgmaxParams, Unfit> {
        let Self { x, rows, n, stride, cap, suppressed, grouped } = *self;
        if rows == 0 || n == 0 || stride < n {
            return Err(Unfit(format!("the largest of {rows} rows of {n}, {stride} apart")));
        }
        let num_suppressed = suppressed.map_or(0, |(_, count)| count);
        let group = grouped.map_or(1, |grouped| grouped.len.max(1));
        Ok(ArgmaxParams {
            x: x.holding("the scores", (rows - 1) * stride + n)?,
            suppressed: optional(suppressed.map(|(ids, _)| ids), "the suppressed ids", num_suppressed)?,
            groups: optional(grouped.map(|grouped| grouped.groups), "the groups", n.div_ceil(group))?,
            ordering: optional(grouped.map(|grouped| grouped.ordering), "the ordering", group)?,
            partial: partial.holding("the parts' largest", Self::partial_len(rows, n))?,
            ids: ids.holding_single("the ids", rows)?,
            n: dimension("n", n)?,
            stride: dimension("the stride", stride)?,
            num_suppressed: dimension("suppressed ids", num_suppressed)?,
            group: dimension("the group", group)?,
            blocks: n.div_ceil(PER_BLOCK) as i32,
            cap: cap.unwrap_or(0.0),
        })
    }
}

/// First half of the argmax.
///
/// # Errors
/// If a span is too short.
pub fn argmax_parts(scores: &Scores, partial: Span<[u32; 2]>, ids: Span<u32>) -> Result<Launch<ArgmaxParams>, Unfit> {
    let grid = [blocks("elements", scores.n.div_ceil(PER_BLOCK))?, blocks("rows", scores.rows)?, 1];
    Ok(Launch { kernel: "argmax_parts", grid, block: [256, 1, 1], params: scores.params(partial, ids)? })
}

/// Second half: every row's largest, the lowest id of equals; [`NO_ID`] if there is none.
///
/// # Errors
/// If a span is too short.
pub fn argmax(scores: &Scores, partial: Span<[u32; 2]>, ids: Span<u32>) -> Result<Launch<ArgmaxParams>, Unfit> {
    let grid = [blocks("rows", scores.rows)?, 1, 1];
    Ok(Launch { kernel: "argmax", grid, block: [32, 1, 1], params: scores.params(partial, ids)? })
}
