//! Query operands of attention over a page.

use super::layout::LANES;
use super::page::Page;
use super::query::{QuantizedQuery, QueryWords};
use super::scalar::total;
use super::side::PAGE_TOKENS;
use crate::attention::query::{QUERY_BLOCK, Query};
use crate::simd::levels::LevelLanes;

/// A query that sees tokens of the page.
#[derive(Clone, Copy)]
pub(super) struct ActiveQuery<'a> {
    /// Its index, and that of its row of scores.
    pub row: usize,
    pub query: &'a [f32],
    pub words: QueryWords<'a>,
}

/// The queries that see any token, and their number; the last one is repeated to fill the array.
#[inline(always)]
pub(super) fn active_queries<'a>(
    queries: &'a [Query<'_>],
    words: impl Fn(QuantizedQuery<'a>) -> Option<QueryWords<'a>>,
) -> Option<([ActiveQuery<'a>; QUERY_BLOCK], usize)> {
    let mut all = queries
        .iter()
        .enumerate()
        .filter(|(_, query)| !query.visible.is_empty())
        .filter_map(|(row, query)| Some(ActiveQuery { row, query: query.query, words: words(query.quantized?)? }));
    let (mut active, mut count) = ([all.next()?; QUERY_BLOCK], 1);
    for one in all {
        active[count] = one;
        count += 1;
    }
    let last = active[count - 1];
    active[count..].fill(last);
    Some((active, count))
}

/// The `N` queries from `first` on.
#[inline(always)]
pub(super) fn part<'a, const N: usize>(active: &[ActiveQuery<'a>; QUERY_BLOCK], first: usize) -> [ActiveQuery<'a>; N] {
    let mut part = [active[first]; N];
    part.copy_from_slice(&active[first..first + N]);
    part
}

/// The dot products of queries and mean from channel `from` on, in the order of `scalar.rs`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the queries are at least as long as the
/// page's mean, and `from` is a multiple of 16.
#[inline(always)]
pub(super) unsafe fn mean_scores<L: LevelLanes, const N: usize>(
    l: L,
    page: &Page<'_>,
    active: [ActiveQuery<'_>; N],
    from: usize,
) -> [f64; N] {
    let mut partials = [[0.0f32; LANES]; N];
    for first in (0..LANES).step_by(L::LANES) {
        // SAFETY: the caller entered the features; a mean is as long as a query, whole sixteens.
        unsafe {
            let mut sums = [l.splat(0.0); N];
            for i in (from + first..page.mean.len()).step_by(LANES) {
                let mean = l.load_f16(page.mean.as_ptr().add(i));
                for n in 0..N {
                    sums[n] = l.fma(l.load(active[n].query.as_ptr().add(i)), mean, sums[n]);
                }
            }
            for n in 0..N {
                l.store(partials[n].as_mut_ptr().add(first), sums[n]);
            }
        }
    }
    let mut means = [0.0; N];
    for (mean, partials) in means.iter_mut().zip(partials) {
        for partial in partials {
            *mean += f64::from(partial);
        }
    }
    means
}

/// The weights and outputs of the queries that see any token.
pub(super) struct ActiveOutputs<'w> {
    /// A page's weights per query.
    pub weights: [&'w [f32; PAGE_TOKENS]; QUERY_BLOCK],
    pub outputs: [*mut f32; QUERY_BLOCK],
    pub count: usize,
}

impl<'w> ActiveOutputs<'w> {
    /// Collects them, and adds the page's mean, if it has one, times the sum of weights to each output.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the queries' outputs are as long as the page's rows.
    #[inline(always)]
    pub unsafe fn begin<L: LevelLanes>(l: L, page: &Page<'_>, queries: &mut [Query<'_>], weights: &'w [f32]) -> Self {
        let mut all = Self {
            weights: [&[0.0; PAGE_TOKENS]; QUERY_BLOCK],
            outputs: [std::ptr::null_mut(); QUERY_BLOCK],
            count: 0,
        };
        let weighed = queries.iter_mut().zip(weights.as_chunks().0).filter(|(query, _)| !query.visible.is_empty());
        for (query, row) in weighed {
            let output = query.output.as_mut_ptr();
            (all.weights[all.count], all.outputs[all.count]) = (row, output);
            all.count += 1;
            let times = if page.mean.is_empty() { 0.0 } else { total(row) };
            for i in (0..page.mean.len()).step_by(L::LANES) {
                // SAFETY: the caller entered the features; a mean is as long as an output, whole sixteens.
                unsafe {
                    let at = output.add(i);
                    l.store(at, l.fma(l.splat(times), l.load_f16(page.mean.as_ptr().add(i)), l.load(at)));
                }
            }
        }
        all
    }
}

/// One `f32` per token.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct TokenFloats(pub [f32; PAGE_TOKENS]);
