//! Attention over pages in vectors: up to eight queries meet every looked-up vector of levels.
//!
//! Lanes are tokens for scores and channels for values, so nothing is reduced across lanes. Integer sums are exact, and the
//! float operations per output are those of `reference.rs` in their order; that is why neither the number of queries nor
//! the instruction set changes a bit.

use super::lanes::{CodeLanes, CodeOp};
use super::layout::{LANES, LINE};
#[cfg(target_arch = "x86_64")]
use super::matrix;
use super::page::Page;
use super::query::Words;
use super::{PAGE_TOKENS, PreparedQuery};
use crate::Isa;
use crate::attend::{Query, SHARE};
use crate::lanes::prefetch;
use std::ops::Range;

/// Vectors that are unpacked together. Every run is a multiple of it: it is the shortest rotation group, and 16 tokens.
pub(super) const CHUNK: usize = 4;

/// Runs `$op` for the page's planes, or the reference where there are no code lanes.
macro_rules! dispatch {
    ($isa:ident, $page:ident, $op:ident { $($field:ident),* }, else $reference:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(isa) => dispatch!(@planes isa.run_codes, $page, $op { $($field),* }),
            Isa::Scalar => $reference,
        }
    };
    (@planes $isa:ident.$run:ident, $page:ident, $op:ident $fields:tt) => {
        match $page.layout.plane_bits() {
            (2, 0) => $isa.$run($op::<2, 0> $fields),
            (2, 1) => $isa.$run($op::<2, 1> $fields),
            (4, 0) => $isa.$run($op::<4, 0> $fields),
            (4, 1) => $isa.$run($op::<4, 1> $fields),
            (4, 2) => $isa.$run($op::<4, 2> $fields),
            _ => $isa.$run($op::<8, 0> $fields),
        }
    };
}

/// Calls `$run` with the constant `N` for parts of `$count` queries, `$first` being the part's first. Two and three run as
/// four, five to seven as eight, because every size takes the compiler seconds: what is computed for the last query again
/// is dropped.
macro_rules! in_parts {
    ($lanes:ident, $count:expr, |$first:ident, $N:ident| $run:expr) => {
        let mut $first = 0;
        while $first < $count {
            macro_rules! part {
                ($n:literal) => {{
                    const $N: usize = $n;
                    $run;
                    $first += $n;
                }};
            }
            match $count - $first {
                1 => part!(1),
                2..=4 => part!(4),
                _ if $lanes::QUERIES == 8 => part!(8),
                _ => part!(4),
            }
        }
    };
}

/// Evaluates `$run` with the constant `V` for each vector of a chunk. Not a loop: what is written in inline assembly looks
/// long to the compiler, which then would leave one, where lanes have to be known.
macro_rules! for_chunk {
    (|$V:ident| $run:expr) => {
        for_chunk!(@each $V, $run, 0 1 2 3)
    };
    (@each $V:ident, $run:expr, $($v:literal)*) => {
        $({
            const $V: usize = $v;
            $run
        })*
    };
}

pub(super) use {dispatch, for_chunk, in_parts};

/// `scores[n * 128 + t]` of the tokens of `range` for every query that sees any.
pub(crate) fn key_scores(isa: Isa, page: &Page<'_>, queries: &[Query<'_>], range: Range<usize>, scores: &mut [f64]) {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Amx(isa) = isa
        && matrix::suits(page, queries.len())
    {
        return matrix::key_scores(isa, page, queries, scores);
    }
    dispatch!(isa, page, KeyScores { page, queries, range, scores },
        else super::reference::key_scores(page, queries, range, scores));
}

/// The levels by index: upper bits of a code in the lower bits of an index, its lower bits above; bits that the planes
/// do not have tell nothing apart.
fn table(page: &Page<'_>, bias: u8) -> [u8; 64] {
    let (upper, lower) = page.layout.plane_bits();
    let mut table = [0; 64];
    if let Some(levels) = page.layout.format().levels() {
        for (i, level) in table.iter_mut().enumerate() {
            let code = (i & ((1 << upper) - 1)) << lower | i >> upper & ((1 << lower) - 1);
            *level = levels[code] as u8 ^ bias;
        }
    }
    table
}

