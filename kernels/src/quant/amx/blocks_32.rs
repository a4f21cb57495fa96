//! Blocks of 32: one tile product per block. Vector code applies the scale, so C is stored and read back per block.
//! Those stores are the bound: a store takes as long as a product, and the two do not overlap. Meanwhile, vector
//! code runs the epilogue of the previous products.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::operands::{CTile, Tiles, depth, span_blocks};
use super::panels::Results;
use super::prefetch::{OutputPrefetcher, Prefetcher};
#[cfg(test)]
use super::scalar;
use crate::quant::activations::{SPAN, TILE_ROWS, tile};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};
use crate::quant::packed_matrix::{PackedMatrix, packed_block};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::float::Floats;
use crate::simd::words::Words;

/// Blocks of a span.
const BLOCKS: usize = SPAN / 32;

/// The tile products of 16 rows with a panel's span.
#[derive(Clone, Copy)]
struct Batch {
    /// The panel, in the group.
    panel: usize,
    /// The 16 rows.
    row_tile: usize,
    /// The first block, in the range, and how many.
    first: usize,
    count: usize,
    /// Which of the two buffers has the weights.
    buffer: usize,
}

/// Adds the products of a range of blocks to the results of a group of panels.
///
/// Tile registers and vectors alternate: between the tile products of a batch, the epilogue of the previous batch runs.
/// Weights are unpacked into two buffers in turn, because the last epilogue of a span overlaps with the first
/// products of the next.
///
/// # Safety
/// The caller is inside a function with AVX-512's features, and the tile registers are configured as in
/// [`MatMul::eval`](super::matmul). The matrix has blocks of 32, the panels of `group` and the blocks of `x`. The results
/// of all rows of `x` are initialised, for as many panels.
#[inline(always)]
pub(super) unsafe fn add_blocks<F: Format>(
    l: Avx512Lanes,
    weights: &PackedMatrix<'_>,
    group: Range<usize>,
    x: &Tiles<'_>,
    mut ahead: OutputPrefetcher,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
    let row_tiles = x.count;
    let mut tail = MaybeUninit::uninit();
    let mut products = [const { [const { CTile::EMPTY }; BLOCKS] }; 2];
    // An empty batch precedes the first.
    let mut before = Batch { panel: 0, row_tile: 0, first: 0, count: 0, buffer: 1 };
    // SAFETY: the caller entered the features, configured the registers and initialised the results; the matrix has the
    // panels and the blocks.
    unsafe {
        let mut buffers = [UnpackedWeights::new(l), UnpackedWeights::new(l)];
        let mut epilogue = Epilogue { l, x, results };
        let mut y = [l.splat(0.0); TILE_ROWS];
        let (mut batches, mut spans) = (0, 0);
        for (panel, in_matrix) in group.enumerate() {
            for first in (0..x.blocks.len()).step_by(span_blocks::<F>()) {
                let count = span_blocks::<F>().min(x.blocks.len() - first);
                let buffer = spans % 2;
                spans += 1;
                let mut block = |i| packed_block::<F>(weights, in_matrix, x.blocks.start + first + i, &mut tail);
                // The same span of the next panel.
                let next = block(0).wrapping_add(weights.blocks() * block_bytes);
                let mut prefetcher = Prefetcher::new(next, count * block_bytes, count * (1 + row_tiles));
                for i in 0..count {
                    prefetcher.step();
                    buffers[buffer].unpack::<F>(l, block(i), i);
                }
                for row_tile in 0..row_tiles {
                    let batch = Batch { panel, row_tile, first, count, buffer };
                    let a = x.a::<F>(first, row_tile);
                    let [even, odd] = &mut products;
                    let (products, done) = if batches % 2 == 0 { (even, odd) } else { (odd, even) };
                    batches += 1;
                    epilogue.begin(before, &mut y);
                    for i in 0..count.max(before.count) {
                        if i < count {
                            prefetcher.step();
                            ahead.step();
                            let b = buffers[buffer].b.as_ptr().add(i * F::QUADS_PER_SCALE * QUAD_BYTES);
                            multiply::<F>(a.add(i * TILE_ROWS * depth::<F>()), b, &mut products[i]);
                        }
                        if i < before.count {
                            epilogue.add::<F>(before, &buffers[before.buffer], &done[i], i, &mut y);
                        }
                    }
                    epilogue.end(before, &y);
                    before = batch;
                }
            }
        }
        epilogue.begin(before, &mut y);
        for (i, product) in products[(batches + 1) % 2][..before.count].iter().enumerate() {
            epilogue.add::<F>(before, &buffers[before.buffer], product, i, &mut y);
        }
        epilogue.end(before, &y);
    }
}

/// The operations on stored C tiles, those of `microkernel.rs`; `y` are the results of the batch's rows.
struct Epilogue<'a> {
    l: Avx512Lanes,
    x: &'a Tiles<'a>,
    results: &'a mut Results,
}

