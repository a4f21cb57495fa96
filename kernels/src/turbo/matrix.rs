//! Attention over pages in products of byte matrices: a strip's levels are unpacked once, into the first-level cache, and
//! meet the queries, sixteen by sixteen, in tile registers.
//!
//! A run of 128 channels (keys) or tokens (values) is 32 vectors of 16 lanes by 4 of depth, two matrices as the product
//! wants them. So nothing is rearranged; integers, and the operations on floats, are those of `reference.rs`.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::PAGE_TOKENS;
use super::layout::{LANES, LINE, ScaleGroup};
use super::page::Page;
use super::reference::{WEIGHT_MAX, WEIGHT_MIN};
use super::tile::{CHUNK, Floats, Levels, asked, dispatch, mean_scores, part};
use super::values::Summands;
use crate::attend::{Query, SHARE};
use crate::isa::Amx;
use crate::lanes::{Avx512Lanes, Lanes};
use crate::tile_registers::{TileOp, TileRegisters, TileShape};

/// Depth of a strip: what two tiles hold.
const DEPTH: usize = 128;
/// Vectors of a strip.
const VECTORS: usize = DEPTH / 4;
/// Fewer queries are done sooner in vectors.
const FEWEST: usize = 5;

/// Whether pages of this layout and so many queries are worth it.
pub(super) fn suits(page: &Page<'_>, queries: usize) -> bool {
    queries >= FEWEST && page.layout.scale_groups().all(|group| group.len == DEPTH)
}

/// As [`super::key_scores`], of all tokens.
pub(super) fn key_scores(isa: Amx, page: &Page<'_>, queries: &[Query<'_>], scores: &mut [f64]) {
    dispatch!(@planes isa.run_tiles, page, KeyScores { page, queries, scores });
}

/// As [`super::add_values`].
pub(super) fn add_values(isa: Amx, page: &Page<'_>, queries: &mut [Query<'_>], weights: &[f32]) {
    dispatch!(@planes isa.run_tiles, page, AddValues { page, queries, weights });
}

/// Queries of a product.
const ROWS: usize = 16;
/// Strips of a group: 128 tokens of keys, 128 channels of values.
const STRIPS: usize = DEPTH / LANES;

/// Bytes of the queries' side: `(queries, depth)`.
#[repr(C, align(64))]
struct Left([[i8; DEPTH]; ROWS]);

/// A group's levels: `(strips, vectors, 64)`.
#[repr(C, align(64))]
struct Right([[MaybeUninit<u8>; VECTORS * LINE]; STRIPS]);

impl Right {
    const NONE: Self = Self([[MaybeUninit::uninit(); VECTORS * LINE]; STRIPS]);

    /// Unpacks the runs of `group`.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features and VBMI; the page [`suits`], its planes have these bits, and
    /// `group` is its.
    #[inline(always)]
    unsafe fn unpack<const UPPER: usize, const LOWER: usize>(
        &mut self,
        levels: &Levels<Avx512Lanes, UPPER, LOWER>,
        page: &Page<'_>,
        group: ScaleGroup,
    ) {
        let (run, strip_bytes) = page.layout.runs(group);
        for (strip, to) in self.0.iter_mut().enumerate() {
            let upper = page.codes.as_ptr().wrapping_add(run.upper + strip * strip_bytes.0);
            let lower = page.codes.as_ptr().wrapping_add(run.lower + strip * strip_bytes.1);
            for chunk in 0..VECTORS / CHUNK {
                // SAFETY: as the caller's: the features, and a page whose groups are `STRIPS` runs of `VECTORS`.
                unsafe {
                    for (v, vector) in levels.chunk(upper, lower, chunk).into_iter().enumerate() {
                        _mm512_store_si512(to.as_mut_ptr().add((chunk * CHUNK + v) * LINE).cast(), vector);
                    }
                }
            }
        }
    }
}

/// Products: `(strips, queries, 16 lanes)`.
#[repr(C, align(64))]
struct Product([[MaybeUninit<i32>; ROWS * LANES]; STRIPS]);

impl Product {
    const NONE: Self = Self([[MaybeUninit::uninit(); ROWS * LANES]; STRIPS]);

