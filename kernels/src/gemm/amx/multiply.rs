//! The tile products: C blocks of 32 outputs by 16 rows.

use std::arch::asm;
use std::ops::Range;

use half::bf16;

use super::layout::{DEPTH, PARTS, SIDE, block_words, width};
use super::transpose::transpose;
use crate::columns::ColumnsMut;
use crate::isa::Amx;
use crate::simd::amx::{AmxOp, TileRegisters, TileShape};
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::float::{Floats, Lanes};
use crate::simd::prefetch::prefetch;

/// Bytes of the B tiles per pass over the weights: they stay in the L2 cache.
const PASS_BYTES: usize = 1 << 20;

/// Prefetch distance, in steps of [`DEPTH`] inputs.
const PREFETCH_STEPS: usize = 8;

/// `y = words * w^T`, with the words that [`super::split()`] wrote: see [`crate::gemm::matmul`].
pub(in crate::gemm) fn matmul(isa: Amx, words: &[u32], inputs: usize, w: &[bf16], y: ColumnsMut<'_>) {
    isa.run_tiles(MatMul { words, inputs, w, y });
}

struct MatMul<'a> {
    words: &'a [u32],
    inputs: usize,
    w: &'a [bf16],
    y: ColumnsMut<'a>,
}

/// The two C tiles of a [`Block`]: `(tiles, outputs, rows)`.
#[repr(C, align(64))]
struct CTiles([[[f32; SIDE]; SIDE]; 2]);

/// Copy of an A tile at the edge of the matrix: outputs and inputs past the edge are zeros.
#[repr(C, align(64))]
struct EdgeTile([bf16; SIDE * DEPTH]);

/// A block of `y`: 32 outputs (two C tiles) by one row block.
#[derive(Clone, Copy)]
struct Block {
    /// The first output.
    column: usize,
    /// The row block.
    rows: usize,
    /// Whether weights are prefetched: only for the first row block of a pass; the others hit the cache.
    prefetches: bool,
}

impl AmxOp for MatMul<'_> {
    #[inline(always)]
    fn eval(mut self, l: Avx512Lanes) {
        let (rows, columns) = (self.y.rows(), self.y.range());
        let width = width(rows);
        let a = TileShape { rows: SIDE, bytes: 2 * DEPTH };
        // B and C have the same shape: 16 pairs or outputs by `width` rows of 4 bytes.
        let bc = TileShape { rows: SIDE, bytes: 4 * width };
        // SAFETY: an `Amx` proves that tile registers are available, and operations are not nested.
        let _registers = unsafe { TileRegisters::new([a, a, bc, bc, bc, bc, bc, bc]) };
        let mut c = CTiles([[[0.0; SIDE]; SIDE]; 2]);
        let mut edges = [const { EdgeTile([bf16::ZERO; _]) }; 2];
        let blocks = (PASS_BYTES / 4 / block_words(width, self.inputs).max(1)).max(1);
        let (mut previous, mut even) = (None, true);
        for pass in (0..rows.div_ceil(SIDE)).step_by(blocks) {
            for column in columns.clone().step_by(2 * SIDE) {
                for row_block in pass..(pass + blocks).min(rows.div_ceil(SIDE)) {
                    let block = Block { column, rows: row_block, prefetches: row_block == pass };
                    // SAFETY: `run_tiles` entered the features, the registers have these shapes, and `matmul` checked
                    // that the weights have these columns.
                    unsafe {
                        if even {
                            self.multiply::<true>(l, block, previous, &mut edges, &mut c);
                        } else {
                            self.multiply::<false>(l, block, previous, &mut edges, &mut c);
                        }
                    }
                    (previous, even) = (Some(block), !even);
                }
            }
        }
        if let Some(previous) = previous {
            // SAFETY: `run_tiles` entered the features; the registers have these shapes and the last block's sums.
            unsafe {
                if even {
                    store_c::<false>(&mut c)
                } else {
                    store_c::<true>(&mut c)
                }
                self.write(l, &c, previous);
            }
        }
    }
}

