//! Scores of keys stored in a page of values (`KEqV`): vectors are transposed in registers.
//!
//! A chunk of a run of values is 16 channels of 16 tokens. Transposed, it is four vectors of four channels of
//! 16 tokens, the layout of keys, and the arithmetic is that of `scores.rs`. A transpose takes three
//! instructions per vector, once for all queries.

use std::ops::Range;

use super::dots::{KeyQuery, Sums, add_dots};
use super::layout::{LANES, Run};
use super::operands::{ActiveQuery, active_queries};
use super::page::Page;
use super::runs::{Keys, PackedRun, UnpackedRun};
use super::scalar;
use super::scores::{EndScores, Scores};
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, Unpacker, for_query_parts, with_planes};
use crate::attention::query::{QUERY_BLOCK, Query};
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
    let Some((active, count)) = active_queries(queries, |quantized| quantized.values) else { return };
    let chunks = range.start / LANES..range.end.div_ceil(LANES);
    let tokens = chunks.start * LANES..chunks.end * LANES;
    let mut sums = Sums::UNINIT;
    with_planes!(page, |UPPER, LOWER| {
        let (active, chunks, sums) = (&active, chunks, &mut sums);
        isa.run_levels(AddTransposedDots::<UPPER, LOWER> { page, from, active, count, chunks, sums })
    });
    let (active, sums) = (&active, &sums);
    isa.run_levels(EndScores { page, from, active, count, sums, tokens, to: Scores::Partial(scores) });
}

/// Sets the queries' sums of the tokens of `chunks`, 16 each, over the channels from `from` on.
struct AddTransposedDots<'a, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    from: usize,
    active: &'a [ActiveQuery<'a>; QUERY_BLOCK],
    count: usize,
    chunks: Range<usize>,
    sums: &'a mut Sums,
}

impl<const UPPER: usize, const LOWER: usize> LevelOp for AddTransposedDots<'_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: LevelLanes>(self, l: L) {
        let Self { page, from, active, count, chunks, sums } = self;
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length and range.
        unsafe {
            let unpacker = Unpacker::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            let mut keys = [const { UnpackedRun::<L, Keys>::UNINIT }; 2];
            let mut operands = [KeyQuery::NONE; QUERY_BLOCK];
            sums.clear(count);
            for group in page.layout.scale_groups().filter(|group| group.first >= from) {
                let (runs, strips) = (page.layout.runs(group), group.len / LANES);
                KeyQuery::set(&mut operands, active, count, group);
                for chunk in chunks.clone() {
                    for strip in 0..strips {
                        transpose(&unpacker, page, runs, (strip, chunk), &mut keys);
                    }
                    for (half, keys) in keys.iter().enumerate().take(LANES / L::LANES) {
                        let token = chunk * LANES + half * L::LANES;
                        let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + token));
                        for_query_parts!(L, count, |first, N| {
                            add_dots::<L, N>(l, (keys, strips), &operands[first..], scale, sums.at(first, token));
                        });
                    }
                }
            }
        }
    }
}

/// Unpacks a strip's channels of a chunk's tokens as chunk `strip` of runs of keys: of the chunk's lower tokens and, if
/// a strip is two vectors, of its upper ones.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the page is laid out as values, its planes have these bits, and
/// it has this strip and chunk.
#[inline(always)]
unsafe fn transpose<L: LevelLanes, const UPPER: usize, const LOWER: usize>(
    unpacker: &Unpacker<L, UPPER, LOWER>,
    page: &Page<'_>,
    runs: (Run, (usize, usize)),
    (strip, chunk): (usize, usize),
    keys: &mut [UnpackedRun<L, Keys>; 2],
) {
    let l = unpacker.lanes;
    // SAFETY: as this function's.
    unsafe {
        let mut levels = [[l.splat_word(0); CHUNK]; 2];
        for (half, levels) in levels.iter_mut().enumerate().take(LANES / L::LANES) {
            *levels = PackedRun::new(unpacker, page, runs, (strip, half)).levels(chunk);
        }
        let transposed = l.transpose(levels);
        for (half, keys) in keys.iter_mut().enumerate().take(LANES / L::LANES) {
            let [a, b, c, d] = transposed;
            keys.set(strip, [l.key(a[half]), l.key(b[half]), l.key(c[half]), l.key(d[half])]);
        }
    }
}
