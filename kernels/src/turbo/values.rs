//! Sums of values in vectors: lanes are channels, and what is broadcast are four tokens' weights in integers.

use std::ops::Range;

use super::PAGE_TOKENS;
use super::lanes::{CodeLanes, CodeOp};
use super::layout::LANES;
#[cfg(target_arch = "x86_64")]
use super::matrix;
use super::page::Page;
use super::reference::{WEIGHT_MAX, WEIGHT_MIN, total};
use super::tile::{CHUNK, Floats, Levels, dispatch, for_chunk, in_parts};
use crate::Isa;
use crate::attend::{Query, SHARE};

/// Adds `weights[n * 128 + t]` of the values of `range` to the output of every query that sees any; outside it they are zero.
pub(crate) fn add_values(isa: Isa, page: &Page<'_>, queries: &mut [Query<'_>], range: Range<usize>, weights: &[f32]) {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Amx(isa) = isa
        && matrix::suits(page, queries.len())
    {
        return matrix::add_values(isa, page, queries, weights);
    }
    dispatch!(isa, page, AddValues { page, queries, range, weights },
        else super::reference::add_values(page, queries, range, weights));
}

struct AddValues<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    queries: &'a mut [Query<'q>],
    range: Range<usize>,
    weights: &'a [f32],
}

/// A query's weights of a page in integers, two words per four tokens.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Weights([i32; PAGE_TOKENS / 2]);

impl<const UPPER: usize, const LOWER: usize> CodeOp for AddValues<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: CodeLanes>(self, l: L) {
        let Self { page, queries, range, weights } = self;
        // SAFETY: `run_codes` entered the features; `attend_tile` checked every length.
        let Summands { seen, outputs, count } = unsafe { Summands::begin(l, page, queries, weights) };
        let chunks = range.start / LANES..range.end.div_ceil(LANES);
        // SAFETY: `run_codes` entered the features; `attend_tile` checked every length and range.
        unsafe {
            let levels = Levels::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            in_parts!(L, count, |first, N| {
                let mut part = [0; N];
                for (n, part) in part.iter_mut().enumerate() {
                    *part = (first + n).min(count - 1);
                }
                add_part(&levels, page, &seen, &outputs, part, (count - first).min(N), chunks.clone());
            });
        }
    }
}

/// What queries that see any token weigh a page's tokens by, and where their sums go.
pub(super) struct Summands<'w> {
    pub seen: [&'w [f32; PAGE_TOKENS]; SHARE],
    pub outputs: [*mut f32; SHARE],
    pub count: usize,
}

impl<'w> Summands<'w> {
    /// Adds the mean, if the page has one, as often as the weights say.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the queries' outputs are as long as the page's rows.
    #[inline(always)]
    pub unsafe fn begin<L: CodeLanes>(l: L, page: &Page<'_>, queries: &mut [Query<'_>], weights: &'w [f32]) -> Self {
        let mut all = Self { seen: [&[0.0; PAGE_TOKENS]; SHARE], outputs: [std::ptr::null_mut(); SHARE], count: 0 };
        let weighed = queries.iter_mut().zip(weights.as_chunks().0).filter(|(query, _)| !query.visible.is_empty());
        for (query, seen) in weighed {
            (all.seen[all.count], all.outputs[all.count]) = (seen, query.output.as_mut_ptr());
            all.count += 1;
            let times = if page.mean.is_empty() { 0.0 } else { total(seen) };
            for i in (0..page.mean.len()).step_by(L::LANES) {
                // SAFETY: the caller entered the features; a mean is as long as an output, whole sixteens.
                unsafe {
                    let at = query.output.as_mut_ptr().add(i);
                    l.store(at, l.fma(l.splat(times), l.load_f16(page.mean.as_ptr().add(i)), l.load(at)));
                }
            }
        }
        all
    }
}

