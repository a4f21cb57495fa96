//! Panels read side by side, weights unpacked in registers.

use std::marker::PhantomData;
use std::ops::Range;

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

/// Row `r` of panel `s` at `s * ROW_BLOCK + r`.
type StreamResults = [[f32; PANEL_ROWS]; STREAMS * ROW_BLOCK];

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

/// [`multiply`] for a format.
pub(super) type Multiply<L> = unsafe fn(L, StreamBlocks, RowBlockWords, &mut StreamResults);

/// Up to [`STREAMS`] panels times a row block, weights unpacked in registers: row `r` of panel `s`
/// at `s * ROW_BLOCK + r`.
///
/// # Safety
/// The caller is inside a function with `L`'s features, and `multiply` is of the matrix's format; the matrix has the
/// panels, in ascending order, and the row block is `x`'s, of as many inputs.
#[inline(always)]
pub(super) unsafe fn multiply_streams<L: ByteLanes>(
    l: L,
    multiply: Multiply<L>,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panels: &[usize],
    rows: RowBlock,
    results: &mut Results,
) {
    // The partial panel is the matrix's last.
    let whole = panels.len() - usize::from(panels.ends_with(&[weights.outputs() / PANEL_ROWS]));
    let of_row_block = RowBlockWords { x: x.words(rows, 0).as_ptr(), rows: rows.rows };
    if whole > 0 {
        let first = first_blocks(weights, &panels[..whole]);
        let blocks = StreamBlocks { first, streams: whole, range: 0..weights.blocks() };
        // SAFETY: the caller is inside the features; the whole panels and the row block have these blocks.
        unsafe { multiply(l, blocks, of_row_block, results.first_chunk_mut().expect("rows of a pass")) };
    }
    if whole < panels.len()
        && let Panel::Rows(bytes) = weights.panel(panels[whole])
    {
        let results: &mut StreamResults = results[whole * ROW_BLOCK..].first_chunk_mut().expect("rows of a pass");
        let mut tail = PackedBlock::new();
        for b in 0..weights.blocks() {
            tail_block(weights.weight_type(), bytes, weights.row_bytes(), b, &mut tail);
            let blocks = StreamBlocks { first: [tail.0.as_ptr(); STREAMS], streams: 1, range: b..b + 1 };
            // SAFETY: the caller is inside the features; `tail` is block `b`, and the row block has it.
            unsafe { multiply(l, blocks, of_row_block, results) };
        }
    }
    // The sums of a second part follow `L::MAX_ROWS`, although the part begins earlier.
    let parts = rows.rows.div_ceil(L::MAX_ROWS);
    let of_part = rows.rows.div_ceil(parts);
    let second = rows.rows - of_part;
    if parts > 1 && second < L::MAX_ROWS {
        for stream in (0..panels.len()).map(|stream| stream * ROW_BLOCK) {
            results.copy_within(stream + L::MAX_ROWS..stream + L::MAX_ROWS + of_part, stream + second);
        }
    }
}

/// The first block of each of up to [`STREAMS`] whole panels; then, as prefetches need an address, of the last one.
fn first_blocks(weights: &PackedMatrix<'_>, panels: &[usize]) -> [*const u8; STREAMS] {
    let panel_bytes = PANEL_ROWS * weights.row_bytes();
    let panel = |stream: usize| panels[stream.min(panels.len() - 1)];
    std::array::from_fn(|stream| weights.bytes()[panel(stream) * panel_bytes..].as_ptr())
}

/// Evaluates [`Streams`] for the number of rows and of streams.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the streams and the row block have the blocks, of format `F`.
pub(super) unsafe fn multiply<L: ByteLanes, F: Format>(
    l: L,
    blocks: StreamBlocks,
    of_row_block: RowBlockWords,
    results: &mut StreamResults,
) {
    // Two parts if there are more rows than the registers allow: for odd numbers, both include the middle row.
    let parts = of_row_block.rows.div_ceil(L::MAX_ROWS);
    with_rows!(L, of_row_block.rows.div_ceil(parts), |R| {
        let format = PhantomData;
        // SAFETY: `call` enters the features, which the caller has.
        unsafe {
            if const { R <= L::SINGLE_STREAM_ROWS } && parts * blocks.streams == 1 {
                l.call(Streams::<F, R, 1> { blocks, of_row_block, parts, results, format });
            } else {
                l.call(Streams::<F, R, STREAMS> { blocks, of_row_block, parts, results, format });
            }
        }
    });
}

/// Blocks of panels that are read side by side.
pub(super) struct StreamBlocks {
    /// The first block of each; past `streams`, what is prefetched.
    first: [*const u8; STREAMS],
    streams: usize,
    /// Which of a panel's blocks they are. The sums of those before are in the results.
    range: Range<usize>,
}

/// A row block's words, from its first activation block on.
#[derive(Clone, Copy)]
pub(super) struct RowBlockWords {
    x: *const i32,
    rows: usize,
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
/// [`STREAM_INPUTS`] inputs of each in turn; a single one from end to end. The sums of a second part begin at row
/// `L::MAX_ROWS`.
struct Streams<'a, F, const R: usize, const S: usize> {
    blocks: StreamBlocks,
    of_row_block: RowBlockWords,
    /// Of `R` rows each, 1 or 2.
    parts: usize,
    results: &'a mut StreamResults,
    format: PhantomData<F>,
}

impl<F: Format, const R: usize, const S: usize> PanelOp for Streams<'_, F, R, S> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { blocks: StreamBlocks { first, streams, range }, results, .. } = self;
        let RowBlockWords { x, rows } = self.of_row_block;
        let parts = if const { is_whole::<L, R>() } { 1 } else { self.parts };
        let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
        // A constant for few rows, whose loops have few instructions besides those for addresses.
        let stride = if const { is_whole::<L, R>() } { R } else { rows };
        let block_words = block_words::<F>() * stride;
        let first_row = |part: usize| part * (rows - R);
        // SAFETY: `call` entered the features; the streams and the row block have the blocks of the range; a part's
        // rows are the row block's, and its sums are in the places of `R` rows from `part * L::MAX_ROWS` on.
        unsafe {
            let mut scales = BlockScales::empty(l);
            align_frame(l);
            let streams = if const { S == 1 } { 1 } else { streams };
            let mut blocks: [*const u8; S] = *first.first_chunk().expect("at most `STREAMS`");
            // Every pass over a block prefetches an equal share for every stream, not all that its own stream needs
            // next: lines of several streams arrive sooner than as many lines of one.
            let share = prefetched_bytes::<L, F>(S) / parts;
            // A single stream has no other to turn to: its sums stay in registers.
            let step = if const { S == 1 } { range.len().max(1) } else { STREAM_INPUTS / F::TYPE.block_len() };
            for done in range.clone().step_by(step) {
                let count = step.min(range.end - done);
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
        }
    }
}