    /// # Safety
    /// The caller is inside a function with AVX-512's features; [`Tiles::multiply`] wrote this row.
    #[inline(always)]
    unsafe fn row(&self, strip: usize, n: usize) -> __m512i {
        // SAFETY: as the caller's: the features, and that `Tiles::multiply` wrote this row.
        unsafe { _mm512_load_si512(self.0[strip].as_ptr().add(n * LANES).cast()) }
    }
}

/// The tile registers: 0 to 3 hold the left sides of `N` (1 or 2) products, 4 and 5 the results, 6 and 7 the right side.
struct Tiles<const N: usize>(TileRegisters);

impl<const N: usize> Tiles<N> {
    /// # Safety
    /// This processor has tile registers, this process may use them, and no other configuration is in use on this thread.
    #[inline(always)]
    unsafe fn new(rows: usize) -> Self {
        let (left, right) = (TileShape { rows, bytes: LINE }, TileShape { rows: LANES, bytes: LINE });
        // SAFETY: the caller has the registers, and no operation runs inside another.
        Self(unsafe { TileRegisters::new([left, left, left, left, left, left, right, right]) })
    }

    /// Sets the left sides of the products that follow.
    #[inline(always)]
    fn hold(&mut self, left: [&Left; N]) {
        // SAFETY: `self` is the configuration. Read are two halves of 64 bytes of at most 16 rows; the registers that are written
        // are declared, and keep their contents as `TileRegisters` says.
        unsafe {
            asm!(
                "tileloadd tmm0, [{left} + {depth}*1]",
                "tileloadd tmm1, [{left} + {depth}*1 + 64]",
                left = in(reg) &raw const left[0].0,
                depth = in(reg) DEPTH,
                out("tmm0") _,
                out("tmm1") _,
                options(nostack, readonly, preserves_flags),
            );
            if N == 2 {
                asm!(
                    "tileloadd tmm2, [{left} + {depth}*1]",
                    "tileloadd tmm3, [{left} + {depth}*1 + 64]",
                    left = in(reg) &raw const left[1].0,
                    depth = in(reg) DEPTH,
                    out("tmm2") _,
                    out("tmm3") _,
                    options(nostack, readonly, preserves_flags),
                );
            }
        }
    }

    /// `to[i][strip][n][lane] = sum_d left[i][n][d] * right[strip][d][lane]`, for as many `n` as there are rows.
    ///
    /// # Safety
    /// [`Tiles::hold`] came before.
    #[inline(always)]
    unsafe fn multiply(&self, right: &Right, to: &mut [Product; N]) {
        for strip in 0..STRIPS {
            // SAFETY: `self` is the configuration, and `hold` came before. Read are the two kilobytes of a strip, written at
            // most 16 rows of 64 bytes; the registers that are written are declared, and keep their contents as `TileRegisters`
            // says.
            unsafe {
                asm!(
                    "tilezero tmm4",
                    "tileloadd tmm6, [{right} + {line}*1]",
                    "tdpbssd tmm4, tmm0, tmm6",
                    "tileloadd tmm7, [{right} + {line}*1 + 1024]",
                    "tdpbssd tmm4, tmm1, tmm7",
                    "tilestored [{to} + {line}*1], tmm4",
                    right = in(reg) &raw const right.0[strip],
                    to = in(reg) &raw mut to[0].0[strip],
                    line = in(reg) LINE,
                    out("tmm4") _,
                    out("tmm6") _,
                    out("tmm7") _,
                    options(nostack, preserves_flags),
                );
                if N == 2 {
                    asm!(
                        "tilezero tmm5",
                        "tdpbssd tmm5, tmm2, tmm6",
                        "tdpbssd tmm5, tmm3, tmm7",
                        "tilestored [{to} + {line}*1], tmm5",
                        to = in(reg) &raw mut to[1].0[strip],
                        line = in(reg) LINE,
                        out("tmm5") _,
                        options(nostack, preserves_flags),
                    );
                }
            }
        }
    }
}

struct KeyScores<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    queries: &'a [Query<'q>],
    scores: &'a mut [f64],
}

