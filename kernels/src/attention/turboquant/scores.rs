//! Scores of quantized keys, in vectors: all queries share every unpacked vector of levels.
//!
//! Lanes are tokens, so nothing is reduced across lanes. Integer sums are exact, and the float operations per output
//! are those of `scalar.rs` in their order: neither the number of queries nor the instruction set changes a bit.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::dots::{KeyQuery, Sums, add_dots};
use super::layout::LANES;
use super::operands::{ActiveQuery, TokenFloats, active_queries, mean_scores, part};
use super::page::Page;
use super::runs::{Keys, PackedRun, UnpackedRun};
use super::scalar;
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, Unpacker, for_query_parts, with_planes};
use crate::attention::query::{QUERY_BLOCK, Query};
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
        let strips = range.start / LANES..range.end.div_ceil(LANES);
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length and range.
        unsafe {
            let unpacker = Unpacker::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            let mut keys = UnpackedRun::<L, Keys>::UNINIT;
            let (mut operands, mut sums) = ([KeyQuery::NONE; QUERY_BLOCK], Sums::UNINIT);
            sums.clear(count);
            // Outer loop over groups: a group's words of all queries stay in the L1 cache for all strips.
            for group in page.layout.scale_groups() {
                let (runs, chunks) = (page.layout.runs(group), group.len / 4 / CHUNK);
                KeyQuery::set(&mut operands, &active, count, group);
                for strip in strips.clone() {
                    for half in 0..LANES / L::LANES {
                        let token = strip * LANES + half * L::LANES;
                        let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + token));
                        let run = PackedRun::new(&unpacker, page, runs, (strip, half));
                        if count <= L::QUERIES || UPPER == 8 {
                            for_query_parts!(L, count, |first, N| {
                                add_dots::<L, N>(l, (&run, chunks), &operands[first..], scale, sums.at(first, token));
                            });
                        } else {
                            keys.unpack(&run, 0..chunks);
                            for_query_parts!(L, count, |first, N| {
                                add_dots::<L, N>(l, (&keys, chunks), &operands[first..], scale, sums.at(first, token));
                            });
                        }
                    }
                }
            }
            for_query_parts!(L, count, |first, N| {
                let active = part::<N>(&active, first);
                let means = mean_scores(l, page, active, 0);
                write_scores(active, sums.rows(first), means, strips.start * LANES..strips.end * LANES, scores);
            });
        }
    }
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
