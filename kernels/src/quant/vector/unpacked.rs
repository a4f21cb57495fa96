//! More rows than the registers hold, each block of a panel unpacked once.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::rows::{Results, align_frame, with_rows};
use crate::quant::activations::{Activations, RowBlock};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};
use crate::quant::microkernel::{add_block, add_short_block, block_words};
use crate::quant::packed_matrix::{PackedBlock, PackedMatrix, Panel, packed_block};
use crate::quant::source::{Prefetched, UnpackedSource, UnpackingSource, factors_at, unpacked_block_bytes};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::bytes::{ByteLanes, PanelOp};

/// Blocks that are unpacked together: one of 256 weights, or as many shorter ones.
const fn group_blocks<F: Format>() -> usize {
    256 / F::TYPE.block_len()
}

/// A panel times the row blocks of a pass, each block unpacked once; for a format.
pub(super) type MultiplyUnpacked<L> =
    unsafe fn(L, &PackedMatrix<'_>, &Activations<'_>, usize, Range<usize>, &mut Results);

/// [`MultiplyUnpacked`], in a separate function with the features.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panel and the format, and the row blocks are
/// `x`'s, of as many inputs.
pub(super) unsafe fn multiply_unpacked<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panel: usize,
    pass: Range<usize>,
    results: &mut Results,
) {
    // SAFETY: `call` enters the features, which the caller has.
    unsafe { l.call(UnpackedPanel::<F> { weights, x, panel, pass, results, format: PhantomData }) }
}

/// A panel times more rows than the registers hold, each block unpacked once.
struct UnpackedPanel<'a, F> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    panel: usize,
    pass: Range<usize>,
    results: &'a mut Results,
    format: PhantomData<F>,
}

impl<F: Format> PanelOp for UnpackedPanel<'_, F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { weights, x, panel, pass, results, .. } = self;
        let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
        // Uninitialised: zeroing both took 2 % of a prompt of experts with 512 inputs.
        let mut tail = MaybeUninit::<PackedBlock>::uninit();
        let mut unpacked = UnpackedBlocks(MaybeUninit::uninit());
        const { assert!(group_blocks::<F>() * unpacked_block_bytes::<L, F>() <= size_of::<UnpackedBlocks>()) };
        let memory = unpacked.0.as_mut_ptr().cast::<u8>();
        // SAFETY: the caller entered the features.
        let mut scales = unsafe { BlockScales::empty(l) };
        let parts = pass.clone().map(|b| x.row_blocks().get(b).rows.div_ceil(L::MAX_ROWS)).sum::<usize>();
        let passes = PANEL_ROWS / L::LANES * parts;
        for first in (0..weights.blocks()).step_by(group_blocks::<F>()) {
            let blocks = first..(first + group_blocks::<F>()).min(weights.blocks());
            for (nth, lane) in (0..PANEL_ROWS).step_by(L::LANES).enumerate() {
                // SAFETY: the caller entered the features; the panel and the row blocks have `weights.blocks()` blocks;
                // `memory` has space for a group.
                unsafe {
                    let block = packed_block::<F>(weights, panel, first, &mut tail);
                    if const { group_blocks::<F>() > 1 } {
                        unpack_short::<L, F>(l, weights, panel, blocks.clone(), &mut tail, lane, memory);
                    } else {
                        F::load_scales(l, block, lane, &mut scales);
                        let source = UnpackingSource { block, lane, to: memory, format: PhantomData };
                        l.call(Unpack::<F> { source });
                    }
                    // Prefetched while the parts of the rows are multiplied, one after the other.
                    let next = block.wrapping_add(blocks.len() * block_bytes);
                    let prefetched =
                        |part| Prefetched::part(next, group_blocks::<F>() * block_bytes, nth * parts + part, passes);
                    let group =
                        Group { from: memory, lane, scales: (&raw const scales).cast(), blocks: blocks.clone() };
                    add_rows::<L, F>(l, x, pass.clone(), group, prefetched, results);
                }
            }
        }
    }
}

