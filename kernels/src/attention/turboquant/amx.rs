//! Attention over pages in tile registers: a group's levels are unpacked once, into the L1 cache, and multiplied
//! by the queries, 16 at a time.
//!
//! Operands of `tdpbssd`, `C[m][n] += sum over i in 0..4 of A[m][4 p + i] * B[p][4 n + i]` for 16 `p`; two per strip of
//! 16 lanes:
//!
//! ```text
//! A: 16 queries by 128 of depth, i8; two tiles of 64 bytes per row
//!              byte 0 .. 63          64 .. 127
//! query  0      | d 0 .. d 63       | d 64 .. d 127 |      d: channels (keys), tokens (values)
//!   ...
//! query 15      | d 0 .. d 63       | d 64 .. d 127 |
//!
//! B: 16 vectors of a run by 16 lanes, i8; two tiles per strip. The vectors of `layout.rs`, unchanged:
//!                 byte 0               4                    60
//! vector  0      | lane 0: d 0..4    | lane 1: d 0..4  | .. | lane 15: d 0..4  |   tile 0
//!   ...
//! vector 15      | lane 0: d 60..64  | ...
//! vector 16      | lane 0: d 64..68  | ...                                         tile 1
//!   ...
//! vector 31      | lane 0: d 124..128| ...
//!
//! C: 16 queries by 16 lanes, i32
//! ```
//!
//! Integers, and the operations on floats, are those of `scalar.rs`.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::layout::{LANES, LINE, ScaleGroup};
use super::operands::{ActiveOutputs, TokenFloats, active_queries, mean_scores, part};
use super::page::Page;
use super::scalar::{WEIGHT_MAX, WEIGHT_MIN};
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, Unpacker, with_planes};
use crate::attention::query::{QUERY_BLOCK, Query};
use crate::isa::Amx;
use crate::simd::amx::{AmxOp, TileRegisters, TileShape};
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::float::Floats;

/// Depth of a run: two tiles.
const DEPTH: usize = 128;
/// Vectors of a run.
const VECTORS: usize = DEPTH / 4;
/// Vectors are faster for fewer queries.
const MIN_QUERIES: usize = 5;

/// Whether there is an AMX kernel for this layout, and it is faster for this many queries.
pub(super) fn suits(page: &Page<'_>, queries: usize) -> bool {
    queries >= MIN_QUERIES && page.layout.scale_groups().all(|group| group.len == DEPTH)
}

/// As [`super::scores::key_scores`], of all tokens.
pub(super) fn key_scores(isa: Amx, page: &Page<'_>, queries: &[Query<'_>], scores: &mut [f64]) {
    with_planes!(page, |UPPER, LOWER| isa.run_tiles(KeyScores::<UPPER, LOWER> { page, queries, scores }));
}

/// As [`super::values::add_values`].
pub(super) fn add_values(isa: Amx, page: &Page<'_>, queries: &mut [Query<'_>], weights: &[f32]) {
    with_planes!(page, |UPPER, LOWER| isa.run_tiles(AddValues::<UPPER, LOWER> { page, queries, weights }));
}

/// Queries of an A tile.
const ROWS: usize = 16;
/// Strips of a group: 128 tokens of keys, 128 channels of values.
const STRIPS: usize = DEPTH / LANES;

/// Two A tiles: `(queries, depth)`.
#[repr(C, align(64))]
struct ATiles([[i8; DEPTH]; ROWS]);

/// A group's levels, B tiles: `(strips, vectors, 64)`.
#[repr(C, align(64))]
struct BTiles([[MaybeUninit<u8>; VECTORS * LINE]; STRIPS]);

impl BTiles {
    const UNINIT: Self = Self([[MaybeUninit::uninit(); VECTORS * LINE]; STRIPS]);

    /// Unpacks the runs of `group`.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features and VBMI; the page [`suits`], its planes have these
    /// bits, and `group` is one of its scale groups.
    #[inline(always)]
    unsafe fn unpack<const UPPER: usize, const LOWER: usize>(
        &mut self,
        unpacker: &Unpacker<Avx512Lanes, UPPER, LOWER>,
        page: &Page<'_>,
        group: ScaleGroup,
    ) {
        let (run, strip_bytes) = page.layout.runs(group);
        for (strip, to) in self.0.iter_mut().enumerate() {
            let upper = page.codes.as_ptr().wrapping_add(run.upper + strip * strip_bytes.0);
            let lower = page.codes.as_ptr().wrapping_add(run.lower + strip * strip_bytes.1);
            for chunk in 0..VECTORS / CHUNK {
                // SAFETY: the caller entered the features; each group of the page is `STRIPS` runs of `VECTORS`.
                unsafe {
                    for (v, vector) in unpacker.chunk(upper, lower, chunk).into_iter().enumerate() {
                        _mm512_store_si512(to.as_mut_ptr().add((chunk * CHUNK + v) * LINE).cast(), vector);
                    }
                }
            }
        }
    }
}

/// Stored C tiles: `(strips, queries, 16 lanes)`.
#[repr(C, align(64))]
struct CTiles([[MaybeUninit<i32>; ROWS * LANES]; STRIPS]);

