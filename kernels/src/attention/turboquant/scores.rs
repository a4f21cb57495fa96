//! Scores of quantized keys, in vectors: up to eight queries share every unpacked vector of levels.
//!
//! Lanes are tokens, so nothing is reduced across lanes. Integer sums are exact, and the float operations per output
//! are those of `scalar.rs` in their order: neither the number of queries nor the instruction set changes a bit.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::layout::LANES;
use super::operands::{ActiveQuery, TokenFloats, active_queries, mean_scores, part};
use super::page::Page;
use super::scalar;
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, Unpacker, for_chunk, for_query_parts, with_planes};
use crate::attention::query::Query;
use crate::isa::Isa;
use crate::simd::levels::{LevelLanes, LevelOp};

/// `scores[n * 128 + t]` of the tokens `t` of `range`, for every query `n` that sees any of them.
pub(in crate::attention) fn key_scores(
    isa: Isa,
    page: &Page<'_>,
    queries: &[Query<'_>],
    range: Range<usize>,
    scores: &mut [f64],
) {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Amx(isa) = isa
        && amx::suits(page, queries.len())
    {
        return amx::key_scores(isa, page, queries, scores);
    }
    let Some(isa) = isa.vectors() else { return scalar::key_scores(page, queries, range, scores) };
    with_planes!(page, |UPPER, LOWER| isa.run_levels(KeyScores::<UPPER, LOWER> { page, queries, range, scores }));
}

struct KeyScores<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    queries: &'a [Query<'q>],
    range: Range<usize>,
    scores: &'a mut [f64],
}

impl<const UPPER: usize, const LOWER: usize> LevelOp for KeyScores<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: LevelLanes>(self, l: L) {
        let Self { page, queries, range, scores } = self;
        let Some((active, count)) = active_queries(queries, |quantized| Some(quantized.rotary)) else { return };
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length and range.
        unsafe {
            let unpacker = Unpacker::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            for_query_parts!(L, count, |first, N| score_part::<L, UPPER, LOWER, N>(
                &unpacker,
                page,
                part(&active, first),
                range.clone(),
                scores
            ));
        }
    }
}

/// Scores of `N` queries in the strips that hold the tokens of `range`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the page is of keys, its planes have these bits, the
/// queries are quantized for it, and `range` lies in it.
#[inline(always)]
unsafe fn score_part<L: LevelLanes, const UPPER: usize, const LOWER: usize, const N: usize>(
    unpacker: &Unpacker<L, UPPER, LOWER>,
    page: &Page<'_>,
    active: [ActiveQuery<'_>; N],
    range: Range<usize>,
    scores: &mut [f64],
) {
    let l = unpacker.lanes;
    // SAFETY: the caller entered the features; the queries are quantized for the page.
    let means = unsafe { mean_scores(l, page, active, 0) };
    let strips = range.start / LANES..range.end.div_ceil(LANES);
    let mut sums = [TokenFloats([0.0; PAGE_TOKENS]); N];
    // Outer loop over groups: a group's words, scales and offsets of the queries are loaded once for all strips.
    for group in page.layout.scale_groups() {
        let (run, strip_bytes) = page.layout.runs(group);
        // SAFETY: the caller entered the features; the page has these runs and scales, the queries these words.
        unsafe {
            let mut words = [std::ptr::null(); N];
            let (mut offsets, mut scales) = ([l.splat_word(0); N], [l.splat(0.0); N]);
            for n in 0..N {
                words[n] = active[n].words.quads().as_ptr().add(group.first / 4);
                scales[n] = l.splat(active[n].words.scale(group));
                if L::BIAS != 0 {
                    offsets[n] = l.splat_word(active[n].words.offset(group));
                }
            }
            for strip in strips.clone() {
                for half in 0..LANES / L::LANES {
                    let token = strip * LANES + half * L::LANES;
                    let upper = page.codes.as_ptr().add(run.upper + strip * strip_bytes.0 + half * 4 * L::LANES);
                    let lower =
                        page.codes.as_ptr().wrapping_add(run.lower + strip * strip_bytes.1 + half * 4 * L::LANES);
                    let mut dots = [[l.splat_word(0); CHUNK]; N];
                    for n in 0..N {
                        dots[n][0] = offsets[n];
                    }
                    // Enough independent sums to hide the latency of a dot product.
                    let chains = if N == 1 { 4 } else { 2 };
                    for chunk in 0..group.len / 4 / CHUNK {
                        let chunk_levels = unpacker.chunk(upper, lower, chunk);
                        for_chunk!(|V| {
                            let key = l.key(chunk_levels[V]);
                            for n in 0..N {
                                let words = words[n].add(chunk * CHUNK);
                                dots[n][V % chains] = l.dot_key(dots[n][V % chains], key, words, V);
                            }
                        });
                    }
                    let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + token));
                    for n in 0..N {
                        let mut dot = dots[n][0];
                        for other in &dots[n][1..chains] {
                            dot = l.add_words(dot, *other);
                        }
                        let sum = sums[n].0.as_mut_ptr().add(token);
                        l.store(sum, l.fma(l.to_float(dot), l.mul(scale, scales[n]), l.load(sum)));
                    }
                }
            }
        }
    }
    write_scores(active, &sums, means, strips.start * LANES..strips.end * LANES, scores);
}

/// Writes the sums of `tokens` plus the queries' products with the mean.
#[inline(always)]
fn write_scores<const N: usize>(
    active: [ActiveQuery<'_>; N],
    sums: &[TokenFloats; N],
    means: [f64; N],
    tokens: Range<usize>,
    scores: &mut [f64],
) {
    for n in 0..N {
        let scores = &mut scores[active[n].row * PAGE_TOKENS..][..PAGE_TOKENS][tokens.clone()];
        for (score, sum) in scores.iter_mut().zip(&sums[n].0[tokens.clone()]) {
            *score = f64::from(*sum) + means[n];
        }
    }
}
