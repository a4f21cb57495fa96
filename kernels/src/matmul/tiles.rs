//! The matmul by brain floats, in products of tile registers.
//!
//! Such a product takes brain floats on both sides, and is worth sixteen times the multiply-adds of a vector's. A float is
//! the sum of three of them without an error: its first eight significant bits, the next eight and the last. So every
//! weight meets three parts of each row, which leaves four times the speed of vectors where rows are many and, where they
//! are few, makes sixteen cost what one does: memory alone counts. A single row gains nothing. It pays some hundredths, in
//! caches a tenth, for having the bits that it has among sixteen.
//!
//! Weights are the left sides, as they lie: sixteen outputs by 32 inputs. Rows are the right sides, whose pairs of inputs lie
//! side by side for up to sixteen rows. An output is a sum over the inputs in order, 32 at a time: of the third parts'
//! products, of the second parts', of the first parts'. The instruction's definition says in which order each is added up.

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use half::bf16;

use crate::ColumnsMut;
use crate::isa::Amx;
use crate::lanes::{Avx512Lanes, Lanes, prefetch};
use crate::tile_registers::{TileOp, TileRegisters, TileShape};

/// Inputs of a product.
const DEPTH: usize = 32;
/// Outputs of a product, and rows at most.
const SIDE: usize = 16;
/// Brain floats that a float is the sum of.
const PARTS: usize = 3;
/// Bytes of the rows that go over the weights together: the second-level cache keeps them while the outputs pass by.
const CHUNK_BYTES: usize = 1 << 20;

/// Steps between asking for weights and using them.
const AHEAD: usize = 8;

/// Rows that a right side has room for: sixteen, or all of fewer.
fn width(rows: usize) -> usize {
    rows.min(SIDE)
}

/// Words of the right sides of up to sixteen rows: `(inputs / 32, parts, 16 pairs, rows)`.
fn group_words(width: usize, inputs: usize) -> usize {
    inputs.div_ceil(DEPTH) * PARTS * DEPTH / 2 * width
}

/// Words that [`split`] fills.
pub(super) fn words(rows: usize, inputs: usize) -> usize {
    rows.div_ceil(SIDE) * group_words(width(rows), inputs)
}

/// Puts `x`, `(rows, inputs)`, in order as right sides, in parts.
pub(super) fn split(isa: Amx, x: &[f32], inputs: usize, words: &mut [u32]) {
    isa.run_tiles(Split { x, inputs, words });
}

/// As [`super::matmul`], by what [`split`] made of the rows.
pub(super) fn matmul(isa: Amx, words: &[u32], inputs: usize, w: &[bf16], y: ColumnsMut<'_>) {
    isa.run_tiles(Products { words, inputs, w, y });
}

struct Split<'a> {
    x: &'a [f32],
    inputs: usize,
    words: &'a mut [u32],
}