impl CTiles {
    const UNINIT: Self = Self([[MaybeUninit::uninit(); ROWS * LANES]; STRIPS]);

    /// # Safety
    /// The caller is inside a function with AVX-512's features; [`Tiles::multiply`] wrote this row.
    #[inline(always)]
    unsafe fn row(&self, strip: usize, n: usize) -> __m512i {
        // SAFETY: the caller entered the features; `Tiles::multiply` wrote this row.
        unsafe { _mm512_load_si512(self.0[strip].as_ptr().add(n * LANES).cast()) }
    }
}

/// The tile registers: tmm0 to tmm3 hold `N` (1 or 2) pairs of A tiles, tmm4 and tmm5 C tiles, tmm6
/// and tmm7 the B tiles of a strip.
struct Tiles<const N: usize>(TileRegisters);

impl<const N: usize> Tiles<N> {
    /// # Safety
    /// This processor has tile registers, this process may use them, and no other configuration is
    /// in use on this thread.
    #[inline(always)]
    unsafe fn new(rows: usize) -> Self {
        let (ac, b) = (TileShape { rows, bytes: LINE }, TileShape { rows: LANES, bytes: LINE });
        // SAFETY: the caller has the registers, and operations are not nested.
        Self(unsafe { TileRegisters::new([ac, ac, ac, ac, ac, ac, b, b]) })
    }

    /// Loads the A tiles of the following products.
    #[inline(always)]
    fn load_a(&mut self, a: [&ATiles; N]) {
        // SAFETY: `self` is the configuration. Two tiles of at most 16 rows of 64 bytes are read; the registers that
        // are written are declared, and keep their contents (see `TileRegisters`).
        unsafe {
            asm!(
                "tileloadd tmm0, [{a} + {depth}*1]",
                "tileloadd tmm1, [{a} + {depth}*1 + 64]",
                a = in(reg) &raw const a[0].0,
                depth = in(reg) DEPTH,
                out("tmm0") _,
                out("tmm1") _,
                options(nostack, readonly, preserves_flags),
            );
            if N == 2 {
                asm!(
                    "tileloadd tmm2, [{a} + {depth}*1]",
                    "tileloadd tmm3, [{a} + {depth}*1 + 64]",
                    a = in(reg) &raw const a[1].0,
                    depth = in(reg) DEPTH,
                    out("tmm2") _,
                    out("tmm3") _,
                    options(nostack, readonly, preserves_flags),
                );
            }
        }
    }