impl<const UPPER: usize, const LOWER: usize> TileOp for KeyScores<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval(self, l: Avx512Lanes) {
        let Self { page, queries, scores } = self;
        let Some((asked, count)) = asked(queries, |prepared| Some(prepared.own)) else { return };
        let mut sums = [const { MaybeUninit::<Floats>::uninit() }; SHARE];
        for sums in &mut sums[..count] {
            sums.write(Floats([0.0; PAGE_TOKENS]));
        }
        let (mut left, mut right, mut dots) = (Left([[0; DEPTH]; ROWS]), Right::NONE, [Product::NONE]);
        // SAFETY: `run_tiles` entered the features and has the tiles; `attend_tile` checked every length; `suits` checked
        // the groups.
        unsafe {
            let mut tiles = Tiles::new(count.min(ROWS));
            let levels = Levels::<_, UPPER, LOWER>::new(l, page, 0);
            for group in page.layout.scale_groups() {
                right.unpack(&levels, page, group);
                for (asked, sums) in asked[..count].chunks(ROWS).zip(sums.chunks_mut(ROWS)) {
                    let mut scales = [0.0; ROWS];
                    for (n, asked) in asked.iter().enumerate() {
                        let words = asked.words.quads().as_ptr().add(group.first / 4);
                        left.0[n].as_mut_ptr().copy_from_nonoverlapping(words.cast(), DEPTH);
                        scales[n] = asked.words.scale(group);
                    }
                    tiles.hold([&left]);
                    tiles.multiply(&right, &mut dots);
                    for strip in 0..STRIPS {
                        let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + strip * LANES));
                        for n in 0..asked.len() {
                            let sum = sums[n].as_mut_ptr().cast::<f32>().add(strip * LANES);
                            let dot = _mm512_cvtepi32_ps(dots[0].row(strip, n));
                            l.store(sum, l.fma(dot, l.mul(scale, l.splat(scales[n])), l.load(sum)));
                        }
                    }
                }
            }
            for first in (0..count).step_by(8) {
                let asked = part::<8>(&asked, first);
                let means = mean_scores(l, page, asked, 0);
                for n in 0..8.min(count - first) {
                    let scores = scores[asked[n].row * PAGE_TOKENS..].as_mut_ptr();
                    let mean = _mm512_set1_pd(means[n]);
                    for (i, sums) in sums[first + n].assume_init_ref().0.as_chunks::<8>().0.iter().enumerate() {
                        let score = _mm512_add_pd(_mm512_cvtps_pd(_mm256_load_ps(sums.as_ptr())), mean);
                        _mm512_storeu_pd(scores.add(8 * i), score);
                    }
                }
            }
        }
    }
}

struct AddValues<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    queries: &'a mut [Query<'q>],
    weights: &'a [f32],
}

