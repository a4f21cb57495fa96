//! More rows than the registers hold, each block of a panel unpacked once.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::rows::{Results, stride, with_rows};
use crate::quant::activations::{Activations, RowBlock};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};
use crate::quant::microkernel::{Prefetched, Source, UnpackedSource, UnpackingSource, add_block};
use crate::quant::packed_matrix::{PackedBlock, PackedMatrix, Panel, tail_block};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::bytes::{ByteLanes, PanelOp};
use crate::simd::opaque::opaque;

/// A panel times more rows than the registers hold, each block unpacked once.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panel, and the row blocks are `x`'s, of as many
/// inputs.
#[inline(always)]
pub(super) unsafe fn unpacked_panel<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panel: usize,
    pass: Range<usize>,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
    // Uninitialised: zeroing both took 2 % of a prompt of experts with 512 inputs.
    let mut tail = MaybeUninit::<PackedBlock>::uninit();
    let mut unpacked = UnpackedBlock(MaybeUninit::uninit());
    let memory = unpacked.0.as_mut_ptr().cast::<u8>();
    // SAFETY: as the caller's.
    let mut scales = unsafe { BlockScales::empty(l) };
    let parts = pass.clone().map(|b| x.row_blocks().get(b).rows.div_ceil(L::MAX_ROWS)).sum::<usize>();
    let passes = PANEL_ROWS / L::LANES * parts;
    for b in 0..weights.blocks() {
        // SAFETY: the caller entered the features; the panel and the row blocks have `weights.blocks()` blocks; an
        // `UnpackedBlock` has space for the 64 quads of the longest block.
        unsafe {
            let block = match weights.panel(panel) {
                Panel::Packed(panel) => panel.as_ptr().add(b * block_bytes),
                Panel::Rows(rows) => {
                    let tail = tail.write(PackedBlock::new());
                    tail_block(F::TYPE, rows, weights.row_bytes(), b, tail);
                    tail.0.as_ptr()
                }
            };
            for (nth, lane) in (0..PANEL_ROWS).step_by(L::LANES).enumerate() {
                F::load_scales(l, block, lane, &mut scales);
                let scales = (&raw const scales).cast();
                if F::SLOW_TO_UNPACK {
                    let prefetched = Prefetched { from: memory, step: 0 };
                    let source = UnpackingSource { block, lane, to: memory, prefetched, format: PhantomData };
                    let rows = x.row_blocks().get(pass.start);
                    let x = x.words(rows, b).as_ptr();
                    l.call(Unpacking::<F, 0> { source, rows: PartOfBlock { scales, x, lane, rows, results: &mut [] } });
                }
                let (mut done, mut part) = (0, 0);
                for rows in pass.clone().map(|b| x.row_blocks().get(b)) {
                    let x = x.words(rows, b).as_ptr();
                    let most = rows.rows.div_ceil(rows.rows.div_ceil(L::MAX_ROWS));
                    for first in (0..rows.rows).step_by(most) {
                        with_rows!(L, most.min(rows.rows - first), |R| {
                            let results = results[done + first..].first_chunk_mut().expect("rows of a pass");
                            let next = block.wrapping_add(block_bytes);
                            let prefetched = Prefetched::part(next, block_bytes, nth * parts + part, passes);
                            let source = UnpackingSource { block, lane, to: memory, prefetched, format: PhantomData };
                            let rows = PartOfBlock { scales, x: x.add(first), lane, rows, results };
                            add_part::<L, F, R>(l, part, source, rows);
                            part += 1;
                        });
                    }
                    done += rows.rows;
                }
            }
        }
    }
}

/// Part `part` of the rows. The first one leaves the block unpacked for the others, if it is not unpacked yet.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the scales are those lanes', of the source's block.
#[inline(always)]
unsafe fn add_part<L: ByteLanes, F: Format, const R: usize>(
    l: L,
    part: usize,
    source: UnpackingSource<F>,
    rows: PartOfBlock<'_, R>,
) {
    let unpacking = !F::SLOW_TO_UNPACK && part == 0;
    // Only instances that are needed: the first row block has five rows at least, the others four.
    if const { !F::SLOW_TO_UNPACK && R > 2 } && unpacking {
        // SAFETY: as the caller's.
        unsafe { l.call(Unpacking::<F, R> { source, rows }) }
    } else if const { R > 1 } && !unpacking {
        let source = UnpackedSource { from: source.to, prefetched: source.prefetched };
        // SAFETY: as the caller's.
        unsafe { l.call(Unpacked::<F, R> { source, rows, format: PhantomData }) }
    } else {
        unreachable!("part {part} of {R} rows")
    }
}

/// Rows `first..first + R` of a row block and `LANES` outputs, one block.
struct PartOfBlock<'a, const R: usize> {
    /// A `BlockScales<L>` of the lanes that evaluate this: [`PanelOp::eval`] chooses `L`, so the pointer is
    /// type-erased.
    scales: *const (),
    x: *const i32,
    lane: usize,
    rows: RowBlock,
    results: &'a mut [[f32; PANEL_ROWS]; R],
}

impl<const R: usize> PartOfBlock<'_, R> {
    /// # Safety
    /// The caller is inside a function with `L`'s features; the scales are those lanes', of the source's block.
    #[inline(always)]
    unsafe fn add<L: ByteLanes, F: Format, S: Source<L, F>>(self, l: L, source: &S) {
        let stride = stride::<L, R>(self.rows);
        // SAFETY: as the caller's.
        unsafe {
            let scales = &*self.scales.cast::<BlockScales<L>>();
            // A vector in memory: without one, the compiler does not align the frame, and spilled vectors straddle cache lines.
            let aligned = l.zero();
            opaque(&raw const aligned);
            let add = |r: usize, sum, by| {
                let result = self.results[r].as_mut_ptr().add(self.lane);
                l.store(result, l.fma(sum, by, l.load(result)));
            };
            add_block::<L, F, _, R>(l, source, scales, self.x, stride, add);
        }
    }
}

/// The first part, which leaves the block unpacked in memory; or no rows, for unpacking alone.
struct Unpacking<'a, F, const R: usize> {
    source: UnpackingSource<F>,
    rows: PartOfBlock<'a, R>,
}

impl<F: Format, const R: usize> PanelOp for Unpacking<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        // SAFETY: `unpacked_panel` made this value with the scales and the words of its own lanes and blocks, and called
        // with the same lanes, which entered the features.
        unsafe { self.rows.add::<L, F, _>(l, &self.source) }
    }
}

/// A further part.
struct Unpacked<'a, F, const R: usize> {
    source: UnpackedSource,
    rows: PartOfBlock<'a, R>,
    format: PhantomData<F>,
}

impl<F: Format, const R: usize> PanelOp for Unpacked<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        // SAFETY: as above.
        unsafe { self.rows.add::<L, F, _>(l, &self.source) }
    }
}

/// Unpacked weights of one block.
#[repr(align(64))]
struct UnpackedBlock(MaybeUninit<[u8; 64 * QUAD_BYTES]>);