    /// `c[i][strip][n][lane] = sum_d a[i][n][d] * b[strip][d][lane]`, for as many `n` as the tiles have rows.
    ///
    /// # Safety
    /// [`Tiles::load_a`] was called before.
    #[inline(always)]
    unsafe fn multiply(&self, b: &BTiles, c: &mut [CTiles; N]) {
        for strip in 0..STRIPS {
            // SAFETY: `self` is the configuration, and `load_a` was called before. The 2 KiB of a strip are
            // read, at most 16 rows of 64 bytes written; the registers that are written are declared, and keep
            // their contents (see `TileRegisters`).
            unsafe {
                asm!(
                    "tilezero tmm4",
                    "tileloadd tmm6, [{b} + {line}*1]",
                    "tdpbssd tmm4, tmm0, tmm6",
                    "tileloadd tmm7, [{b} + {line}*1 + 1024]",
                    "tdpbssd tmm4, tmm1, tmm7",
                    "tilestored [{c} + {line}*1], tmm4",
                    b = in(reg) &raw const b.0[strip],
                    c = in(reg) &raw mut c[0].0[strip],
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
                        "tilestored [{c} + {line}*1], tmm5",
                        c = in(reg) &raw mut c[1].0[strip],
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

impl<const UPPER: usize, const LOWER: usize> AmxOp for KeyScores<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval(self, l: Avx512Lanes) {
        let Self { page, queries, scores } = self;
        let Some((active, count)) = active_queries(queries, |quantized| Some(quantized.rotary)) else { return };
        let mut sums = [const { MaybeUninit::<TokenFloats>::uninit() }; QUERY_BLOCK];
        for sums in &mut sums[..count] {
            sums.write(TokenFloats([0.0; PAGE_TOKENS]));
        }
        let (mut a, mut b, mut dots) = (ATiles([[0; DEPTH]; ROWS]), BTiles::UNINIT, [CTiles::UNINIT]);
        // SAFETY: `run_tiles` entered the features and has the tiles; `attend_block` checked every
        // length; `suits` checked the groups.
        unsafe {
            let mut tiles = Tiles::new(count.min(ROWS));
            let unpacker = Unpacker::<_, UPPER, LOWER>::new(l, page, 0);
            for group in page.layout.scale_groups() {
                b.unpack(&unpacker, page, group);
                for (active, sums) in active[..count].chunks(ROWS).zip(sums.chunks_mut(ROWS)) {
                    let mut scales = [0.0; ROWS];
                    for (n, query) in active.iter().enumerate() {
                        let words = query.words.quads().as_ptr().add(group.first / 4);
                        a.0[n].as_mut_ptr().copy_from_nonoverlapping(words.cast(), DEPTH);
                        scales[n] = query.words.scale(group);
                    }
                    tiles.load_a([&a]);
                    tiles.multiply(&b, &mut dots);
                    for strip in 0..STRIPS {
                        let scale = l.load_f16(page.scales.as_ptr().add(group.index * PAGE_TOKENS + strip * LANES));
                        for n in 0..active.len() {
                            let sum = sums[n].as_mut_ptr().cast::<f32>().add(strip * LANES);
                            let dot = _mm512_cvtepi32_ps(dots[0].row(strip, n));
                            l.store(sum, l.fma(dot, l.mul(scale, l.splat(scales[n])), l.load(sum)));
                        }
                    }
                }
            }
            for first in (0..count).step_by(8) {
                let active = part::<8>(&active, first);
                let means = mean_scores(l, page, active, 0);
                for n in 0..8.min(count - first) {
                    let scores = scores[active[n].row * PAGE_TOKENS..].as_mut_ptr();
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

/// The order of words after packing four vectors of words to bytes, which works within quarters.
const IN_ORDER: [u32; 16] = [0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15];

/// The queries' weights of a group, as integers `256 * upper + lower`.
struct IntegerWeights {
    upper: ATiles,
    lower: ATiles,
    /// The value of integer weight 1 at level 1.
    units: [f32; ROWS],
}

impl IntegerWeights {
    /// Quantizes weights times scales, as `scalar.rs` does.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; `scales` has a page's tokens.
    #[inline(always)]
    unsafe fn set(&mut self, page: &Page<'_>, scales: &[half::f16], page_weights: &[&[f32; PAGE_TOKENS]]) {
        const PARTS: usize = PAGE_TOKENS / LANES;
        let l = Avx512Lanes;
        let mut products = [const { MaybeUninit::<TokenFloats>::uninit() }; ROWS];
        let mut largest = [0.0f32; ROWS];
        // Each pass runs over all queries, which hides the latency of a query's maximum.
        // SAFETY: the caller entered the features; all arrays are of a page's tokens.
        unsafe {
            let magnitude = _mm512_set1_epi32(0x7fff_ffff);
            let mut scale = [l.splat(0.0); PARTS];
            for (p, scale) in scale.iter_mut().enumerate() {
                *scale = l.load_f16(scales.as_ptr().add(p * LANES));
            }
            for (n, row) in page_weights.iter().enumerate() {
                let mut most = _mm512_setzero_si512();
                for (p, scale) in scale.iter().enumerate() {
                    let product = l.mul(l.load(row.as_ptr().add(p * LANES)), *scale);
                    l.store(products[n].as_mut_ptr().cast::<f32>().add(p * LANES), product);
                    most = _mm512_max_epu32(most, _mm512_and_si512(_mm512_castps_si512(product), magnitude));
                }
                largest[n] = f32::from_bits(_mm512_reduce_max_epu32(most));
            }
            let mut inverses = [0.0f32; ROWS];
            for n in 0..ROWS {
                let negligible = largest[n] < WEIGHT_MIN;
                inverses[n] = if negligible { 0.0 } else { WEIGHT_MAX / largest[n] };
                self.units[n] = if negligible { 0.0 } else { largest[n] * (page.layout.format().unit() / WEIGHT_MAX) };
            }
            let in_order = _mm512_loadu_si512(IN_ORDER.as_ptr().cast());
            for n in 0..page_weights.len() {
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

impl<const UPPER: usize, const LOWER: usize> AmxOp for AddValues<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval(self, l: Avx512Lanes) {
        let Self { page, queries, weights } = self;
        // SAFETY: `run_tiles` entered the features; `attend_block` checked every length.
        let ActiveOutputs { weights, outputs, count } = unsafe { ActiveOutputs::begin(l, page, queries, weights) };
        let zeros = [[0; DEPTH]; ROWS];
        let mut integers = IntegerWeights { upper: ATiles(zeros), lower: ATiles(zeros), units: [0.0; ROWS] };
        let (mut b, mut sums) = (BTiles::UNINIT, [CTiles::UNINIT; 2]);
        // SAFETY: `run_tiles` entered the features and has the tiles; `attend_block` checked lengths, `suits` groups.
        unsafe {
            let mut tiles = Tiles::new(count.min(ROWS));
            let unpacker = Unpacker::<_, UPPER, LOWER>::new(l, page, 0);
            for group in page.layout.scale_groups() {
                let scales = &page.scales[group.index * PAGE_TOKENS..][..PAGE_TOKENS];
                b.unpack(&unpacker, page, group);
                for (weights, outputs) in weights[..count].chunks(ROWS).zip(outputs.chunks(ROWS)) {
                    integers.set(page, scales, weights);
                    tiles.load_a([&integers.upper, &integers.lower]);
                    tiles.multiply(&b, &mut sums);
                    for (n, output) in outputs[..weights.len()].iter().enumerate() {
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