/// Adds the values of 16 tokens per chunk to the outputs of the queries `part`, of which the first `count` are kept.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the page is laid out as values, its planes have these bits and sixteens
/// of its tokens are `chunks`; `part` are indices of outputs, which are as long as its rows.
#[inline(always)]
unsafe fn add_part<L: CodeLanes, const UPPER: usize, const LOWER: usize, const N: usize>(
    levels: &Levels<L, UPPER, LOWER>,
    page: &Page<'_>,
    seen: &[&[f32; PAGE_TOKENS]; SHARE],
    outputs: &[*mut f32; SHARE],
    part: [usize; N],
    count: usize,
    chunks: Range<usize>,
) {
    let l = levels.lanes;
    let mut weights = [Weights([0; PAGE_TOKENS / 2]); N];
    let mut worth = [(0, 0.0); N];
    for group in page.layout.scale_groups() {
        let scales = &page.scales[group.index * PAGE_TOKENS..][..PAGE_TOKENS];
        for n in 0..N {
            // SAFETY: as the caller's.
            worth[n] = unsafe { integer_weights(l, page, seen[part[n]], scales, &mut weights[n]) };
        }
        let (run, strip_bytes) = page.layout.runs(group);
        for strip in 0..group.len / LANES {
            for half in 0..LANES / L::LANES {
                let channel = group.first + strip * LANES + half * L::LANES;
                // SAFETY: the caller entered the features; the page has these runs, the outputs these channels.
                unsafe {
                    let upper = page.codes.as_ptr().add(run.upper + strip * strip_bytes.0 + half * 4 * L::LANES);
                    let lower =
                        page.codes.as_ptr().wrapping_add(run.lower + strip * strip_bytes.1 + half * 4 * L::LANES);
                    let mut sums = [[l.splat_word(0); 2]; N];
                    for chunk in chunks.clone() {
                        let chunk_levels = levels.chunk(upper, lower, chunk);
                        for_chunk!(|V| {
                            let value = l.value(chunk_levels[V]);
                            for n in 0..N {
                                let weights = weights[n].0.as_ptr().add(2 * chunk * CHUNK);
                                sums[n] = l.dot_value(sums[n], value, weights, V);
                            }
                        });
                    }
                    for n in 0..N {
                        if n < count {
                            let (offset, unit) = worth[n];
                            let output = outputs[part[n]].add(channel);
                            let sum = l.to_float(l.join(sums[n], offset));
                            l.store(output, l.fma(sum, l.splat(unit), l.load(output)));
                        }
                    }
                }
            }
        }
    }
}

/// Weights times scales in integers; the offset of their sums, and what one of them is worth at one level.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `scales` has the page's tokens.
#[inline(always)]
unsafe fn integer_weights<L: CodeLanes>(
    l: L,
    page: &Page<'_>,
    seen: &[f32; PAGE_TOKENS],
    scales: &[half::f16],
    weights: &mut Weights,
) -> (i32, f32) {
    let vectors = PAGE_TOKENS / L::LANES;
    // SAFETY: the caller entered the features; all arrays are of the page's tokens, and no vector has fewer than 4 lanes.
    unsafe {
        let mut products = [l.splat(0.0); PAGE_TOKENS / 4];
        let mut stored = Floats([0.0; PAGE_TOKENS]);
        for (v, product) in products.iter_mut().enumerate().take(vectors) {
            let at = v * L::LANES;
            *product = l.mul(l.load(seen.as_ptr().add(at)), l.load_f16(scales.as_ptr().add(at)));
            l.store(stored.0.as_mut_ptr().add(at), *product);
        }
        let largest = f32::from_bits(l.largest_magnitude(&stored.0));
        let none = largest < WEIGHT_MIN;
        let inverse = l.splat(if none { 0.0 } else { WEIGHT_MAX / largest });
        let mut total = l.splat_word(0);
        for (v, product) in products.iter().enumerate().take(vectors) {
            let to = weights.0.as_mut_ptr().add(v * L::LANES / 2);
            total = l.add_words(total, l.store_weights(to, l.mul(*product, inverse)));
        }
        let offset = if L::BIAS == 0 { 0 } else { l.sum_words(total).wrapping_mul(-i32::from(L::BIAS)) };
        (offset, if none { 0.0 } else { largest * (page.layout.format().unit() / WEIGHT_MAX) })
    }
}