/// Unpacks a group of blocks shorter than 256.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panel, the panel has the
/// blocks, and `to` has space for them.
#[inline(always)]
unsafe fn unpack_short<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    panel: usize,
    blocks: Range<usize>,
    tail: &mut MaybeUninit<PackedBlock>,
    lane: usize,
    to: *mut u8,
) {
    let together = if matches!(weights.panel(panel), Panel::Packed(_)) { blocks.len() } else { 1 };
    for b in blocks.clone().step_by(together) {
        // SAFETY: the caller entered the features; the panel has the blocks, and `to` space for them.
        unsafe {
            let block = packed_block::<F>(weights, panel, b, tail);
            let to = to.add((b - blocks.start) * const { unpacked_block_bytes::<L, F>() });
            let source = UnpackingSource { block, lane, to, format: PhantomData };
            l.call(UnpackShort::<F> { source, blocks: together });
        }
    }
}

/// A group of blocks of a panel, unpacked.
struct Group {
    from: *const u8,
    /// The first of the panel's rows that the lanes hold.
    lane: usize,
    /// A `BlockScales<L>` of a block of 256.
    scales: *const (),
    blocks: Range<usize>,
}

/// Adds a group's products for the row blocks of a pass; `prefetched` gives what each part of the rows prefetches.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the scales are those lanes', of the group's block;
/// the row blocks are `x`'s, and have the blocks.
#[inline(always)]
unsafe fn add_rows<L: ByteLanes, F: Format>(
    l: L,
    x: &Activations<'_>,
    pass: Range<usize>,
    group: Group,
    prefetched: impl Fn(usize) -> Prefetched,
    results: &mut Results,
) {
    let Group { from, lane, scales, blocks } = group;
    let (first, blocks) = (blocks.start, blocks.len());
    // SAFETY: the caller's row blocks are `x`'s and have the group's blocks.
    let words = |rows: RowBlock| unsafe { x.words(rows, 0).as_ptr().add(first * block_words::<F>() * rows.rows) };
    let (mut done, mut part) = (0, 0);
    for rows in pass.map(|b| x.row_blocks().get(b)) {
        let most = rows.rows.div_ceil(rows.rows.div_ceil(L::MAX_ROWS));
        for row in (0..rows.rows).step_by(most) {
            with_rows!(L, most.min(rows.rows - row), |R| {
                // Only instances that are needed: a row block has four rows at least.
                if const { R > 1 } {
                    let results = results[done + row..].first_chunk_mut().expect("rows of a pass");
                    let source = UnpackedSource { from, prefetched: prefetched(part) };
                    let (stride, format) = (rows.rows, PhantomData);
                    // SAFETY: the caller entered the features; `scales` are these lanes'; the row block has `row`.
                    unsafe {
                        let x = words(rows).add(row);
                        l.call(Unpacked::<F, R> { source, blocks, scales, x, stride, lane, results, format });
                    }
                    part += 1;
                } else {
                    unreachable!("a part of one row");
                }
            });
        }
        done += rows.rows;
    }
}

/// The factors of a block shorter than 256, after its quads: its scales and its min.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `block` is an unpacked block.
#[inline(always)]
unsafe fn store_factors<L: ByteLanes, F: Format>(l: L, scales: &BlockScales<L>, block: *mut u8) {
    // SAFETY: the caller entered the features; an unpacked block has space for its factors after the quads.
    unsafe {
        let to = block.add(factors_at::<L, F>()).cast::<f32>();
        for s in 0..F::SCALES {
            l.store(to.add(s * L::LANES), scales.d[s]);
        }
        if F::HAS_MIN {
            l.store(to.add(F::SCALES * L::LANES), scales.dmin);
        }
    }
}

/// What [`store_factors`] wrote.
///
/// # Safety
/// As its own.
#[inline(always)]
unsafe fn load_factors<L: ByteLanes, F: Format>(l: L, block: *const u8) -> ([L::V; 4], L::V) {
    // SAFETY: the caller entered the features; `store_factors` wrote the block's factors.
    unsafe {
        let from = block.add(factors_at::<L, F>()).cast::<f32>();
        let load = |s: usize| l.load(from.add(s.min(F::SCALES - 1) * L::LANES));
        let min = if F::HAS_MIN { l.load(from.add(F::SCALES * L::LANES)) } else { l.splat(0.0) };
        ([load(0), load(1), load(2), load(3)], min)
    }
}

/// A block of 256, to be unpacked.
struct Unpack<F> {
    source: UnpackingSource<F>,
}

