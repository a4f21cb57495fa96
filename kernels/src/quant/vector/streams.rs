//! Panels read side by side, weights unpacked in registers.

use std::marker::PhantomData;

use super::rows::{Results, align_frame, with_rows};
use crate::isa::{Zen, zen};
use crate::quant::activations::{Activations, RowBlock};
use crate::quant::layout::{PANEL_ROWS, ROW_BLOCK, STREAMS};
use crate::quant::microkernel::{add_block, add_short_block, block_words};
use crate::quant::packed_matrix::{PackedBlock, PackedMatrix, Panel, tail_block};
use crate::quant::source::{PackedSource, prefetched_bytes};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::bytes::{ByteLanes, PanelOp};

/// Inputs of one of several streams that are multiplied before the next stream's: those of the longest block.
const STREAM_INPUTS: usize = 256;

/// Prefetch distance in bytes of each of `streams`. Several are prefetched into the L1 cache, from
/// less than a 4 KiB page ahead: lines a multiple of a page apart share a set. One goes to the L2
/// cache, where the distance matters little.
const fn prefetch_distance(streams: usize) -> usize {
    if streams == 1 { 16448 } else { 3584 }
}

/// Whether this processor reads a single stream of panels faster than several side by side, at up to
/// [`ByteLanes::SINGLE_STREAM_ROWS`] rows: on a Zen 4, by 20 %. On a Zen 3, four streams are 40 % faster, on a Xeon
/// 25 %, on a Zen 5 60 to 100 %.
pub(super) fn prefers_single_stream() -> bool {
    zen() == Some(Zen::Four)
}

/// Up to [`STREAMS`] panels times a row block, weights unpacked in registers: row `r` of panel `s`
/// at `s * ROW_BLOCK + r`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panels, and the row
/// block is `x`'s, of as many inputs.
#[inline(always)]
pub(super) unsafe fn streams<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panels: &[usize],
    rows: RowBlock,
    results: &mut Results,
) {
    let whole = weights.outputs() / PANEL_ROWS;
    if panels.iter().any(|panel| *panel < whole) {
        // Two parts if there are more rows than the registers allow: for odd numbers, both include the middle row.
        let parts = rows.rows.div_ceil(L::MAX_ROWS);
        with_rows!(L, rows.rows.div_ceil(parts), |R| {
            let results = results.first_chunk_mut().expect("rows of a pass");
            let format = PhantomData;
            // SAFETY: the caller is inside the features.
            unsafe {
                if const { R <= L::SINGLE_STREAM_ROWS } && parts * panels.len() == 1 {
                    l.call(Streams::<F, R, 1> { weights, x, panels, rows, parts, results, format });
                } else {
                    l.call(Streams::<F, R, STREAMS> { weights, x, panels, rows, parts, results, format });
                }
            }
        });
    }
    // Overwrites what `Streams` wrote for the partial panel.
    for (stream, _) in panels.iter().enumerate().filter(|(_, panel)| **panel == whole) {
        for lane in (0..PANEL_ROWS).step_by(L::LANES) {
            for (row, results) in results[stream * ROW_BLOCK..][..rows.rows].iter_mut().enumerate() {
                let op = Ragged::<F> { weights, x, lane, rows, row, results, format: PhantomData };
                // SAFETY: the caller is inside the features.
                unsafe { l.call(op) }
            }
        }
    }
}

/// The first block of each of `S` streams. Streams without a whole panel read another one, which is prefetched anyway;
/// [`streams`] replaces their results.
///
/// # Safety
/// `panels` is not empty, and the matrix has a whole panel.
#[inline(always)]
unsafe fn first_blocks<F: Format, const S: usize>(weights: &PackedMatrix<'_>, panels: &[usize]) -> [*const u8; S] {
    let panel_bytes = weights.blocks() * PANEL_ROWS * F::TYPE.packed_block_bytes();
    let last = weights.outputs() / PANEL_ROWS - 1;
    let mut blocks = [weights.bytes().as_ptr(); S];
    for (stream, block) in blocks.iter_mut().enumerate() {
        // SAFETY: the matrix has the whole panels up to `last`.
        *block = unsafe { block.add(panels[stream.min(panels.len() - 1)].min(last) * panel_bytes) };
    }
    blocks
}

/// Adds one block's products with `R` rows to `y`, weights unpacked in registers.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the source is a packed block of format `F`, and `x` points at
/// the first of `R` rows in its activation blocks, of a row block of `stride` rows.
#[inline(always)]
unsafe fn add_packed_block<L: ByteLanes, F: Format, const R: usize, const S: usize>(
    l: L,
    source: &PackedSource<F, R, S>,
    scales: &mut BlockScales<L>,
    x: *const i32,
    stride: usize,
    y: &mut [L::V; R],
) {
    // SAFETY: the caller entered the features; `source.block` is a packed block, and `x` has its words of `R` rows.
    unsafe {
        F::load_scales(l, source.block, source.lane, scales);
        if const { F::TYPE.block_len() < 256 } {
            add_short_block::<L, F, _, R>(l, source, (scales.d, scales.dmin), x, stride, y);
        } else {
            add_block::<L, F, _, R>(l, source, scales, x, stride, |r, sum, by| y[r] = l.fma(sum, by, y[r]));
        }
    }
}

