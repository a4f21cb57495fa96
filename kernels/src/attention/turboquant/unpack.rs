//! Codes to levels, in vectors.

use super::layout::LINE;
use super::page::Page;
use crate::simd::levels::LevelLanes;
use crate::simd::prefetch::prefetch;

/// Vectors that are unpacked together. Every run is a multiple of it: it is the shortest rotation group, and 16 tokens.
pub(super) const CHUNK: usize = 4;

/// The levels by table index. An index has a code's upper bits in its lower bits, and the code's lower bits above them:
/// planes combine without a shift. The table repeats for higher bits of the index.
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

/// Prefetch distance in bytes of the upper plane. Without prefetching, one row at 32768 positions of E2B took 143 ms
/// instead of 135.
const PREFETCH_DISTANCE: usize = 2048;

/// Unpacks codes of `UPPER + LOWER` bits to levels plus `bias`, a chunk of a run at a time.
pub(super) struct Unpacker<L: LevelLanes, const UPPER: usize, const LOWER: usize> {
    pub lanes: L,
    table: L::Table,
    bias: u8,
}

impl<L: LevelLanes, const UPPER: usize, const LOWER: usize> Unpacker<L, UPPER, LOWER> {
    /// An unpacker for the page's format.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features.
    #[inline(always)]
    pub unsafe fn new(lanes: L, page: &Page<'_>, bias: u8) -> Self {
        // SAFETY: the caller entered the features.
        Self { lanes, table: unsafe { lanes.table(&table(page, bias)) }, bias }
    }

    /// The levels of vectors `4 * chunk..` of the run whose lines begin at `upper` and `lower`.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the run that begins at `upper` and
    /// `lower` has the lines of this chunk.
    #[inline(always)]
    pub unsafe fn chunk(&self, upper: *const u8, lower: *const u8, chunk: usize) -> [L::I; CHUNK] {
        let l = self.lanes;
        // SAFETY: the caller entered the features; the run has these lines.
        unsafe {
            let mut levels = [l.splat_word(0); CHUNK];
            let upper = upper.add(chunk * CHUNK * UPPER / 8 * LINE);
            for line in 0..CHUNK * UPPER / 8 {
                prefetch(upper.wrapping_add(PREFETCH_DISTANCE + line * LINE));
            }
            if LOWER > 0 && (chunk * LOWER).is_multiple_of(2) {
                prefetch(lower.wrapping_add(
                    (PREFETCH_DISTANCE * LOWER / UPPER).next_multiple_of(LINE) + chunk * LOWER / 2 * LINE,
                ));
            }
            let (mask, low) = (
                l.splat_word((0x0101_0101u32 * ((1 << (UPPER % 8)) - 1)) as i32),
                match LOWER {
                    // Half a line's bits: the other half is the next chunk's.
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

/// Evaluates `$run` with the constants `$UPPER` and `$LOWER`: the bits of the page's planes.
macro_rules! with_planes {
    ($page:expr, |$UPPER:ident, $LOWER:ident| $run:expr) => {
        with_planes!(@each $page, $UPPER, $LOWER, $run, (2, 0) (2, 1) (4, 0) (4, 1) (4, 2) (8, 0))
    };
    (@each $page:expr, $UPPER:ident, $LOWER:ident, $run:expr, $(($upper:literal, $lower:literal))*) => {
        match $page.layout.plane_bits() {
            $(($upper, $lower) => {
                const $UPPER: usize = $upper;
                const $LOWER: usize = $lower;
                $run
            })*
            (upper, lower) => unreachable!("planes of {upper} and {lower} bits"),
        }
    };
}

/// Evaluates `$run` with the constant `N` for parts of `$count` queries, `$first` being the part's first. Two and three
/// run as four, five to seven as eight, because every size takes the compiler seconds: the last query is repeated, and
/// the repetitions' results are not stored.
macro_rules! for_query_parts {
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
                5.. if const { $lanes::QUERIES == 8 } => part!(8),
                _ => part!(4),
            }
        }
    };
}

/// `count` queries and the repetitions that fill the last part of [`for_query_parts`], or more.
#[inline(always)]
pub(super) fn padded(count: usize) -> usize {
    match count {
        1 => 1,
        2..=4 => 4,
        _ => count.next_multiple_of(8),
    }
}

/// Evaluates `$run` with the constant `V` for each vector of a chunk. Not a loop: the compiler overestimates the length
/// of inline assembly and would not unroll it, but `sdot` needs constant lanes.
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

pub(super) use {for_chunk, for_query_parts, with_planes};