impl Epilogue<'_> {
    fn results(&mut self, batch: Batch) -> &mut [[MaybeUninit<f32>; PANEL_ROWS]; TILE_ROWS] {
        &mut self.results[batch.panel].as_chunks_mut().0[batch.row_tile]
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features; the results of the batch's rows are initialised.
    #[inline(always)]
    unsafe fn begin(&mut self, batch: Batch, y: &mut [__m512; TILE_ROWS]) {
        let l = self.l;
        for (y, result) in y.iter_mut().zip(self.results(batch)) {
            // SAFETY: the caller entered the features; a row's result is a vector, initialised.
            *y = unsafe { l.load(result.as_ptr().cast()) };
        }
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is within `x`, has a
    /// block `i`, and `product` was stored.
    #[inline(always)]
    unsafe fn add<F: Format>(
        &self,
        batch: Batch,
        weights: &UnpackedWeights,
        product: &CTile,
        i: usize,
        y: &mut [__m512; TILE_ROWS],
    ) {
        let l = self.l;
        // SAFETY: the caller entered the features; the batch is within `x` and has block `i`; `product` is stored.
        unsafe {
            let d = *weights.d.get_unchecked(i);
            let of_rows = self.x.sums::<F>(batch.first + i, batch.row_tile);
            let float = |word: usize, r: usize| l.splat(f32::from_bits(*of_rows.add(word * TILE_ROWS + r) as u32));
            for (r, y) in y.iter_mut().enumerate() {
                let dot = _mm512_load_si512(product.0.as_ptr().add(r * PANEL_ROWS).cast());
                *y = l.fma(l.mul(l.to_float(dot), float(tile::q8_1::SCALE, r)), d, *y);
                if F::HAS_MIN {
                    *y = l.fma(*weights.mins.get_unchecked(i), float(tile::q8_1::SUM, r), *y);
                }
            }
        }
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn end(&mut self, batch: Batch, y: &[__m512; TILE_ROWS]) {
        let l = self.l;
        for (result, y) in self.results(batch).iter_mut().zip(y) {
            // SAFETY: the caller entered the features; a row's result is a vector.
            unsafe { l.store(result.as_mut_ptr().cast(), *y) };
        }
    }
}

/// The weights of a panel and a span, unpacked, and their scales.
#[repr(C, align(64))]
struct UnpackedWeights {
    /// B tiles: `(blocks, QUADS_PER_SCALE, 64)`, signed if the format has a zero point, else unsigned.
    b: [MaybeUninit<u8>; SPAN / 4 * QUAD_BYTES],
    /// The scales and the mins, block by block.
    d: [__m512; BLOCKS],
    mins: [__m512; BLOCKS],
}

impl UnpackedWeights {
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn new(l: Avx512Lanes) -> Self {
        // SAFETY: the caller entered the features.
        let zeros = unsafe { [l.splat(0.0); _] };
        Self { b: [MaybeUninit::uninit(); _], d: zeros, mins: zeros }
    }

    /// Unpacks block `i` of the span.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; `block` is a packed block of format `F`, and `i` is below
    /// [`BLOCKS`].
    #[inline(always)]
    unsafe fn unpack<F: Format>(&mut self, l: Avx512Lanes, block: *const u8, i: usize) {
        // SAFETY: the caller entered the features; `block` is a packed block of this format.
        unsafe {
            let mut scales = BlockScales::empty(l);
            F::load_scales(l, block, 0, &mut scales);
            self.d[i] = scales.d[0];
            self.mins[i] = scales.dmin;
            let to = self.b.as_mut_ptr().add(i * F::QUADS_PER_SCALE * QUAD_BYTES);
            let cursor = F::cursor(l, block, 0, 0);
            for g in 0..F::QUADS_PER_SCALE {
                let mut bytes = F::quad(l, cursor, g);
                if let Some(zero_point) = F::ZERO_POINT {
                    bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8(zero_point as i8));
                }
                _mm512_store_si512(to.add(g * QUAD_BYTES).cast(), bytes);
            }
        }
    }
}

/// `c = a * b` over the inputs of a block.
///
/// # Safety
/// The tile registers are configured as in [`MatMul::eval`](super::matmul) for `F`; `a` and `b` are
/// tiles of these shapes.
#[inline(always)]
unsafe fn multiply<F: Format>(a: *const u8, b: *const MaybeUninit<u8>, c: &mut CTile) {
    #[cfg(test)]
    if !crate::simd::amx::has_tiles() {
        c.0.fill(MaybeUninit::new(0));
        let bytes = if F::ZERO_POINT.is_some() { scalar::B::Signed } else { scalar::B::Unsigned };
        // SAFETY: the caller gives A and B tiles of this depth; `fill` initialised `c`.
        return unsafe { scalar::multiply(a, b, bytes, depth::<F>(), c) };
    }
    macro_rules! multiply {
        ($product:literal) => {
            asm!(
                "tilezero tmm4",
                "tileloadd tmm0, [{a} + {depth}*1]",
                "tileloadd tmm2, [{b} + {line}*1]",
                concat!($product, " tmm4, tmm0, tmm2"),
                "tilestored [{c} + {line}*1], tmm4",
                a = in(reg) a,
                b = in(reg) b,
                c = in(reg) &raw mut c.0,
                depth = in(reg) depth::<F>(),
                line = in(reg) QUAD_BYTES,
                out("tmm0") _,
                out("tmm2") _,
                out("tmm4") _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: `MatMul::eval` configured the registers for these shapes; `a`, `b` and `c` are tiles of them.
    // The registers that are written are declared.
    unsafe {
        if F::ZERO_POINT.is_some() {
            multiply!("tdpbssd");
        } else {
            multiply!("tdpbsud");
        }
    }
}