impl TileOp for Split<'_> {
    #[inline(always)]
    fn eval(self, l: Avx512Lanes) {
        let rows = self.x.len() / self.inputs.max(1);
        let width = width(rows);
        let groups = self.words.chunks_exact_mut(group_words(width, self.inputs).max(1));
        for (words, x) in groups.zip(self.x.chunks(SIDE * self.inputs.max(1))) {
            // SAFETY: `run_tiles` entered the features. Of rows that a group lacks zeros remain.
            let mut parts = unsafe { [[l.splat(0.0); SIDE]; PARTS] };
            for (step, words) in words.chunks_exact_mut(PARTS * DEPTH / 2 * width).enumerate() {
                for (r, row) in x.chunks_exact(self.inputs).enumerate() {
                    let row = &row[step * DEPTH..];
                    // SAFETY: as above; the halves are of inputs that the row has.
                    unsafe {
                        let halves = [load_up_to(l, row), load_up_to(l, &row[row.len().min(DEPTH / 2)..])];
                        for (parts, pairs) in parts.iter_mut().zip(thirds(halves)) {
                            parts[r] = pairs;
                        }
                    }
                }
                for (words, pairs) in words.chunks_exact_mut(DEPTH / 2 * width).zip(&parts) {
                    // SAFETY: as above; a word for every lane that is stored.
                    unsafe {
                        if width == 1 {
                            l.store(words.as_mut_ptr().cast(), pairs[0]);
                            continue;
                        }
                        for (words, rows) in words.chunks_exact_mut(width).zip(transposed(*pairs)) {
                            match words.first_chunk_mut::<SIDE>() {
                                Some(words) => l.store(words.as_mut_ptr().cast(), rows),
                                None => l.store_part(words.as_mut_ptr().cast(), rows, width),
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The first sixteen numbers, or all of fewer and zeros.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn load_up_to(l: Avx512Lanes, x: &[f32]) -> __m512 {
    // SAFETY: as the caller's: the features.
    unsafe { if x.len() >= SIDE { l.load(x.as_ptr()) } else { l.load_part(x.as_ptr(), x.len()) } }
}

/// The three parts of 32 numbers, as pairs of brain floats, the first part first. What is cut off one part is what the next
/// begins with, so subtracting is exact.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn thirds(x: [__m512; 2]) -> [__m512; PARTS] {
    #[repr(align(64))]
    struct Upper([u16; 32]);
    static UPPER: Upper = {
        let mut words = [0; 32];
        let mut i = 0;
        while i < 32 {
            words[i] = 2 * i as u16 + 1;
            i += 1;
        }
        Upper(words)
    };
    // SAFETY: as the caller's: the features.
    unsafe {
        let upper = _mm512_load_si512(UPPER.0.as_ptr().cast());
        let mask = _mm512_castsi512_ps(_mm512_set1_epi32(0xFFFF_0000_u32 as i32));
        let mut left = x;
        let mut parts = [_mm512_setzero_ps(); PARTS];
        for part in &mut parts {
            let cut = [_mm512_and_ps(left[0], mask), _mm512_and_ps(left[1], mask)];
            let pairs = _mm512_permutex2var_epi16(_mm512_castps_si512(cut[0]), upper, _mm512_castps_si512(cut[1]));
            *part = _mm512_castsi512_ps(pairs);
            left = [_mm512_sub_ps(left[0], cut[0]), _mm512_sub_ps(left[1], cut[1])];
        }
        parts
    }
}

/// Lane `j` of vector `i` becomes lane `i` of vector `j`. No loops: vectors in arrays would go through memory.
///
/// # Safety
/// The caller is inside a function with AVX-512's features.
#[inline(always)]
unsafe fn transposed(v: [__m512; 16]) -> [__m512; 16] {
    /// In every quarter, four by four lanes.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn in_quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> [__m512; 4] {
        // SAFETY: as the caller's: the features.
        unsafe {
            let (ab, cd) = (_mm512_unpacklo_ps(a, b), _mm512_unpacklo_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)];
            let (ab, cd) = (_mm512_unpackhi_ps(a, b), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let high = [_mm512_unpacklo_pd(ab, cd), _mm512_unpackhi_pd(ab, cd)];
            [_mm512_castpd_ps(low[0]), _mm512_castpd_ps(low[1]), _mm512_castpd_ps(high[0]), _mm512_castpd_ps(high[1])]
        }
    }
    /// Four by four quarters.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn quarters(a: __m512, b: __m512, c: __m512, d: __m512) -> [__m512; 4] {
        // SAFETY: as the caller's: the features.
        unsafe {
            let (ab, cd) = (_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(c, d, 0x88));
            let even = [_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD)];
            let (ab, cd) = (_mm512_shuffle_f32x4(a, b, 0xDD), _mm512_shuffle_f32x4(c, d, 0xDD));
            let odd = [_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD)];
            [even[0], odd[0], even[1], odd[1]]
        }
    }
    // SAFETY: as the caller's: the features.
    unsafe {
        let [a0, a1, a2, a3] = in_quarters(v[0], v[1], v[2], v[3]);
        let [b0, b1, b2, b3] = in_quarters(v[4], v[5], v[6], v[7]);
        let [c0, c1, c2, c3] = in_quarters(v[8], v[9], v[10], v[11]);
        let [d0, d1, d2, d3] = in_quarters(v[12], v[13], v[14], v[15]);
        let (w, x) = (quarters(a0, b0, c0, d0), quarters(a1, b1, c1, d1));
        let (y, z) = (quarters(a2, b2, c2, d2), quarters(a3, b3, c3, d3));
        [w[0], x[0], y[0], z[0], w[1], x[1], y[1], z[1], w[2], x[2], y[2], z[2], w[3], x[3], y[3], z[3]]
    }
}

struct Products<'a> {
    words: &'a [u32],
    inputs: usize,
    w: &'a [bf16],
    y: ColumnsMut<'a>,
}

/// Sums of a pair of panels and a group of rows, as registers hold them: `(panels, outputs, rows)`.
#[repr(C, align(64))]
struct Sums([[[f32; SIDE]; SIDE]; 2]);

/// Weights of a product where they do not lie in the matrix as such: zeros fill what outputs or inputs lack.
#[repr(C, align(64))]
struct Edge([bf16; SIDE * DEPTH]);

/// A pair of panels, from a column on, and a group of rows.
#[derive(Clone, Copy)]
struct Turn {
    column: usize,
    group: usize,
    /// Whether the weights that follow are asked for.
    asks: bool,
}

impl TileOp for Products<'_> {
    #[inline(always)]
    fn eval(mut self, l: Avx512Lanes) {
        let (rows, columns) = (self.y.rows(), self.y.range());
        let width = width(rows);
        let weights = TileShape { rows: SIDE, bytes: 2 * DEPTH };
        let others = TileShape { rows: SIDE, bytes: 4 * width };
        // SAFETY: `run_tiles` has the registers, and no operation runs inside another.
        let _registers =
            unsafe { TileRegisters::new([weights, weights, others, others, others, others, others, others]) };
        let mut sums = Sums([[[0.0; SIDE]; SIDE]; 2]);
        let mut edges = [const { Edge([bf16::ZERO; _]) }; 2];
        let groups = (CHUNK_BYTES / 4 / group_words(width, self.inputs).max(1)).max(1);
        let (mut before, mut even) = (None, true);
        for chunk in (0..rows.div_ceil(SIDE)).step_by(groups) {
            for column in columns.clone().step_by(2 * SIDE) {
                for group in chunk..(chunk + groups).min(rows.div_ceil(SIDE)) {
                    let turn = Turn { column, group, asks: group == chunk };
                    // SAFETY: `run_tiles` entered the features, the registers have these shapes, and `matmul` checked
                    // that the weights have these columns.
                    unsafe {
                        if even {
                            self.multiply::<true>(l, turn, before, &mut edges, &mut sums);
                        } else {
                            self.multiply::<false>(l, turn, before, &mut edges, &mut sums);
                        }
                    }
                    (before, even) = (Some(turn), !even);
                }
            }
        }
        if let Some(before) = before {
            // SAFETY: as above; the last turn's sums are in its registers.
            unsafe {
                if even {
                    keep::<false>(&mut sums)
                } else {
                    keep::<true>(&mut sums)
                }
                self.write(l, &sums, before);
            }
        }
    }
}

