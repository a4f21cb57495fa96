//! The matmul in products of byte matrices, for more rows than a tile of vectors holds.
//!
//! A product is of one scale's inputs: the scales are floats, whose order is that of `reference.rs`, as the integers are. So
//! each product is stored and read again, and that is what bounds this: a store takes as long as a product, and the two do not
//! overlap. Vectors work meanwhile, on the products before.
//!
//! Blocks outside, panels inside: a part of the blocks is as long as the rows' left sides of it stay in the second-level
//! cache, and results wait in `y` from one part to the next.

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::activations::TILE_ROWS;
use super::format::{Format, GROUP_BYTES};
use super::lanes::ByteLanes;
use super::pack::{PANEL_ROWS, PackedBlock, Panel};
use super::sides::{LEFT_BYTES, Part, ROWS, Right, SPAN, brought, depth, scales, span};
use super::tile::{dispatch, store_panel, tail_block};
use super::{Activations, PackedMatrix, WeightType};
use crate::ColumnsMut;
use crate::isa::Amx;
use crate::lanes::{Avx512Lanes, Lanes, prefetch};
use crate::tile_registers::{TileOp, TileRegisters, TileShape};

/// Rows that share an unpacked block.
const CHUNK_ROWS: usize = 128;
/// Panels whose results are stored row by row. Rows often lie a multiple of 4 KiB apart, in one set of the first-level cache:
/// stored panel by panel they would wait for each other.
const GROUP: usize = 4;
/// Products that are made while the floats of as many before them are.
const BATCH: usize = 8;
/// Fewer rows are done sooner in vectors.
pub(super) const FEWEST: usize = 25;

/// As [`super::matmul`].
pub(super) fn matmul(isa: Amx, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    dispatch!(@types isa.run_tiles, weights.weight_type(), MatMul { weights, x, y });
}

struct MatMul<'a, F> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    y: ColumnsMut<'a>,
    format: PhantomData<F>,
}

impl<F: Format> TileOp for MatMul<'_, F> {
    #[inline(always)]
    fn eval(mut self, l: Avx512Lanes) {
        let tiles = self.x.tiles();
        let range = self.y.range();
        let panels = range.start / PANEL_ROWS..range.end.div_ceil(PANEL_ROWS);
        let left = TileShape { rows: ROWS, bytes: depth::<F>() };
        let right = TileShape { rows: F::SCALED, bytes: GROUP_BYTES };
        let product = TileShape { rows: ROWS, bytes: 4 * PANEL_ROWS };
        // SAFETY: `run_tiles` has the registers, and no operation runs inside another.
        let _registers = unsafe { TileRegisters::new([left, left, right, right, product, product, product, product]) };
        let mut part = Part::NONE;
        let mut results: Results = [[[0.0; PANEL_ROWS]; CHUNK_ROWS]; GROUP];
        let chunk_tiles = tiles.count.div_ceil(tiles.count.div_ceil(CHUNK_ROWS / TILE_ROWS));
        for first in (0..tiles.count).step_by(chunk_tiles) {
            let chunk = first..(first + chunk_tiles).min(tiles.count);
            let (first_row, last) = (tiles.get(first).first, tiles.get(chunk.end - 1));
            let rows = last.first + last.rows - first_row;
            let blocks = LEFT_BYTES / (rows.next_multiple_of(ROWS) * SPAN) * span::<F>();
            for block in (0..self.weights.blocks()).step_by(blocks) {
                part.set::<F>(self.x, chunk.clone(), block..(block + blocks).min(self.weights.blocks()));
                for group in panels.clone().step_by(GROUP).map(|first| first..(first + GROUP).min(panels.end)) {
                    for (panel, results) in group.clone().zip(&mut results) {
                        if block == 0 {
                            results[..part.rows].fill([0.0; PANEL_ROWS]);
                        } else {
                            // SAFETY: the part before stored these rows.
                            unsafe { load_panel(&mut self.y, panel, first_row, &mut results[..rows]) };
                        }
                    }
                    // SAFETY: `run_tiles` entered the features; the shapes were checked by `super::matmul`.
                    unsafe { add_part::<F>(l, self.weights, group.clone(), &part, &mut results) };
                    for row in 0..rows {
                        for (panel, results) in group.clone().zip(&results) {
                            store_panel(&mut self.y, panel, first_row + row, &results[row..row + 1]);
                        }
                    }
                }
            }
        }
    }
}