/// How far ahead of the codes in use the next ones are asked for, in bytes of the upper plane. Left alone, a processor waits
/// for them: one row at 32768 positions of E2B took 143 ms instead of 135.
const PREFETCH: usize = 2048;

/// A run's levels, a chunk at a time.
pub(super) struct Levels<L: CodeLanes, const UPPER: usize, const LOWER: usize> {
    pub lanes: L,
    table: L::Table,
    bias: u8,
}

impl<L: CodeLanes, const UPPER: usize, const LOWER: usize> Levels<L, UPPER, LOWER> {
    /// Levels plus `bias`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    pub unsafe fn new(lanes: L, page: &Page<'_>, bias: u8) -> Self {
        // SAFETY: as the caller's.
        Self { lanes, table: unsafe { lanes.table(&table(page, bias)) }, bias }
    }

    /// The levels of vectors `4 * chunk..` of the run whose planes begin at `upper` and `lower`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the run that begins at `upper` and `lower` has the lines of this
    /// chunk.
    #[inline(always)]
    pub unsafe fn chunk(&self, upper: *const u8, lower: *const u8, chunk: usize) -> [L::I; CHUNK] {
        let l = self.lanes;
        // SAFETY: the caller entered the features; the run has these lines.
        unsafe {
            let mut levels = [l.splat_word(0); CHUNK];
            let upper = upper.add(chunk * CHUNK * UPPER / 8 * LINE);
            for line in 0..CHUNK * UPPER / 8 {
                prefetch(upper.wrapping_add(PREFETCH + line * LINE));
            }
            if LOWER > 0 && (chunk * LOWER).is_multiple_of(2) {
                prefetch(
                    lower.wrapping_add((PREFETCH * LOWER / UPPER).next_multiple_of(LINE) + chunk * LOWER / 2 * LINE),
                );
            }
            let (mask, low) = (
                l.splat_word((0x0101_0101u32 * ((1 << (UPPER % 8)) - 1)) as i32),
                match LOWER {
                    // Half a line: the other half belongs to the next chunk.
                    1 => l.shift_right(l.load_words(lower.add(chunk / 2 * LINE)), (chunk % 2 * 4) as i32),
                    2 => l.load_words(lower.add(chunk * LINE)),
                    _ => l.splat_word(0),
                },
            );
            for (v, levels) in levels.iter_mut().enumerate() {
                let at = v * UPPER;
                let index = l.load_words(upper.add(at / 8 * LINE));
                if UPPER == 8 {
                    *levels = l.xor(index, l.splat_word((0x0101_0101u32 * u32::from(self.bias)) as i32));
                    continue;
                }
                let index = l.shift_right(index, (at % 8) as i32);
                let index = match LOWER {
                    0 => index,
                    _ => l.select(mask, index, l.shift_right(low, (v * LOWER) as i32 - UPPER as i32)),
                };
                *levels = match UPPER + LOWER {
                    6 => l.lookup::<6>(self.table, index),
                    5 => l.lookup::<5>(self.table, index),
                    _ => l.lookup::<4>(self.table, index),
                };
            }
            levels
        }
    }
}

struct KeyScores<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    queries: &'a [Query<'q>],
    range: Range<usize>,
    scores: &'a mut [f64],
}

impl<const UPPER: usize, const LOWER: usize> CodeOp for KeyScores<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: CodeLanes>(self, l: L) {
        let Self { page, queries, range, scores } = self;
        let Some((asked, count)) = asked(queries, |prepared| Some(prepared.own)) else { return };
        // SAFETY: `run_codes` entered the features; `attend_tile` checked every length and range.
        unsafe {
            let levels = Levels::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            in_parts!(L, count, |first, N| score_part::<L, UPPER, LOWER, N>(
                &levels,
                page,
                part(&asked, first),
                range.clone(),
                scores
            ));
        }
    }
}

/// A query that sees tokens of the page.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    /// Where its scores are.
    pub row: usize,
    pub query: &'a [f32],
    pub words: Words<'a>,
}

