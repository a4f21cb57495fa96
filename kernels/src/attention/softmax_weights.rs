//! One online-softmax step: scores to weights.

use std::ops::Range;

use crate::attention::online_softmax::{MIN_EXPONENT, OnlineSoftmax, rescale_factor, scale_by};
use crate::attention::query::{QUERY_BLOCK, Query};
use crate::isa::Isa;
use crate::simd::float::{Lanes, Op};

/// Replaces every query's visible scores by weights relative to its new maximum, and rescales its sum and output; `len`
/// scores and weights per query. Weights of `range` that a query does not see become zero.
pub(super) fn softmax_weights(
    isa: Isa,
    len: usize,
    queries: &mut [Query<'_>],
    range: Range<usize>,
    scores: &[f64],
    weights: &mut [f32],
) {
    isa.run(Softmax { len, queries, range, scores, weights });
}

/// Each pass runs over all queries before the next one starts, which hides the latency of a query's maximum and sum.
struct Softmax<'a, 'q> {
    len: usize,
    queries: &'a mut [Query<'q>],
    range: Range<usize>,
    scores: &'a [f64],
    weights: &'a mut [f32],
}

impl Op for Softmax<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn eval<L: Lanes>(self, l: L) {
        let Self { len, queries, range, scores, weights } = self;
        let mut maxima = [f64::NEG_INFINITY; QUERY_BLOCK];
        for ((max, query), scores) in maxima.iter_mut().zip(&*queries).zip(scores.chunks(len)) {
            if !query.visible.is_empty() {
                *max = largest(query.softmax.max, &scores[query.visible.clone()]);
            }
        }
        for (((max, query), scores), weights) in
            maxima.iter().zip(&*queries).zip(scores.chunks(len)).zip(weights.chunks_mut(len))
        {
            // SAFETY: `run` entered the features.
            unsafe { store_weights(l, *max, scores, query.visible.clone(), range.clone(), weights) };
        }
        let mut sums = [0.0; QUERY_BLOCK];
        for ((sum, query), weights) in sums.iter_mut().zip(&*queries).zip(weights.chunks(len)) {
            if !query.visible.is_empty() {
                *sum = total(&weights[rounded_out(&query.visible, len)]);
            }
        }
        for ((query, max), sum) in queries.iter_mut().zip(maxima).zip(sums) {
            if query.visible.is_empty() {
                continue;
            }
            if query.softmax.sum > 0.0 && max > query.softmax.max {
                let scale = rescale_factor(query.softmax.max - max);
                query.softmax.sum *= f64::from(scale);
                // SAFETY: `run` entered the features.
                unsafe { scale_by(l, query.output, scale) };
            }
            *query.softmax = OnlineSoftmax { max, sum: query.softmax.sum + sum };
        }
    }
}

/// Partial maxima and partial sums of a row. A key's partial is its index in the block modulo this, so that neither the
/// range of visible keys nor the number of lanes changes the order of summation.
const PARTIALS: usize = 16;

/// The visible range, rounded outwards to multiples of [`PARTIALS`].
#[inline(always)]
fn rounded_out(visible: &Range<usize>, len: usize) -> Range<usize> {
    visible.start - visible.start % PARTIALS..visible.end.next_multiple_of(PARTIALS).min(len)
}

/// The largest of `scores` and `start`. NaN scores are skipped.
#[inline(always)]
fn largest(start: f64, scores: &[f64]) -> f64 {
    let mut partials = [start; PARTIALS];
    let mut blocks = scores.chunks_exact(PARTIALS);
    for scores in blocks.by_ref() {
        for (partial, score) in partials.iter_mut().zip(scores) {
            *partial = larger(*partial, *score);
        }
    }
    for (partial, score) in partials.iter_mut().zip(blocks.remainder()) {
        *partial = larger(*partial, *score);
    }
    reduce(partials, larger)
}

/// One `maxpd`; `f64::max` takes several instructions.
#[inline(always)]
fn larger(a: f64, b: f64) -> f64 {
    if b > a { b } else { a }
}

/// The weights of the `visible` scores; zero for the others of `range` and of the visible range rounded outwards.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
unsafe fn store_weights<L: Lanes>(
    l: L,
    max: f64,
    scores: &[f64],
    visible: Range<usize>,
    range: Range<usize>,
    weights: &mut [f32],
) {
    if visible.is_empty() {
        weights[range].fill(0.0);
        return;
    }
    let rounded = rounded_out(&visible, weights.len());
    weights[rounded.start.min(range.start)..visible.start].fill(0.0);
    weights[visible.end..rounded.end.max(range.end)].fill(0.0);
    for (weight, score) in weights[visible.clone()].iter_mut().zip(&scores[visible.clone()]) {
        let difference = score - max;
        *weight = if difference < MIN_EXPONENT { f32::NEG_INFINITY } else { difference as f32 };
    }
    for weights in weights[visible].chunks_mut(L::LANES) {
        // SAFETY: the caller entered the features; a chunk is `LANES` long or the shorter tail.
        unsafe {
            let e = l.exp(l.load_first(weights.as_ptr(), weights.len()));
            l.store_first(weights.as_mut_ptr(), e, weights.len());
        }
    }
}

/// The sum of weights, whose first index is a multiple of [`PARTIALS`].
#[inline(always)]
fn total(weights: &[f32]) -> f64 {
    let mut partials = [0.0f64; PARTIALS];
    let mut blocks = weights.chunks_exact(PARTIALS);
    for weights in blocks.by_ref() {
        for (partial, weight) in partials.iter_mut().zip(weights) {
            *partial += f64::from(*weight);
        }
    }
    for (partial, weight) in partials.iter_mut().zip(blocks.remainder()) {
        *partial += f64::from(*weight);
    }
    reduce(partials, |a, b| a + b)
}

/// Reduces by halves: a chain of four dependent operations, not of sixteen.
#[inline(always)]
fn reduce(mut partials: [f64; PARTIALS], fold: impl Fn(f64, f64) -> f64) -> f64 {
    let mut half = PARTIALS / 2;
    while half > 0 {
        for i in 0..half {
            partials[i] = fold(partials[i], partials[i + half]);
        }
        half /= 2;
    }
    partials[0]
}
