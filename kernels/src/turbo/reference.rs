//! The scalar attention over pages: specification, fallback and oracle. The vector kernels give these bits exactly.

use super::PAGE_TOKENS;
use super::layout::LANES;
use super::page::Page;
use super::quantizer::GROUP;
use crate::attend::Query;
use std::ops::Range;

/// The largest integer that stands for a weight: the largest that is `256 * a + b` with signed bytes.
pub(super) const WEIGHT_MAX: f32 = 32639.0;
/// Weights are relative to the page's largest; below this, all of them vanish beside those of the rest, while the inverse
/// could be infinite.
pub(super) const WEIGHT_MIN: f32 = 1e-30;

/// The query's dot product with the page's mean: 16 strands of channels, added up in `f64`.
pub(super) fn mean_score(query: &[f32], page: &Page<'_>) -> f64 {
    let mut strands = [0.0f32; LANES];
    for (query, mean) in query.as_chunks::<LANES>().0.iter().zip(page.mean.as_chunks::<LANES>().0) {
        for ((strand, query), mean) in strands.iter_mut().zip(query).zip(mean) {
            *strand = query.mul_add(mean.to_f32(), *strand);
        }
    }
    strands.into_iter().map(f64::from).sum()
}

pub(super) fn key_scores(page: &Page<'_>, queries: &[Query<'_>], range: Range<usize>, scores: &mut [f64]) {
    let layout = page.layout;
    for token in range {
        let mut sums = [0.0f32; crate::attend::SHARE];
        for group in layout.scale_groups() {
            let mut levels = [0; GROUP];
            for (level, channel) in levels.iter_mut().zip(group.channels()) {
                *level = i32::from(page.level(token, channel, group));
            }
            for (sum, query) in sums.iter_mut().zip(queries) {
                let Some(query) = query.prepared else { continue };
                let words = &query.quads()[group.first / 4..][..group.len / 4];
                let mut dot = 0;
                for (word, levels) in words.iter().zip(levels.as_chunks::<4>().0) {
                    for (byte, level) in word.to_le_bytes().into_iter().zip(levels) {
                        dot += i32::from(byte as i8) * level;
                    }
                }
                *sum = (dot as f32).mul_add(page.scale(token, group) * query.scale(group), *sum);
            }
        }
        for (n, (sum, query)) in sums.into_iter().zip(queries).enumerate() {
            scores[n * PAGE_TOKENS + token] = f64::from(sum) + mean_score(query.query, page);
        }
    }
}

pub(super) fn add_values(page: &Page<'_>, queries: &mut [Query<'_>], range: Range<usize>, weights: &[f32]) {
    let layout = page.layout;
    for (query, weights) in queries.iter_mut().zip(weights.chunks_exact(PAGE_TOKENS)) {
        if query.visible.is_empty() {
            continue;
        }
        if !page.mean.is_empty() {
            let total = range.clone().fold(0.0, |sum, token| sum + weights[token]);
            for (output, mean) in query.output.iter_mut().zip(page.mean) {
                *output = total.mul_add(mean.to_f32(), *output);
            }
        }
        for group in layout.scale_groups() {
            let mut scaled = [0.0f32; PAGE_TOKENS];
            for token in range.clone() {
                scaled[token] = weights[token] * page.scale(token, group);
            }
            // Magnitudes order as integers do; a NaN is the largest, so that it reaches the output.
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