/// The queries that see any token, and how many they are; the last one again in the places that are left.
#[inline(always)]
pub(super) fn asked<'a>(
    queries: &'a [Query<'_>],
    words: impl Fn(PreparedQuery<'a>) -> Option<Words<'a>>,
) -> Option<([Asked<'a>; SHARE], usize)> {
    let mut all = queries
        .iter()
        .enumerate()
        .filter(|(_, query)| !query.visible.is_empty())
        .filter_map(|(row, query)| Some(Asked { row, query: query.query, words: words(query.prepared?)? }));
    let (mut asked, mut count) = ([all.next()?; SHARE], 1);
    for one in all {
        asked[count] = one;
        count += 1;
    }
    let last = asked[count - 1];
    asked[count..].fill(last);
    Some((asked, count))
}

/// `N` of the queries.
#[inline(always)]
pub(super) fn part<'a, const N: usize>(asked: &[Asked<'a>; SHARE], first: usize) -> [Asked<'a>; N] {
    let mut part = [asked[first]; N];
    part.copy_from_slice(&asked[first..first + N]);
    part
}

/// Scores of the queries `asked` in the strips that hold the tokens of `range`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the page is of keys, its planes have these bits, the queries are
/// prepared for it, and `range` lies in it.
#[inline(always)]
unsafe fn score_part<L: CodeLanes, const UPPER: usize, const LOWER: usize, const N: usize>(
    levels: &Levels<L, UPPER, LOWER>,
    page: &Page<'_>,
    asked: [Asked<'_>; N],
    range: Range<usize>,
    scores: &mut [f64],
) {
    let l = levels.lanes;
    // SAFETY: as the caller's.
    let means = unsafe { mean_scores(l, page, asked, 0) };
    let strips = range.start / LANES..range.end.div_ceil(LANES);
    let mut sums = [Floats([0.0; PAGE_TOKENS]); N];
    // Groups outside: what the queries bring to a group is fetched once for all strips.
    for group in page.layout.scale_groups() {
        let (run, strip_bytes) = page.layout.runs(group);
        // SAFETY: the caller entered the features; the page has these runs and scales, the queries these words.
        unsafe {
            let mut words = [std::ptr::null(); N];
            let (mut offsets, mut scales) = ([l.splat_word(0); N], [l.splat(0.0); N]);
            for n in 0..N {
                words[n] = asked[n].words.quads().as_ptr().add(group.first / 4);
                scales[n] = l.splat(asked[n].words.scale(group));
                if L::BIAS != 0 {
                    offsets[n] = l.splat_word(asked[n].words.offset(group));
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
                    // As many sums side by side as hide an addition's latency.
                    let chains = if N == 1 { 4 } else { 2 };
                    for chunk in 0..group.len / 4 / CHUNK {
                        let chunk_levels = levels.chunk(upper, lower, chunk);
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
    let tokens = strips.start * LANES..strips.end * LANES;
    for n in 0..N {
        let scores = &mut scores[asked[n].row * PAGE_TOKENS..][..PAGE_TOKENS][tokens.clone()];
        for (score, sum) in scores.iter_mut().zip(&sums[n].0[tokens.clone()]) {
            *score = f64::from(*sum) + means[n];
        }
    }
}

/// The dot products of queries and mean from channel `from` on, as the reference's.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the queries are at least as long as the page's mean, and `from` is a
/// multiple of 16.
#[inline(always)]
pub(super) unsafe fn mean_scores<L: CodeLanes, const N: usize>(
    l: L,
    page: &Page<'_>,
    asked: [Asked<'_>; N],
    from: usize,
) -> [f64; N] {
    let mut strands = [[0.0f32; LANES]; N];
    for first in (0..LANES).step_by(L::LANES) {
        // SAFETY: the caller entered the features; a mean is as long as a query, whole sixteens.
        unsafe {
            let mut sums = [l.splat(0.0); N];
            for i in (from + first..page.mean.len()).step_by(LANES) {
                let mean = l.load_f16(page.mean.as_ptr().add(i));
                for n in 0..N {
                    sums[n] = l.fma(l.load(asked[n].query.as_ptr().add(i)), mean, sums[n]);
                }
            }
            for n in 0..N {
                l.store(strands[n].as_mut_ptr().add(first), sums[n]);
            }
        }
    }
    let mut means = [0.0; N];
    for (mean, strands) in means.iter_mut().zip(strands) {
        for strand in strands {
            *mean += f64::from(strand);
        }
    }
    means
}

/// A float per token.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Floats(pub [f32; PAGE_TOKENS]);