/// Results of a group of panels.
type Results = [[[f32; PANEL_ROWS]; CHUNK_ROWS]; GROUP];

/// Reads what [`store_panel`] wrote.
///
/// # Safety
/// [`store_panel`] has stored these rows.
#[inline(always)]
unsafe fn load_panel(y: &mut ColumnsMut<'_>, panel: usize, first_row: usize, results: &mut [[f32; PANEL_ROWS]]) {
    let range = y.range();
    let (start, stop) = ((panel * PANEL_ROWS).max(range.start), ((panel + 1) * PANEL_ROWS).min(range.end));
    for (row, result) in results.iter_mut().enumerate() {
        let y = &y.row_mut(first_row + row)[start - range.start..stop - range.start];
        // SAFETY: the caller has stored them.
        unsafe {
            if let Some(y) = y.first_chunk::<PANEL_ROWS>() {
                *result = std::mem::transmute_copy(y);
            } else {
                for (result, y) in result[start - panel * PANEL_ROWS..].iter_mut().zip(y) {
                    *result = y.assume_init();
                }
            }
        }
    }
}

/// A product: `(16 rows, 16 outputs)`.
#[repr(C, align(64))]
struct Product([MaybeUninit<i32>; ROWS * PANEL_ROWS]);

/// Up to eight products of sixteen rows, and where their floats belong.
#[derive(Clone, Copy)]
struct Batch {
    /// In the group.
    panel: usize,
    sixteen: usize,
    /// The span's first block, in the part.
    block: usize,
    /// The first scale in the span, and how many.
    scale: usize,
    count: usize,
    /// Which of two has the span's right side.
    right: usize,
}

/// Adds what the part's blocks give to the results of a group of panels.
///
/// Tile registers and vectors work side by side: while the products of a batch are made, the floats of the one before are.
/// A right side is there until its last floats are done, beside the first products of the span that follows: of two, the
/// other is unpacked meanwhile.
///
/// # Safety
/// The caller is inside a function with AVX-512's features, and the tile registers are configured as [`MatMul::eval`] does it.
/// The matrix has the panels of `group`, and `part` was set for blocks that it has.
#[inline(always)]
unsafe fn add_part<F: Format>(
    l: Avx512Lanes,
    weights: &PackedMatrix<'_>,
    group: Range<usize>,
    part: &Part,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.block_bytes();
    let sixteens = part.rows / ROWS;
    let mut tail = PackedBlock::new();
    let mut products = [const { [const { Product([MaybeUninit::uninit(); _]) }; BATCH] }; 2];
    // Nothing is before the first.
    let mut before = Batch { panel: 0, sixteen: 0, block: 0, scale: 0, count: 0, right: 1 };
    // SAFETY: as the caller's; the panels have these blocks, and the part was set for them.
    unsafe {
        let mut rights = [Right::new(l), Right::new(l)];
        let mut floats = Floats { l, part, results };
        let mut sums = [l.splat(0.0); ROWS];
        let (mut turn, mut spans) = (0, 0);
        for (p, panel) in group.enumerate() {
            for first in (0..part.blocks.len()).step_by(span::<F>()) {
                let blocks = span::<F>().min(part.blocks.len() - first);
                let right = spans % 2;
                spans += 1;
                let mut ahead = Ahead::NOTHING;
                for i in 0..blocks {
                    let b = part.blocks.start + first + i;
                    let block = match weights.panel(panel) {
                        Panel::Packed(panel) => panel.as_ptr().add(b * block_bytes),
                        Panel::Rows(rows) => {
                            tail_block(F::TYPE, rows, weights.row_bytes(), b, &mut tail);
                            tail.0.as_ptr()
                        }
                    };
                    if i == 0 {
                        // The same span of the next panel.
                        let from = block.wrapping_add(weights.blocks() * block_bytes);
                        ahead = Ahead::new(from, blocks * block_bytes, blocks * scales::<F>() * sixteens);
                    }
                    rights[right].unpack::<F>(l, block, i);
                }
                let count = blocks * scales::<F>();
                for sixteen in 0..sixteens {
                    for scale in (0..count).step_by(BATCH) {
                        let batch =
                            Batch { panel: p, sixteen, block: first, scale, count: BATCH.min(count - scale), right };
                        let left = part.quants.0[part.at::<F>(first, scale, sixteen)..].as_ptr();
                        let weights = rights[right].weights.as_ptr().add(scale * F::SCALED * GROUP_BYTES);
                        let [even, odd] = &mut products;
                        let (products, done) = if turn % 2 == 0 { (even, odd) } else { (odd, even) };
                        turn += 1;
                        let right_before = &rights[before.right];
                        floats.begin::<F>(before, &mut sums);
                        for s in 0..batch.count.max(before.count) {
                            if s < batch.count {
                                ahead.ask();
                                let left = left.add(s * ROWS * depth::<F>());
                                multiply::<F>(left, weights.add(s * F::SCALED * GROUP_BYTES), &mut products[s]);
                            }
                            if s < before.count {
                                floats.add::<F>(before, right_before, &done[s], s, &mut sums);
                            }
                        }
                        floats.end::<F>(before, right_before, &sums);
                        before = batch;
                    }
                }
            }
        }
        floats.begin::<F>(before, &mut sums);
        for (s, product) in products[(turn + 1) % 2][..before.count].iter().enumerate() {
            floats.add::<F>(before, &rights[before.right], product, s, &mut sums);
        }
        floats.end::<F>(before, &rights[before.right], &sums);
    }
}

