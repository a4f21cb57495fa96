//! Scores against pages that are laid out as values: their vectors are turned into those of keys on the way.
//!
//! A chunk of a run of values is 16 channels of 16 tokens. Turned, it is four vectors of four channels of 16 tokens, as
//! keys have them, and goes on as `tile.rs` does; turning costs three instructions per vector, shared by the queries.

use super::PAGE_TOKENS;
use super::lanes::{CodeLanes, CodeOp};
use super::layout::LANES;
use super::page::Page;
use super::tile::{Asked, CHUNK, Levels, asked, dispatch, for_chunk, in_parts, mean_scores, part};
use crate::Isa;
use crate::attend::Query;
use std::ops::Range;

/// Adds to `scores[n * 128 + t]` of the tokens of `range` what the channels from `from` on, where a group begins, add, for
/// every query that sees any.
pub(crate) fn add_key_scores(
    isa: Isa,
    page: &Page<'_>,
    from: usize,
    queries: &[Query<'_>],
    range: Range<usize>,
    scores: &mut [f64],
) {
    dispatch!(isa, page, AddKeyScores { page, from, queries, range, scores },
        else super::reference::add_key_scores(page, from, queries, range, scores));
}

struct AddKeyScores<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    from: usize,
    queries: &'a [Query<'q>],
    range: Range<usize>,
    scores: &'a mut [f64],
}

impl<const UPPER: usize, const LOWER: usize> CodeOp for AddKeyScores<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: CodeLanes>(self, l: L) {
        let Self { page, from, queries, range, scores } = self;
        let Some((asked, count)) = asked(queries, |prepared| prepared.values) else { return };
        // SAFETY: `run_codes` entered the features; `attend_tile` checked every length and range.
        unsafe {
            let levels = Levels::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            in_parts!(L, count, |first, N| score_part::<L, UPPER, LOWER, N>(
                &levels,
                page,
                from,
                (part(&asked, first), (count - first).min(N)),
                range.clone(),
                scores
            ));
        }
    }
}

/// Adds to the scores of the queries `asked`, of which the first `count` are kept, in the strips that hold the tokens of
/// `range`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the page is laid out as values, its planes have these bits, a group
/// begins at `from`, the queries are prepared for it, and `range` lies in it.
#[inline(always)]
unsafe fn score_part<L: CodeLanes, const UPPER: usize, const LOWER: usize, const N: usize>(
    levels: &Levels<L, UPPER, LOWER>,
    page: &Page<'_>,
    from: usize,
    (asked, count): ([Asked<'_>; N], usize),
    range: Range<usize>,
    scores: &mut [f64],
) {
    let l = levels.lanes;
    // SAFETY: as the caller's.
    let means = unsafe { mean_scores(l, page, asked, from) };
    let halves = LANES / L::LANES;
    for chunk in range.start / LANES..range.end.div_ceil(LANES) {
        // SAFETY: the caller entered the features; the page has these runs and scales, the queries these words.
        unsafe {
            // Of the lower and, where a strip is two vectors, the upper tokens.
            let mut sums = [[l.splat(0.0); N]; 2];
            for group in page.layout.scale_groups().filter(|group| group.first >= from) {
                let mut dots = [[l.splat_word(0); N]; 2];
                for n in 0..N {
                    if L::BIAS != 0 {
                        let offset = l.splat_word(asked[n].words.offset(group));
                        (dots[0][n], dots[1][n]) = (offset, offset);
                    }
                }
                let mut words = [std::ptr::null(); N];
                for n in 0..N {
                    words[n] = asked[n].words.quads().as_ptr();
                }
                let (run, strip_bytes) = page.layout.runs(group);
                for strip in 0..group.len / LANES {
                    let mut vectors = [[l.splat_word(0); CHUNK]; 2];
                    for (half, vectors) in vectors.iter_mut().enumerate().take(halves) {
                        let (upper, lower) = (run.upper + strip * strip_bytes.0, run.lower + strip * strip_bytes.1);
                        let upper = page.codes.as_ptr().add(upper + half * 4 * L::LANES);
                        let lower = page.codes.as_ptr().wrapping_add(lower + half * 4 * L::LANES);
                        *vectors = levels.chunk(upper, lower, chunk);
                    }
                    let turned = l.turn(vectors);
                    for_chunk!(|V| {
                        for (half, tokens) in turned[V].into_iter().enumerate().take(halves) {
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
                        let scale = l.mul(scale, l.splat(asked[n].words.scale(group)));
                        sums[n] = l.fma(l.to_float(dots[n]), scale, sums[n]);
                    }
                }
            }
            for (half, sums) in sums.into_iter().enumerate().take(halves) {
                for n in 0..count {
                    let mut lanes = [0.0f32; LANES];
                    l.store(lanes.as_mut_ptr(), sums[n]);
                    let at = asked[n].row * PAGE_TOKENS + chunk * LANES + half * L::LANES;
                    for (score, sum) in scores[at..at + L::LANES].iter_mut().zip(lanes) {
                        *score += f64::from(sum) + means[n];
                    }
                }
            }
        }
    }
}
