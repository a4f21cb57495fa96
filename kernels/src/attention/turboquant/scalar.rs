//! The scalar attention over pages: specification, fallback and oracle. The vector kernels give these bits exactly.

use std::ops::Range;

use super::layout::LANES;
use super::page::Page;
use super::query::QueryWords;
use super::side::PAGE_TOKENS;
use crate::attention::query::Query;

/// The largest integer weight: the largest that is `256 * a + b` with signed bytes `a` and `b`.
pub(super) const WEIGHT_MAX: f32 = 32639.0;
/// Integer weights are relative to the page's largest weight. Below this, the page contributes nothing to an `f32`
/// result, and the inverse could be infinite.
pub(super) const WEIGHT_MIN: f32 = 1e-30;

/// The query's dot product with the page's mean, from channel `from` on: 16 partial sums, summed in `f64`.
fn mean_score(query: &[f32], page: &Page<'_>, from: usize) -> f64 {
    let mut partials = [0.0f32; LANES];
    if !page.mean.is_empty() {
        let (query, mean) = (query[from..].as_chunks::<LANES>().0, page.mean[from..].as_chunks::<LANES>().0);
        for (query, mean) in query.iter().zip(mean) {
            for ((partial, query), mean) in partials.iter_mut().zip(query).zip(mean) {
                *partial = query.mul_add(mean.to_f32(), *partial);
            }
        }
    }
    partials.into_iter().map(f64::from).sum()
}

/// A token's score over the channels of `page` from `from` on.
fn token_score(page: &Page<'_>, token: usize, query: &[f32], words: QueryWords<'_>, from: usize) -> f64 {
    let mut sum = 0.0f32;
    for group in page.layout.scale_groups().filter(|group| group.first >= from) {
        let mut dot = 0;
        let words_of_group = &words.quads()[group.first / 4..][..group.len / 4];
        for (word, first) in words_of_group.iter().zip(group.channels().step_by(4)) {
            for (byte, channel) in word.to_le_bytes().into_iter().zip(first..) {
                dot += i32::from(byte as i8) * i32::from(page.level(token, channel, group));
            }
        }
        sum = (dot as f32).mul_add(page.scale(token, group) * words.scale(group), sum);
    }
    f64::from(sum) + mean_score(query, page, from)
}

pub(super) fn key_scores(page: &Page<'_>, queries: &[Query<'_>], range: Range<usize>, scores: &mut [f64]) {
    for (query, scores) in queries.iter().zip(scores.chunks_exact_mut(PAGE_TOKENS)) {
        if let Some(quantized) = query.quantized {
            for token in range.clone() {
                scores[token] = token_score(page, token, query.query, quantized.rotary, 0);
            }
        }
    }
}

pub(super) fn add_key_scores(
    page: &Page<'_>,
    from: usize,
    queries: &[Query<'_>],
    range: Range<usize>,
    scores: &mut [f64],
) {
    for (query, scores) in queries.iter().zip(scores.chunks_exact_mut(PAGE_TOKENS)) {
        if let Some(words) = query.quantized.and_then(|quantized| quantized.values) {
            for token in range.clone() {
                scores[token] += token_score(page, token, query.query, words, from);
            }
        }
    }
}

/// The sum of a query's weights, in 16 partial sums by a token's index modulo 16.
#[inline(always)]
pub(super) fn total(weights: &[f32; PAGE_TOKENS]) -> f32 {
    let mut partials = [0.0; LANES];
    for weights in weights.as_chunks::<LANES>().0 {
        for (partial, weight) in partials.iter_mut().zip(weights) {
            *partial += weight;
        }
    }
    let mut total = 0.0;
    for partial in partials {
        total += partial;
    }
    total
}

pub(super) fn add_values(page: &Page<'_>, queries: &mut [Query<'_>], range: Range<usize>, weights: &[f32]) {
    let layout = page.layout;
    for (query, weights) in queries.iter_mut().zip(weights.chunks_exact(PAGE_TOKENS)) {
        if query.visible.is_empty() {
            continue;
        }
        let mut seen = [0.0; PAGE_TOKENS];
        seen[range.clone()].copy_from_slice(&weights[range.clone()]);
        for (output, mean) in query.output.iter_mut().zip(page.mean) {
            *output = total(&seen).mul_add(mean.to_f32(), *output);
        }
        for group in layout.scale_groups() {
            let mut scaled = [0.0f32; PAGE_TOKENS];
            for (token, scaled) in scaled.iter_mut().enumerate() {
                *scaled = seen[token] * page.scale(token, group);
            }
            // Compared as integers, magnitudes keep their order and a NaN is the largest: the output becomes NaN.
            let largest = f32::from_bits(scaled.iter().fold(0, |a, x| a.max(x.abs().to_bits())));
            let (inverse, unit) = match largest < WEIGHT_MIN {
                true => (0.0, 0.0),
                false => (WEIGHT_MAX / largest, largest * (layout.format().unit() / WEIGHT_MAX)),
            };
            let mut integers = [0; PAGE_TOKENS];
            for (integer, scaled) in integers.iter_mut().zip(scaled) {
                *integer = (scaled * inverse).round_ties_even() as i32;
            }
            for channel in group.channels() {
                let mut sum = 0;
                for token in range.clone() {
                    sum += integers[token] * i32::from(page.level(token, channel, group));
                }
                query.output[channel] = (sum as f32).mul_add(unit, query.output[channel]);
            }
        }
    }
}