/// The steps of a block at which the C tiles of the previous block are stored, and at which they are read back. Not
/// immediately: a tile product takes 52 cycles and a store some more, and waiting for either would stall the
/// prefetches.
const STORE_STEP: usize = 2;
const READ_STEP: usize = 4;

/// Stores the C tiles of an even (tmm4, tmm5) or odd (tmm6, tmm7) block.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`] and hold the sums of such a block.
#[inline(always)]
unsafe fn store_c<const EVEN: bool>(c: &mut CTiles) {
    macro_rules! store {
        ($a:literal, $b:literal) => {
            asm!(
                concat!("tilestored [{to} + {side}*1], ", $a),
                concat!("tilestored [{to} + {side}*1 + 1024], ", $b),
                to = in(reg) c.0.as_mut_ptr(),
                side = in(reg) 4 * SIDE,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: the caller configured the registers, and `c` has space for both tiles. The registers still hold the last
    // products (see `TileRegisters`); none is written.
    unsafe { if EVEN { store!("tmm4", "tmm5") } else { store!("tmm6", "tmm7") } }
}

/// An instruction on one C tile of a block: `$a` of an even block, `$b` of an odd one.
macro_rules! on_c {
    ($even:expr, $instruction:literal, $a:tt, $b:tt, $operands:literal) => {
        if $even {
            asm!(concat!($instruction, " ", $a, $operands), out($a) _, options(nomem, nostack, preserves_flags))
        } else {
            asm!(concat!($instruction, " ", $b, $operands), out($b) _, options(nomem, nostack, preserves_flags))
        }
    };
}

/// Loads one tile.
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

/// The weights of a later step: a cache line of each output.
#[derive(Clone, Copy)]
struct Prefetched {
    from: *const bf16,
    inputs: usize,
    enabled: bool,
}

impl Prefetched {
    #[inline(always)]
    fn outputs(self, outputs: Range<usize>) {
        if self.enabled {
            for output in outputs {
                prefetch(self.from.wrapping_add(output * self.inputs).cast());
            }
        }
    }
}

/// Adds the products of a step's A tiles, whose outputs are `stride` bytes apart, with the B tiles
/// that begin at `words` to a block's C tiles. Prefetches are spread between the products: 32 at
/// once would fill the line fill buffers and stall.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`]; `a` are two A tiles, and `words` has the step's
/// [`PARTS`] parts of rows of `width` words.
#[inline(always)]
unsafe fn multiply_step<const EVEN: bool>(
    a: [*const bf16; 2],
    stride: usize,
    words: *const u32,
    width: usize,
    prefetched: Prefetched,
) {
    let (part, side) = (DEPTH / 2 * width, 4 * width);
    // SAFETY: the registers are configured, and the tiles are readable. Each `asm!` declares the register that it
    // writes; `TileRegisters` explains why later ones can read it.
    unsafe {
        prefetched.outputs(0..6);
        load!("tmm0", a[0], stride);
        load!("tmm2", words.add(2 * part), side);
        on_c!(EVEN, "tdpbf16ps", "tmm4", "tmm6", ", tmm0, tmm2");
        prefetched.outputs(6..12);
        load!("tmm1", a[1], stride);
        on_c!(EVEN, "tdpbf16ps", "tmm5", "tmm7", ", tmm1, tmm2");
        prefetched.outputs(12..18);
        load!("tmm3", words.add(part), side);
        on_c!(EVEN, "tdpbf16ps", "tmm4", "tmm6", ", tmm0, tmm3");
        prefetched.outputs(18..24);
        on_c!(EVEN, "tdpbf16ps", "tmm5", "tmm7", ", tmm1, tmm3");
        prefetched.outputs(24..28);
        load!("tmm2", words, side);
        on_c!(EVEN, "tdpbf16ps", "tmm4", "tmm6", ", tmm0, tmm2");
        prefetched.outputs(28..32);
        on_c!(EVEN, "tdpbf16ps", "tmm5", "tmm7", ", tmm1, tmm2");
    }
}

impl MatMul<'_> {
    /// Computes a block's C tiles, and meanwhile writes those of the `previous` block to `y`.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features, the tile registers are configured as in
    /// [`MatMul::eval`] and hold the sums of `previous`. `words` has the row block, and `w` has those of its columns
    /// that are within `y`.
    #[inline(always)]
    unsafe fn multiply<const EVEN: bool>(
        &mut self,
        l: Avx512Lanes,
        block: Block,
        previous: Option<Block>,
        edges: &mut [EdgeTile; 2],
        c: &mut CTiles,
    ) {
        let (inputs, steps) = (self.inputs, self.inputs.div_ceil(DEPTH));
        let width = width(self.y.rows());
        let columns = block.column..self.y.range().end.min(block.column + 2 * SIDE);
        // SAFETY: the registers are configured; `words` has the row block; an A tile is inside `w` or a copy. Each
        // `asm!` declares the register that it writes; `TileRegisters` explains why later ones can read it.
        unsafe {
            let here = self.w.as_ptr().add(columns.start * inputs);
            let next = here.wrapping_add(2 * SIDE * inputs);
            let whole = if columns.len() == 2 * SIDE { inputs / DEPTH } else { 0 };
            let mut words = self.words.as_ptr().add(block.rows * block_words(width, inputs));
            on_c!(EVEN, "tilezero", "tmm4", "tmm6", "");
            on_c!(EVEN, "tilezero", "tmm5", "tmm7", "");
            for step in 0..steps {
                let (a, stride) = if step < whole {
                    let a = here.add(step * DEPTH);
                    ([a, a.add(SIDE * inputs)], 2 * inputs)
                } else {
                    (self.copy_edges(&columns, step * DEPTH, edges), 2 * DEPTH)
                };
                let ahead = step + PREFETCH_STEPS.min(steps);
                let from = if ahead < steps {
                    here.wrapping_add(ahead * DEPTH)
                } else {
                    next.wrapping_add((ahead - steps) * DEPTH)
                };
                let prefetched = Prefetched { from, inputs, enabled: block.prefetches };
                multiply_step::<EVEN>(a, stride, words, width, prefetched);
                words = words.add(PARTS * DEPTH / 2 * width);
                if let Some(previous) = previous {
                    if step == STORE_STEP.min(steps - 1) {
                        if EVEN { store_c::<false>(c) } else { store_c::<true>(c) }
                    }
                    if step == READ_STEP.min(steps - 1) {
                        self.write(l, c, previous);
                    }
                }
            }
        }
    }

    /// Copies two A tiles from input `from` on; zeros past the matrix's edges.
    #[inline(never)]
    fn copy_edges(&self, columns: &Range<usize>, from: usize, edges: &mut [EdgeTile; 2]) -> [*const bf16; 2] {
        let depth = (self.inputs - from).min(DEPTH);
        for (p, edge) in edges.iter_mut().enumerate() {
            edge.0.fill(bf16::ZERO);
            for (column, edge) in (columns.start + p * SIDE..columns.end).zip(edge.0.chunks_exact_mut(DEPTH)) {
                edge[..depth].copy_from_slice(&self.w[column * self.inputs + from..][..depth]);
            }
        }
        edges.each_ref().map(|edge| edge.0.as_ptr())
    }

    /// Writes a block's C tiles, transposed, to `y`.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn write(&mut self, l: Avx512Lanes, c: &CTiles, block: Block) {
        let (rows, columns) = (self.y.rows(), self.y.range());
        for (outputs, start) in c.0.iter().zip((block.column..columns.end).step_by(SIDE)) {
            // SAFETY: the caller entered the features; a row of a C tile is a vector.
            let outputs = unsafe {
                let mut vectors = [l.splat(0.0); SIDE];
                for (vector, output) in vectors.iter_mut().zip(outputs) {
                    *vector = l.load(output.as_ptr());
                }
                transpose(vectors)
            };
            let count = (columns.end - start).min(SIDE);
            for (row, outputs) in (block.rows * SIDE..rows).zip(outputs) {
                let y = &mut self.y.row_mut(row)[start - columns.start..][..count];
                // SAFETY: the caller entered the features; `y` has an element for every lane that is stored.
                unsafe { l.store_first(y.as_mut_ptr().cast(), outputs, count) };
            }
        }
    }
}