/// Whether `R` rows at a time are always a whole row block: two parts of one have more rows each.
const fn is_whole<L: ByteLanes, const R: usize>() -> bool {
    L::MAX_ROWS == ROW_BLOCK || 2 * R <= L::MAX_ROWS
}

/// A row block, `R` rows at a time, times up to `S` panels that are read side by side,
/// [`STREAM_INPUTS`] inputs of each in turn; a single one from end to end.
struct Streams<'a, F, const R: usize, const S: usize> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    panels: &'a [usize],
    rows: RowBlock,
    /// Of `R` rows each, 1 or 2.
    parts: usize,
    results: &'a mut [[f32; PANEL_ROWS]; STREAMS * ROW_BLOCK],
    format: PhantomData<F>,
}

impl<F: Format, const R: usize, const S: usize> PanelOp for Streams<'_, F, R, S> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { weights, rows, results, .. } = self;
        let parts = if const { is_whole::<L, R>() } { 1 } else { self.parts };
        let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
        // A constant for few rows, whose loops have few instructions besides those for addresses.
        let stride = if const { is_whole::<L, R>() } { R } else { rows.rows };
        let block_words = block_words::<F>() * stride;
        let first_row = |part: usize| part * (rows.rows - R);
        // SAFETY: `call` entered the features; the panels and the row block have `weights.blocks()` blocks; a part's
        // rows are the row block's, and its sums are in the places of `R` rows from `part * L::MAX_ROWS` on.
        unsafe {
            let mut scales = BlockScales::empty(l);
            align_frame(l);
            let x = self.x.words(rows, 0).as_ptr();
            let streams = if const { S == 1 } { 1 } else { self.panels.len() };
            let mut blocks = first_blocks::<F, S>(weights, self.panels);
            // Every pass over a block prefetches an equal share for every stream, not all that its own stream needs
            // next: lines of several streams arrive sooner than as many lines of one.
            let share = prefetched_bytes::<L, F>(S) / parts;
            // A single stream has no other to turn to: its sums stay in registers.
            let inputs = if const { S == 1 } { weights.inputs() } else { STREAM_INPUTS };
            let step = (inputs / F::TYPE.block_len()).max(1);
            for done in (0..weights.blocks()).step_by(step) {
                let count = step.min(weights.blocks() - done);
                let mut ahead = const { prefetch_distance(S) };
                for stream in 0..streams {
                    for lane in (0..PANEL_ROWS).step_by(L::LANES) {
                        for part in 0..parts {
                            let sums = results[stream * ROW_BLOCK + part * L::MAX_ROWS..].first_chunk_mut();
                            let sums: &mut [[f32; PANEL_ROWS]; R] = sums.expect("rows of a row block");
                            let mut y = [l.splat(0.0); R];
                            if done > 0 {
                                for (y, sums) in y.iter_mut().zip(&*sums) {
                                    *y = l.load(sums.as_ptr().add(lane));
                                }
                            }
                            for b in 0..count {
                                let mut prefetched = blocks;
                                for block in &mut prefetched {
                                    *block = block.wrapping_add(ahead);
                                }
                                ahead += share;
                                let block = blocks[stream].add(b * block_bytes);
                                let source = PackedSource::<F, R, S> { block, lane, prefetched, format: PhantomData };
                                let x = x.add((done + b) * block_words + first_row(part));
                                add_packed_block(l, &source, &mut scales, x, stride, &mut y);
                            }
                            for (r, y) in y.into_iter().enumerate() {
                                l.store(sums[r].as_mut_ptr().add(lane), y);
                            }
                        }
                    }
                }
                for block in &mut blocks {
                    *block = block.wrapping_add(count * block_bytes);
                }
            }
            if parts > 1 && first_row(1) < L::MAX_ROWS {
                for stream in (0..streams).map(|stream| stream * ROW_BLOCK) {
                    results.copy_within(stream + L::MAX_ROWS..stream + L::MAX_ROWS + R, stream + first_row(1));
                }
            }
        }
    }
}

/// A row of a row block and `LANES` outputs of the partial panel.
struct Ragged<'a, F> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    lane: usize,
    rows: RowBlock,
    row: usize,
    results: &'a mut [f32; PANEL_ROWS],
    format: PhantomData<F>,
}

impl<F: Format> PanelOp for Ragged<'_, F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { weights, lane, rows, .. } = self;
        let Panel::Rows(bytes) = weights.panel(weights.outputs() / PANEL_ROWS) else { return };
        let mut tail = PackedBlock::new();
        // SAFETY: `call` entered the features; the panel and the row block have `weights.blocks()` blocks.
        unsafe {
            let mut scales = BlockScales::empty(l);
            let mut y = [l.splat(0.0)];
            let mut x = self.x.words(rows, 0).as_ptr().add(self.row);
            for b in 0..weights.blocks() {
                tail_block(F::TYPE, bytes, weights.row_bytes(), b, &mut tail);
                let block = tail.0.as_ptr();
                let source = PackedSource::<F, 1, 1> { block, lane, prefetched: [block], format: PhantomData };
                add_packed_block(l, &source, &mut scales, x, rows.rows, &mut y);
                x = x.add(block_words::<F>() * rows.rows);
            }
            l.store(self.results.as_mut_ptr().add(lane), y[0]);
        }
    }
}