/// Steps of a turn before which the sums of the one before are neither stored nor read: a last product takes 52 cycles, a
/// store some more, and who waits for either asks for no weights meanwhile.
const STORED: usize = 2;
const READ: usize = 4;

/// Stores the sums of a turn that added to the first (`EVEN`) or the second two of four registers.
///
/// # Safety
/// The tile registers are configured as [`Products::eval`] does it, and hold the sums of such a turn.
#[inline(always)]
unsafe fn keep<const EVEN: bool>(sums: &mut Sums) {
    macro_rules! store {
        ($a:literal, $b:literal) => {
            asm!(
                concat!("tilestored [{to} + {side}*1], ", $a),
                concat!("tilestored [{to} + {side}*1 + 1024], ", $b),
                to = in(reg) sums.0.as_mut_ptr(),
                side = in(reg) 4 * SIDE,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: as the caller's: the registers are configured, and the sums have room for both. They are read as the last products
    // left them (`TileRegisters` says why they are there); none is written.
    unsafe { if EVEN { store!("tmm4", "tmm5") } else { store!("tmm6", "tmm7") } }
}

impl Products<'_> {
    /// Adds a turn's products, and meanwhile writes the sums of the one `before`.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features, the tile registers are configured as [`Products::eval`] does
    /// it, and hold the sums of `before`. The words have the turn's group, the weights its columns as far as `y` has them.
    #[inline(always)]
    unsafe fn multiply<const EVEN: bool>(
        &mut self,
        l: Avx512Lanes,
        turn: Turn,
        before: Option<Turn>,
        edges: &mut [Edge; 2],
        sums: &mut Sums,
    ) {
        let (inputs, steps) = (self.inputs, self.inputs.div_ceil(DEPTH));
        let width = width(self.y.rows());
        let (part, side) = (DEPTH / 2 * width, 4 * width);
        let columns = turn.column..self.y.range().end.min(turn.column + 2 * SIDE);
        // The turn's register of sums, and what is done to it.
        macro_rules! both {
            ($instruction:literal, $a:tt, $b:tt, $factors:literal) => {
                if EVEN {
                    asm!(concat!($instruction, " ", $a, $factors), out($a) _, options(nomem, nostack, preserves_flags))
                } else {
                    asm!(concat!($instruction, " ", $b, $factors), out($b) _, options(nomem, nostack, preserves_flags))
                }
            };
        }
        macro_rules! load {
            ($tile:tt, $from:expr, $stride:expr) => {
                asm!(
                    concat!("tileloadd ", $tile, ", [{from} + {stride}*1]"),
                    from = in(reg) $from,
                    stride = in(reg) $stride,
                    out($tile) _,
                    options(nostack, readonly, preserves_flags),
                )
            };
        }
        // SAFETY: as the caller's. A panel of sixteen outputs has all of a step's inputs where the row has them; of an edge
        // what is there is copied. Prefetching reads nothing. Each `asm!` declares the register that it writes; what the next
        // ones read of it is there as `TileRegisters` says.
        unsafe {
            let here = self.w.as_ptr().add(columns.start * inputs);
            let next = here.wrapping_add(2 * SIDE * inputs);
            let whole = if columns.len() == 2 * SIDE { inputs / DEPTH } else { 0 };
            let mut words = self.words.as_ptr().add(turn.group * group_words(width, inputs));
            both!("tilezero", "tmm4", "tmm6", "");
            both!("tilezero", "tmm5", "tmm7", "");
            for step in 0..steps {
                let (left, stride) = if step < whole {
                    let left = here.add(step * DEPTH);
                    ([left, left.add(SIDE * inputs)], 2 * inputs)
                } else {
                    (self.copy_edges(&columns, step * DEPTH, edges), 2 * DEPTH)
                };
                let then = step + AHEAD.min(steps);
                let asked = if then < steps {
                    here.wrapping_add(then * DEPTH)
                } else {
                    next.wrapping_add((then - steps) * DEPTH)
                };
                // Between the products, since asked for at once they would be waited for.
                let ask = |outputs: Range<usize>| {
                    if turn.asks {
                        for output in outputs {
                            prefetch(asked.wrapping_add(output * inputs).cast());
                        }
                    }
                };
                ask(0..6);
                load!("tmm0", left[0], stride);
                load!("tmm2", words.add(2 * part), side);
                both!("tdpbf16ps", "tmm4", "tmm6", ", tmm0, tmm2");
                ask(6..12);
                load!("tmm1", left[1], stride);
                both!("tdpbf16ps", "tmm5", "tmm7", ", tmm1, tmm2");
                ask(12..18);
                load!("tmm3", words.add(part), side);
                both!("tdpbf16ps", "tmm4", "tmm6", ", tmm0, tmm3");
                ask(18..24);
                both!("tdpbf16ps", "tmm5", "tmm7", ", tmm1, tmm3");
                ask(24..28);
                load!("tmm2", words, side);
                both!("tdpbf16ps", "tmm4", "tmm6", ", tmm0, tmm2");
                ask(28..32);
                both!("tdpbf16ps", "tmm5", "tmm7", ", tmm1, tmm2");
                words = words.add(PARTS * part);
                if let Some(before) = before {
                    if step == STORED.min(steps - 1) {
                        if EVEN { keep::<false>(sums) } else { keep::<true>(sums) }
                    }
                    if step == READ.min(steps - 1) {
                        self.write(l, sums, before);
                    }
                }
            }
        }
    }

    /// Copies what there is of two panels' weights, from the input `from` on, among zeros.
    #[inline(never)]
    fn copy_edges(&self, columns: &Range<usize>, from: usize, edges: &mut [Edge; 2]) -> [*const bf16; 2] {
        let depth = (self.inputs - from).min(DEPTH);
        for (p, edge) in edges.iter_mut().enumerate() {
            edge.0.fill(bf16::ZERO);
            for (column, edge) in (columns.start + p * SIDE..columns.end).zip(edge.0.chunks_exact_mut(DEPTH)) {
                edge[..depth].copy_from_slice(&self.w[column * self.inputs + from..][..depth]);
            }
        }
        edges.each_ref().map(|edge| edge.0.as_ptr())
    }

    /// Writes a turn's sums to `y`.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn write(&mut self, l: Avx512Lanes, sums: &Sums, turn: Turn) {
        let (rows, columns) = (self.y.rows(), self.y.range());
        for (outputs, start) in sums.0.iter().zip((turn.column..columns.end).step_by(SIDE)) {
            // SAFETY: as the caller's: the features.
            let outputs = unsafe {
                let mut vectors = [l.splat(0.0); SIDE];
                for (vector, output) in vectors.iter_mut().zip(outputs) {
                    *vector = l.load(output.as_ptr());
                }
                transposed(vectors)
            };
            let count = (columns.end - start).min(SIDE);
            for (row, outputs) in (turn.group * SIDE..rows).zip(outputs) {
                let y = &mut self.y.row_mut(row)[start - columns.start..][..count];
                // SAFETY: as above; `y` has a place for every lane that is stored.
                unsafe {
                    match y.first_chunk_mut::<SIDE>() {
                        Some(y) => l.store(y.as_mut_ptr().cast(), outputs),
                        None => l.store_part(y.as_mut_ptr().cast(), outputs, count),
                    }
                }
            }
        }
    }
}