impl<F: Format> PanelOp for Unpack<F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        // SAFETY: `UnpackedPanel` made this value with its own block and memory for it, and called with lanes that
        // entered the features. Of no rows, nothing is read.
        unsafe {
            let (scales, x) = (BlockScales::empty(l), self.source.to.cast());
            add_block::<L, F, _, 0>(l, &self.source, &scales, x, 0, |_, _, _| {});
        }
    }
}

/// Blocks shorter than 256, to be unpacked one after the other.
struct UnpackShort<F> {
    source: UnpackingSource<F>,
    blocks: usize,
}

impl<F: Format> PanelOp for UnpackShort<F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        // SAFETY: `UnpackedPanel` made this value with its own blocks and memory for them, and called with lanes that
        // entered the features.
        unsafe {
            let mut scales = BlockScales::empty(l);
            for b in 0..self.blocks {
                let block = self.source.block.add(b * PANEL_ROWS * F::TYPE.packed_block_bytes());
                let to = self.source.to.add(b * const { unpacked_block_bytes::<L, F>() });
                F::load_scales(l, block, self.source.lane, &mut scales);
                store_factors::<L, F>(l, &scales, to);
                let source = UnpackingSource { block, to, ..self.source };
                add_short_block::<L, F, _, 0>(l, &source, (scales.d, scales.dmin), to.cast(), 0, &mut []);
            }
        }
    }
}

/// `R` rows of a row block times a group of unpacked blocks, for `LANES` outputs.
struct Unpacked<'a, F, const R: usize> {
    source: UnpackedSource,
    blocks: usize,
    /// A `BlockScales<L>` of the lanes that evaluate this: [`PanelOp::eval`] chooses `L`, so the pointer is
    /// type-erased.
    scales: *const (),
    /// The first of the rows.
    x: *const i32,
    /// Rows of the row block.
    stride: usize,
    lane: usize,
    results: &'a mut [[f32; PANEL_ROWS]; R],
    format: PhantomData<F>,
}

impl<F: Format, const R: usize> Unpacked<'_, F, R> {
    /// A block of 256.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the scales are those lanes', of the source's block.
    #[inline(always)]
    unsafe fn add<L: ByteLanes>(self, l: L) {
        // SAFETY: the caller entered the features; `self.scales` points at these lanes' scales of the source's block.
        unsafe {
            let scales = &*self.scales.cast::<BlockScales<L>>();
            align_frame(l);
            let add = |r: usize, sum, by| {
                let result = self.results[r].as_mut_ptr().add(self.lane);
                l.store(result, l.fma(sum, by, l.load(result)));
            };
            add_block::<L, F, _, R>(l, &self.source, scales, self.x, self.stride, add);
        }
    }

    /// Blocks shorter than 256.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the source has the blocks, with their factors.
    #[inline(always)]
    unsafe fn add_short<L: ByteLanes>(self, l: L) {
        let stride = self.stride;
        // SAFETY: the caller entered the features; the source has `self.blocks` blocks, with their factors.
        unsafe {
            let mut y = [l.splat(0.0); R];
            for (y, result) in y.iter_mut().zip(&*self.results) {
                *y = l.load(result.as_ptr().add(self.lane));
            }
            align_frame(l);
            for b in 0..self.blocks {
                let source = self.source.block::<L, F>(b);
                let x = self.x.add(b * block_words::<F>() * stride);
                add_short_block::<L, F, _, R>(l, &source, load_factors::<L, F>(l, source.from), x, stride, &mut y);
            }
            for (y, result) in y.into_iter().zip(self.results) {
                l.store(result.as_mut_ptr().add(self.lane), y);
            }
        }
    }
}

impl<F: Format, const R: usize> PanelOp for Unpacked<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        // SAFETY: `UnpackedPanel` called this with its own lanes, blocks and scales, inside the lanes' features.
        unsafe {
            if const { F::TYPE.block_len() < 256 } {
                self.add_short(l);
            } else {
                self.add(l);
            }
        }
    }
}

/// Space for a group of unpacked blocks: the largest are eight with masks and factors.
#[repr(align(64))]
struct UnpackedBlocks(MaybeUninit<[u8; 8 * 18 * QUAD_BYTES]>);
