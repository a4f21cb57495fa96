//! Scores of quantized keys, in vectors: all queries share every unpacked vector of levels.
//!
//! Lanes are tokens, so nothing is reduced across lanes. Integer sums are exact, and the float operations per output
//! are those of `scalar.rs` in their order: neither the number of queries nor the instruction set changes a bit.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::dots::{KeyQuery, Sums, add_dots};
use super::layout::LANES;
use super::operands::{ActiveQuery, active_queries, mean_scores, part};
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
    let Some((active, count)) = active_queries(queries, |quantized| Some(quantized.rotary)) else { return };
    let strips = range.start / LANES..range.end.div_ceil(LANES);
    let tokens = strips.start * LANES..strips.end * LANES;
    let mut sums = Sums::UNINIT;
    with_planes!(page, |UPPER, LOWER| {
        let (active, strips, sums) = (&active, strips, &mut sums);
        isa.run_levels(AddDots::<UPPER, LOWER> { page, active, count, strips, sums })
    });
    let (active, sums) = (&active, &sums);
    isa.run_levels(EndScores { page, from: 0, active, count, sums, tokens, to: Scores::New(scores) });
}

/// Sets the queries' sums of the tokens of `strips`.
struct AddDots<'a, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    active: &'a [ActiveQuery<'a>; QUERY_BLOCK],
    count: usize,
    strips: Range<usize>,
    sums: &'a mut Sums,
}

impl<const UPPER: usize, const LOWER: usize> LevelOp for AddDots<'_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: LevelLanes>(self, l: L) {
        let Self { page, active, count, strips, sums } = self;
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length and range.
        unsafe {
            let unpacker = Unpacker::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            let mut keys = UnpackedRun::<L, Keys>::UNINIT;
            let mut operands = [KeyQuery::NONE; QUERY_BLOCK];
            sums.clear(count);
            // Outer loop over groups: a group's words of all queries stay in the L1 cache for all strips.
            for group in page.layout.scale_groups() {
                let (runs, chunks) = (page.layout.runs(group), group.len / 4 / CHUNK);
                KeyQuery::set(&mut operands, active, count, group);
                for strip in strips.clone() {
                    for half in 0..LANES / L::LANES {
                        let token = strip * LANES + half * L::LANES;
                        let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + token));
                        let run = PackedRun::new(&unpacker, page, runs, (strip, half));
                        if const { UPPER == 8 } || count <= L::QUERIES {
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
        }
    }
}

/// Scores, a row of `PAGE_TOKENS` per query.
pub(super) enum Scores<'a> {
    /// To be written.
    New(&'a mut [f64]),
    /// To be added to.
    Partial(&'a mut [f64]),
}

/// Ends the scores of `tokens`: the queries' sums plus their products with the mean from channel `from` on. An
/// operation of its own, which is not compiled for every division into planes.
pub(super) struct EndScores<'a> {
    pub page: &'a Page<'a>,
    pub from: usize,
    pub active: &'a [ActiveQuery<'a>; QUERY_BLOCK],
    pub count: usize,
    /// Cleared for as many queries.
    pub sums: &'a Sums,
    pub tokens: Range<usize>,
    pub to: Scores<'a>,
}

impl LevelOp for EndScores<'_> {
    #[inline(always)]
    fn eval<L: LevelLanes>(mut self, l: L) {
        let Self { page, from, active, count, .. } = self;
        let mut means = [0.0; QUERY_BLOCK];
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length.
        unsafe {
            for_query_parts!(L, count, |first, N| {
                means[first..first + N].copy_from_slice(&mean_scores(l, page, part::<N>(active, first), from));
            });
        }
        for n in 0..count {
            // SAFETY: the sums of `count` queries were cleared.
            let sums = unsafe { &self.sums.row(n).0[self.tokens.clone()] };
            let (first, mean) = (active[n].row * PAGE_TOKENS, means[n]);
            match &mut self.to {
                Scores::New(scores) => {
                    let scores = &mut scores[first..][..PAGE_TOKENS][self.tokens.clone()];
                    for (score, sum) in scores.iter_mut().zip(sums) {
                        *score = f64::from(*sum) + mean;
                    }
                }
                Scores::Partial(scores) => {
                    let scores = &mut scores[first..][..PAGE_TOKENS][self.tokens.clone()];
                    for (score, sum) in scores.iter_mut().zip(sums) {
                        *score += f64::from(*sum) + mean;
                    }
                }
            }
        }
    }
}
