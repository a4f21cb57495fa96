//! Scores of keys stored in a page of values (`KEqV`): vectors are transposed in registers.
//!
//! A chunk of a run of values is 16 channels of 16 tokens. Transposed, it is four vectors of four channels of
//! 16 tokens, the layout of keys, and the arithmetic is that of `scores.rs`. A transpose takes three
//! instructions per vector, shared by the queries.

use std::ops::Range;

use super::layout::LANES;
use super::operands::{ActiveQuery, active_queries, mean_scores, part};
use super::page::Page;
use super::scalar;
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, Unpacker, for_chunk, for_query_parts, with_planes};
use crate::attention::query::Query;
use crate::isa::Isa;
use crate::simd::levels::{LevelLanes, LevelOp};

/// Adds to `scores[n * 128 + t]` of the tokens `t` of `range` the dot products over the channels from `from` on, where
/// a scale group begins, for every query `n` that sees any.
pub(in crate::attention) fn add_key_scores(
    isa: Isa,
    page: &Page<'_>,
    from: usize,
    queries: &[Query<'_>],
    range: Range<usize>,
    scores: &mut [f64],
) {
    let Some(isa) = isa.vectors() else { return scalar::add_key_scores(page, from, queries, range, scores) };
    with_planes!(page, |UPPER, LOWER| {
        isa.run_levels(AddKeyScores::<UPPER, LOWER> { page, from, queries, range, scores })
    });
}

struct AddKeyScores<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    from: usize,
    queries: &'a [Query<'q>],
    range: Range<usize>,
    scores: &'a mut [f64],
}

impl<const UPPER: usize, const LOWER: usize> LevelOp for AddKeyScores<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: LevelLanes>(self, l: L) {
        let Self { page, from, queries, range, scores } = self;
        let Some((active, count)) = active_queries(queries, |quantized| quantized.values) else { return };
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length and range.
        unsafe {
            let unpacker = Unpacker::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            for_query_parts!(L, count, |first, N| score_part::<L, UPPER, LOWER, N>(
                &unpacker,
                page,
                from,
                (part(&active, first), (count - first).min(N)),
                range.clone(),
                scores
            ));
        }
    }
}

/// Adds to the scores of `N` queries, of which the first `count` are stored, in the strips that
/// hold the tokens of `range`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the page is laid out as values, its planes have these bits, a
/// group begins at `from`, the queries are quantized for it, and `range` lies in it.
#[inline(always)]
unsafe fn score_part<L: LevelLanes, const UPPER: usize, const LOWER: usize, const N: usize>(
    unpacker: &Unpacker<L, UPPER, LOWER>,
    page: &Page<'_>,
    from: usize,
    (active, count): ([ActiveQuery<'_>; N], usize),
    range: Range<usize>,
    scores: &mut [f64],
) {
    let l = unpacker.lanes;
    // SAFETY: the caller entered the features; the queries are quantized for the page, and a group begins at `from`.
    let means = unsafe { mean_scores(l, page, active, from) };
    let halves = LANES / L::LANES;
    for chunk in range.start / LANES..range.end.div_ceil(LANES) {
        // SAFETY: the caller entered the features; the page has these runs and scales, the queries these words.
        unsafe {
            // Of the lower tokens and, if a strip is two vectors, the upper ones.
            let mut sums = [[l.splat(0.0); N]; 2];
            for group in page.layout.scale_groups().filter(|group| group.first >= from) {
                let mut dots = [[l.splat_word(0); N]; 2];
                let mut words = [std::ptr::null(); N];
                for n in 0..N {
                    words[n] = active[n].words.quads().as_ptr();
                    if L::BIAS != 0 {
                        let offset = l.splat_word(active[n].words.offset(group));
                        (dots[0][n], dots[1][n]) = (offset, offset);
                    }
                }
                let (run, strip_bytes) = page.layout.runs(group);
                for strip in 0..group.len / LANES {
                    let mut vectors = [[l.splat_word(0); CHUNK]; 2];
                    for (half, vectors) in vectors.iter_mut().enumerate().take(halves) {
                        let (upper, lower) = (run.upper + strip * strip_bytes.0, run.lower + strip * strip_bytes.1);
                        let upper = page.codes.as_ptr().add(upper + half * 4 * L::LANES);
                        let lower = page.codes.as_ptr().wrapping_add(lower + half * 4 * L::LANES);
                        *vectors = unpacker.chunk(upper, lower, chunk);
                    }
                    let transposed = l.transpose(vectors);
                    for_chunk!(|V| {
                        for (half, tokens) in transposed[V].into_iter().enumerate().take(halves) {
                            let key = l.key(tokens);
                            for n in 0..N {
                                let words = words[n].add((group.first + strip * LANES) / 4);
                                dots[half][n] = l.dot_key(dots[half][n], key, words, V);
                            }
                        }
                    });
                }
                for (half, (sums, dots)) in sums.iter_mut().zip(dots).enumerate().take(halves) {
                    let token = chunk * LANES + half * L::LANES;
                    let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + token));
                    for n in 0..N {
                        let scale = l.mul(scale, l.splat(active[n].words.scale(group)));
                        sums[n] = l.fma(l.to_float(dots[n]), scale, sums[n]);
                    }
                }
            }
            for (half, sums) in sums.into_iter().enumerate().take(halves) {
                let token = chunk * LANES + half * L::LANES;
                add_to_scores(l, (&active, count), sums, means, token, scores);
            }
        }
    }
}

/// Adds the sums of the tokens from `token` on, a vector, and the queries' products with the mean to the scores of the
/// first `count` queries.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
unsafe fn add_to_scores<L: LevelLanes, const N: usize>(
    l: L,
    (active, count): (&[ActiveQuery<'_>; N], usize),
    sums: [L::V; N],
    means: [f64; N],
    token: usize,
    scores: &mut [f64],
) {
    for n in 0..count {
        let mut lanes = [0.0f32; LANES];
        // SAFETY: the caller entered the features; `lanes` has space for a vector.
        unsafe { l.store(lanes.as_mut_ptr(), sums[n]) };
        let at = active[n].row * PAGE_TOKENS + token;
        for (score, sum) in scores[at..at + L::LANES].iter_mut().zip(lanes) {
            *score += f64::from(sum) + means[n];
        }
    }
}