/// Fours of bytes back in order after four vectors were packed, which goes on within quarters.
const IN_ORDER: [u32; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// The queries' weights of a group in integers `256 * upper + lower`.
struct Integers {
    upper: Left,
    lower: Left,
    /// What one of them is worth at one level.
    units: [f32; ROWS],
}

impl Integers {
    /// Of weights times scales, as the reference's.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; `scales` has a page's tokens.
    #[inline(always)]
    unsafe fn set(&mut self, page: &Page<'_>, scales: &[half::f16], seen: &[&[f32; PAGE_TOKENS]]) {
        const PARTS: usize = PAGE_TOKENS / LANES;
        let l = Avx512Lanes;
        let mut products = [const { MaybeUninit::<Floats>::uninit() }; ROWS];
        let mut largest = [0.0f32; ROWS];
        // Queries one after the other in each of the passes, so that none waits for its own maximum.
        // SAFETY: as the caller's: the features; all arrays are of a page's tokens.
        unsafe {
            let magnitude = _mm512_set1_epi32(0x7fff_ffff);
            let mut scale = [l.splat(0.0); PARTS];
            for (p, scale) in scale.iter_mut().enumerate() {
                *scale = l.load_f16(scales.as_ptr().add(p * LANES));
            }
            for (n, seen) in seen.iter().enumerate() {
                let mut most = _mm512_setzero_si512();
                for (p, scale) in scale.iter().enumerate() {
                    let product = l.mul(l.load(seen.as_ptr().add(p * LANES)), *scale);
                    l.store(products[n].as_mut_ptr().cast::<f32>().add(p * LANES), product);
                    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(product), magnitude));
                }
                largest[n] = f32::from_bits(_mm512_reduce_max_epu32(most));
            }
            let mut inverses = [0.0f32; ROWS];
            for n in 0..ROWS {
                let none = largest[n] < WEIGHT_MIN;
                inverses[n] = if none { 0.0 } else { WEIGHT_MAX / largest[n] };
                self.units[n] = if none { 0.0 } else { largest[n] * (page.layout.format().unit() / WEIGHT_MAX) };
            }
            let in_order = _mm512_loadu_si512(IN_ORDER.as_ptr().cast());
            for n in 0..seen.len() {
                let inverse = l.splat(inverses[n]);
                for half in [0, PAGE_TOKENS / 2] {
                    let mut integers = [_mm512_setzero_si512(); 4];
                    for (p, integers) in integers.iter_mut().enumerate() {
                        let product = l.load(products[n].as_ptr().cast::<f32>().add(half + p * LANES));
                        *integers = _mm512_cvtps_epi32(l.mul(product, inverse));
                    }
                    let [a, b, c, d] = integers;
                    let (ab, cd) = (_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
                    let (round, byte) = (_mm512_set1_epi16(128), _mm512_set1_epi16(255));
                    let upper = _mm512_packs_epi16(
                        _mm512_srai_epi16::<8>(_mm512_add_epi16(ab, round)),
                        _mm512_srai_epi16::<8>(_mm512_add_epi16(cd, round)),
                    );
                    let lower = _mm512_packus_epi16(_mm512_and_si512(ab, byte), _mm512_and_si512(cd, byte));
                    for (to, bytes) in [(&mut self.upper, upper), (&mut self.lower, lower)] {
                        let to = to.0[n].as_mut_ptr().add(half);
                        _mm512_store_si512(to.cast(), _mm512_permutexvar_epi32(in_order, bytes));
                    }
                }
            }
        }
    }
}

impl<const UPPER: usize, const LOWER: usize> TileOp for AddValues<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval(self, l: Avx512Lanes) {
        let Self { page, queries, weights } = self;
        // SAFETY: `run_tiles` entered the features; `attend_tile` checked every length.
        let Summands { seen, outputs, count } = unsafe { Summands::begin(l, page, queries, weights) };
        if count == 0 {
            return;
        }
        let none = [[0; DEPTH]; ROWS];
        let mut integers = Integers { upper: Left(none), lower: Left(none), units: [0.0; ROWS] };
        let (mut right, mut sums) = (Right::NONE, [Product::NONE; 2]);
        // SAFETY: as for keys.
        unsafe {
            let mut tiles = Tiles::new(count.min(ROWS));
            let levels = Levels::<_, UPPER, LOWER>::new(l, page, 0);
            for group in page.layout.scale_groups() {
                let scales = &page.scales[group.index * PAGE_TOKENS..][..PAGE_TOKENS];
                right.unpack(&levels, page, group);
                for (seen, outputs) in seen[..count].chunks(ROWS).zip(outputs.chunks(ROWS)) {
                    integers.set(page, scales, seen);
                    tiles.hold([&integers.upper, &integers.lower]);
                    tiles.multiply(&right, &mut sums);
                    for (n, output) in outputs[..seen.len()].iter().enumerate() {
                        let (output, unit) = (output.add(group.first), l.splat(integers.units[n]));
                        for strip in 0..STRIPS {
                            let upper = _mm512_slli_epi32::<8>(sums[0].row(strip, n));
                            let sum = _mm512_cvtepi32_ps(_mm512_add_epi32(upper, sums[1].row(strip, n)));
                            let output = output.add(strip * LANES);
                            l.store(output, l.fma(sum, unit, l.load(output)));
                        }
                    }
                }
            }
        }
    }
}