/// Cache lines to be asked for, a few with each product.
struct Ahead {
    from: *const u8,
    end: *const u8,
    step: usize,
}

impl Ahead {
    const NOTHING: Self = Self { from: std::ptr::null(), end: std::ptr::null(), step: 0 };

    /// `bytes` from `from` on, over so many products.
    #[inline(always)]
    fn new(from: *const u8, bytes: usize, products: usize) -> Self {
        Self { from, end: from.wrapping_add(bytes), step: bytes.div_ceil(LINE * products) * LINE }
    }

    #[inline(always)]
    fn ask(&mut self) {
        if self.from < self.end {
            for line in (0..self.step).step_by(LINE) {
                prefetch(self.from.wrapping_add(line));
            }
            self.from = self.from.wrapping_add(self.step);
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows whose sums and totals the vector registers hold.
const HALF: usize = 8;

/// The operations on floats: `products.rs` has the same, of dot products in registers. `sums` are sixteen rows' of a block of
/// 256, or their results themselves.
struct Floats<'a> {
    l: Avx512Lanes,
    part: &'a Part,
    results: &'a mut Results,
}

impl Floats<'_> {
    /// What the rows of a batch bring to its block `i`, word by word for all rows.
    ///
    /// # Safety
    /// The batch and its block `i` are of the part.
    #[inline(always)]
    unsafe fn brought<F: Format>(&self, batch: Batch, i: usize) -> *const i32 {
        let at = (batch.block + i) * brought::<F>().len() * self.part.rows + batch.sixteen * ROWS;
        // SAFETY: as the caller's: a batch of the part.
        unsafe { self.part.brought.as_ptr().add(at) }
    }

    #[inline(always)]
    fn results(&mut self, batch: Batch) -> &mut [[f32; PANEL_ROWS]; ROWS] {
        &mut self.results[batch.panel].as_chunks_mut().0[batch.sixteen]
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    unsafe fn begin<F: Format>(&mut self, batch: Batch, sums: &mut [__m512; ROWS]) {
        let l = self.l;
        let results = self.results(batch);
        // SAFETY: as the caller's.
        unsafe {
            for (sum, result) in sums.iter_mut().zip(results) {
                if F::TYPE.block_len() == 32 {
                    *sum = l.load(result.as_ptr());
                } else if batch.scale == 0 {
                    *sum = l.splat(0.0);
                }
            }
        }
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is of the part, `s` one of its scales, and `product`
    /// was stored.
    #[inline(always)]
    unsafe fn add<F: Format>(
        &self,
        batch: Batch,
        right: &Right,
        product: &Product,
        s: usize,
        sums: &mut [__m512; ROWS],
    ) {
        let l = self.l;
        // SAFETY: as the caller's.
        unsafe {
            let dot = |r: usize| l.to_float(_mm512_load_si512(product.0.as_ptr().add(r * PANEL_ROWS).cast()));
            let scale = *right.header.scales.get_unchecked(batch.scale + s);
            if F::TYPE.block_len() == 256 {
                for (r, sum) in sums.iter_mut().enumerate() {
                    *sum = l.fma(dot(r), scale, *sum);
                }
                return;
            }
            let brought = self.brought::<F>(batch, s);
            let float = |word: usize, r: usize| l.splat(f32::from_bits(*brought.add(word * self.part.rows + r) as u32));
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = l.fma(l.mul(dot(r), float(0, r)), scale, *sum);
                if F::MINIMUM {
                    *sum = l.fma(*right.minimum.get_unchecked(s), float(1, r), *sum);
                }
            }
        }
    }

    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is of the part.
    #[inline(always)]
    unsafe fn end<F: Format>(&mut self, batch: Batch, right: &Right, sums: &[__m512; ROWS]) {
        let l = self.l;
        // SAFETY: as the caller's.
        unsafe {
            if F::TYPE.block_len() == 32 {
                for (result, sum) in self.results(batch).iter_mut().zip(sums) {
                    l.store(result.as_mut_ptr(), *sum);
                }
            } else if batch.scale + batch.count == scales::<F>() {
                self.end_half::<F, 0>(batch, right, sums);
                self.end_half::<F, HALF>(batch, right, sums);
            }
        }
    }

    /// A block's end, of the rows from `FIRST` on.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; the batch is of the part, and ends a block of 256.
    #[inline(always)]
    unsafe fn end_half<F: Format, const FIRST: usize>(&mut self, batch: Batch, right: &Right, sums: &[__m512; ROWS]) {
        let l = self.l;
        // SAFETY: as the caller's.
        unsafe {
            let brought = self.brought::<F>(batch, 0).add(FIRST);
            let mut totals = [l.zero(); HALF];
            for p in 0..F::PAIRS {
                l.add_pairs(&mut totals, right.header.minima[p], brought.add((1 + p) * self.part.rows));
            }
            let results = self.results(batch);
            for r in 0..HALF {
                let mut sum = sums[FIRST + r];
                if F::PAIRS > 0 {
                    sum = l.fma(l.to_float(totals[r]), right.header.minimum, sum);
                }
                let result = results[FIRST + r].as_mut_ptr();
                l.store(result, l.fma(sum, l.splat(f32::from_bits(*brought.add(r) as u32)), l.load(result)));
            }
        }
    }
}

/// `to[r][o] = sum_d left[r][d] * right[d][o]` over the inputs of a scale.
///
/// # Safety
/// The tile registers are configured as [`MatMul::eval`] does it for `F`; `left` has sixteen rows, and `right` the weights, of
/// the inputs of a scale.
#[inline(always)]
unsafe fn multiply<F: Format>(left: *const MaybeUninit<u8>, right: *const MaybeUninit<u8>, to: &mut Product) {
    macro_rules! multiply {
        ($product:literal) => {
            asm!(
                "tilezero tmm4",
                "tileloadd tmm0, [{left} + {depth}*1]",
                "tileloadd tmm2, [{right} + {line}*1]",
                concat!($product, " tmm4, tmm0, tmm2"),
                "tilestored [{to} + {line}*1], tmm4",
                left = in(reg) left,
                right = in(reg) right,
                to = in(reg) &raw mut to.0,
                depth = in(reg) depth::<F>(),
                line = in(reg) GROUP_BYTES,
                out("tmm0") _,
                out("tmm2") _,
                out("tmm4") _,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: `MatMul::eval` configured the registers for these shapes; the caller gives a left side of sixteen rows and the
    // right side of a scale. The registers that are written are declared.
    unsafe {
        if F::OFFSET.is_some() {
            multiply!("tdpbssd");
        } else {
            multiply!("tdpbsud");
        }
    }
}
