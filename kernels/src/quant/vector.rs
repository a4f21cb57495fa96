//! The product over byte lanes: panels of 16 outputs times row blocks of up to 8 rows.
//!
//! A lane is an output, so nothing is reduced across lanes. One vector of weights (a quad of 16 outputs) is multiplied by
//! every row of the row block: one `vpdpbusd` with the row's four quants broadcast from memory, so unpacking is paid once
//! per row block. Integer sums are exact, and the float operations per output are those of `scalar.rs` in their order:
//! neither the row block, nor the column range, nor the instruction set changes a bit.
//!
//! Weights are unpacked in registers, once per row block, and several panels are read side by side. Where registers hold
//! half a row block only, several halves share blocks of 256 that are unpacked once into the first-level cache: by the
//! first half on its way, or before it.

use std::marker::PhantomData;
use std::ops::Range;

use crate::columns::ColumnsMut;
use crate::quant::activations::{Activations, RowBlock};
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES, ROW_BLOCK};
use crate::quant::microkernel::{
    PREFETCH_DISTANCE, PackedSource, Prefetched, STREAMS, Source, UnpackedSource, UnpackingSource, add_block,
    add_short_block, block_words, prefetched_bytes,
};
use crate::quant::output::store_panel;
use crate::quant::packed_matrix::{PackedBlock, PackedMatrix, Panel, tail_block};
use crate::quant::unpack::{BlockScales, Format, with_format};
use crate::simd::bytes::{ByteLanes, PanelOp};
use crate::simd::dispatch::VectorIsa;
use crate::simd::opaque::opaque;

/// Row blocks per pass over the weights: their sums take 4 KiB of stack, their quants of a block 24 KiB.
const PASS_BLOCKS: usize = 8;

/// Inputs of a panel that are multiplied before the next stream's: those of the longest block.
const STREAM_INPUTS: usize = 256;

/// Evaluates `$run` with the number of rows as the constant `R`, at most as many as the registers hold. A condition in `const`
/// keeps the other instances from being compiled.
macro_rules! with_rows {
    ($lanes:ident, $rows:expr, |$R:ident| $run:expr) => {
        if const { $lanes::MAX_ROWS == ROW_BLOCK } {
            with_rows!(@match $rows, $R, $run, 1 2 3 4 5 6 7, 8)
        } else {
            with_rows!(@match $rows, $R, $run, 1 2 3, 4)
        }
    };
    (@match $rows:expr, $R:ident, $run:expr, $($r:literal)*, $last:literal) => {
        match $rows {
            $($r => {
                const $R: usize = $r;
                $run
            })*
            _ => {
                const $R: usize = $last;
                $run
            }
        }
    };
}

/// As [`super::matmul`], of a matrix that has inputs.
pub(super) fn matmul(isa: VectorIsa, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    with_format!(weights.weight_type(), |F| isa.run_panels(MatMul::<F> { weights, x, y, format: PhantomData }));
}

/// As [`super::dot_rows`].
pub(super) fn dot_rows(
    isa: VectorIsa,
    weights: &PackedMatrix<'_>,
    indices: &[u32],
    x: &Activations<'_>,
    out: &mut [f32],
) {
    with_format!(weights.weight_type(), |F| {
        isa.run_panels(DotRows::<F> { weights, indices, x, out, format: PhantomData })
    });
}

struct MatMul<'a, F> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    y: ColumnsMut<'a>,
    format: PhantomData<F>,
}

struct DotRows<'a, F> {
    weights: &'a PackedMatrix<'a>,
    indices: &'a [u32],
    x: &'a Activations<'a>,
    out: &'a mut [f32],
    format: PhantomData<F>,
}

/// A panel's results for the row blocks of a pass.
type Results = [[f32; PANEL_ROWS]; PASS_BLOCKS * ROW_BLOCK];

impl<F: Format> PanelOp for MatMul<'_, F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(mut self, l: L) {
        let range = self.y.range();
        let (first, end) = (range.start / PANEL_ROWS, range.end.div_ceil(PANEL_ROWS));
        let mut results: Results = [[0.0; PANEL_ROWS]; _];
        let blocks = self.x.row_blocks();
        // Passes outside: a pass's activations stay in the second-level cache, and reading the weights again for the next
        // 64 rows costs little beside the arithmetic.
        for pass in (0..blocks.count).step_by(PASS_BLOCKS) {
            let pass = pass..(pass + PASS_BLOCKS).min(blocks.count);
            let (first_row, last) = (blocks.get(pass.start).first, blocks.get(pass.end - 1));
            let rows = last.first + last.rows - first_row;
            let from = F::UNPACKED_FROM;
            if const { L::MAX_ROWS < ROW_BLOCK && F::TYPE.block_len() == 256 } && self.x.rows() >= from {
                for panel in first..end {
                    results[..rows].fill([0.0; PANEL_ROWS]);
                    // SAFETY: `run_panels` entered the features; the shapes were checked by `super::matmul`.
                    unsafe { unpacked_panel::<L, F>(l, self.weights, self.x, panel, pass.clone(), &mut results) };
                    store_panel(&mut self.y, panel, first_row, &results[..rows]);
                }
                continue;
            }
            // Runs of panels side by side, then the fewer than `STREAMS` panels that are left.
            let run = (end - first) / STREAMS;
            for i in 0..run {
                let panels: [usize; STREAMS] = std::array::from_fn(|stream| first + stream * run + i);
                self.panels(l, &panels, pass.clone(), &mut results);
            }
            let left: [usize; STREAMS] = std::array::from_fn(|stream| first + run * STREAMS + stream);
            match (end - first) % STREAMS {
                0 => {}
                count => self.panels(l, &left[..count], pass, &mut results),
            }
        }
    }
}

impl<F: Format> MatMul<'_, F> {
    /// Up to [`STREAMS`] panels times the row blocks of a pass. Further row blocks find the panels in the second-level cache.
    #[inline(always)]
    fn panels<L: ByteLanes>(&mut self, l: L, panels: &[usize], pass: Range<usize>, results: &mut Results) {
        for rows in pass.map(|b| self.x.row_blocks().get(b)) {
            // SAFETY: `run_panels` entered the features; the shapes were checked by `super::matmul`.
            unsafe { streams::<L, F>(l, self.weights, self.x, panels, rows, results) };
            for (stream, panel) in panels.iter().enumerate() {
                store_panel(&mut self.y, *panel, rows.first, &results[stream * ROW_BLOCK..][..rows.rows]);
            }
        }
    }
}

impl<F: Format> PanelOp for DotRows<'_, F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let mut results: Results = [[0.0; PANEL_ROWS]; _];
        let rows = self.x.row_blocks().get(0);
        let panel = |index: u32| index as usize / PANEL_ROWS;
        let (mut indices, mut out) = (self.indices, self.out);
        while !indices.is_empty() {
            // Indices side by side in a panel share it.
            let (mut panels, mut count, mut taken) = ([0; STREAMS], 0, 0);
            for same in indices.chunk_by(|a, b| panel(*a) == panel(*b)).take(STREAMS) {
                panels[count] = panel(same[0]);
                count += 1;
                taken += same.len();
            }
            // SAFETY: `run_panels` entered the features; the shapes were checked by `super::dot_rows`.
            unsafe { streams::<L, F>(l, self.weights, self.x, &panels[..count], rows, &mut results) };
            let (done, rest) = std::mem::take(&mut out).split_at_mut(taken);
            let mut stream = 0;
            for (index, out) in indices.iter().zip(done) {
                stream += usize::from(panel(*index) != panels[stream]);
                *out = results[stream * ROW_BLOCK][*index as usize % PANEL_ROWS];
            }
            (indices, out) = (&indices[taken..], rest);
        }
    }
}

/// The words from one index of an array to the next: the row block's rows, a constant if they are always `R`.
#[inline(always)]
fn stride<L: ByteLanes, const R: usize>(rows: RowBlock) -> usize {
    if L::MAX_ROWS == ROW_BLOCK { R } else { rows.rows }
}

/// Up to [`STREAMS`] panels times a row block, weights unpacked in registers: row `r` of panel `s` at `s * ROW_BLOCK + r`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panels, and the row block is `x`'s, of as many
/// inputs.
#[inline(always)]
unsafe fn streams<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panels: &[usize],
    rows: RowBlock,
    results: &mut Results,
) {
    let whole = weights.outputs() / PANEL_ROWS;
    if panels.iter().any(|panel| *panel < whole) {
        // Two parts if there are more rows than the registers allow: of odd numbers, both have the row in the middle.
        let parts = rows.rows.div_ceil(L::MAX_ROWS);
        with_rows!(L, rows.rows.div_ceil(parts), |R| {
            let results = results.first_chunk_mut().expect("rows of a pass");
            let op = Streams::<F, R> { weights, x, panels, rows, parts, results, format: PhantomData };
            // SAFETY: the caller is inside the features.
            unsafe { l.call(op) }
        });
    }
    // Over what `Streams` left in the place of the panel that is not whole.
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

/// A row block, `R` rows at a time, times panels that are read side by side, [`STREAM_INPUTS`] inputs of each in turn.
struct Streams<'a, F, const R: usize> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    panels: &'a [usize],
    rows: RowBlock,
    /// Of `R` rows each, 1 or 2.
    parts: usize,
    results: &'a mut [[f32; PANEL_ROWS]; STREAMS * ROW_BLOCK],
    format: PhantomData<F>,
}

impl<F: Format, const R: usize> PanelOp for Streams<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { weights, rows, results, .. } = self;
        let parts = if const { L::MAX_ROWS == ROW_BLOCK } { 1 } else { self.parts };
        let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
        let stride = stride::<L, R>(rows);
        let block_words = block_words::<F>() * stride;
        let panel_bytes = weights.blocks() * block_bytes;
        let first_row = |part: usize| part * (rows.rows - R);
        // SAFETY: `call` entered the features; the panels and the row block have `weights.blocks()` blocks; a part's rows are
        // the row block's, and its sums are in the places of `R` rows from `part * L::MAX_ROWS` on.
        unsafe {
            let mut scales = BlockScales::empty(l);
            let x = self.x.words(rows, 0).as_ptr();
            // Streams without a whole panel have another one: it is prefetched, and `streams` replaces its results.
            let (streams, last) = (self.panels.len(), weights.outputs() / PANEL_ROWS - 1);
            let mut blocks = [weights.bytes().as_ptr(); STREAMS];
            for (stream, block) in blocks.iter_mut().enumerate() {
                *block = block.add(self.panels[stream.min(streams - 1)].min(last) * panel_bytes);
            }
            // Every pass over a block prefetches a share of what every stream needs next, not all of its own: lines of several
            // streams arrive sooner than as many of one.
            let share = prefetched_bytes::<L, F>() / parts;
            let step = STREAM_INPUTS / F::TYPE.block_len();
            for done in (0..weights.blocks()).step_by(step) {
                let count = step.min(weights.blocks() - done);
                let mut ahead = PREFETCH_DISTANCE;
                for stream in 0..streams {
                    for lane in (0..PANEL_ROWS).step_by(L::LANES) {
                        for part in 0..parts {
                            let sums = results[stream * ROW_BLOCK + part * L::MAX_ROWS..].first_chunk_mut();
                            let sums: &mut [[f32; PANEL_ROWS]; R] = sums.expect("rows of a row block");
                            let mut y = [l.splat(0.0); R];
                            if done > 0 {
                                y = std::array::from_fn(|r| l.load(sums[r].as_ptr().add(lane)));
                            }
                            for b in 0..count {
                                let prefetched = blocks.map(|block| block.wrapping_add(ahead));
                                ahead += share;
                                let block = blocks[stream].add(b * block_bytes);
                                F::load_scales(l, block, lane, &mut scales);
                                let source = PackedSource::<F> { block, lane, prefetched, format: PhantomData };
                                let x = x.add((done + b) * block_words + first_row(part));
                                if F::TYPE.block_len() < 256 {
                                    add_short_block::<L, F, _, R>(l, &source, &scales, x, stride, &mut y);
                                } else {
                                    let add = |r: usize, sum, by| y[r] = l.fma(sum, by, y[r]);
                                    add_block::<L, F, _, R>(l, &source, &scales, x, stride, add);
                                }
                            }
                            for (r, y) in y.into_iter().enumerate() {
                                l.store(sums[r].as_mut_ptr().add(lane), y);
                            }
                        }
                    }
                }
                blocks = blocks.map(|block| block.wrapping_add(count * block_bytes));
            }
            if parts > 1 && first_row(1) < L::MAX_ROWS {
                for stream in (0..streams).map(|stream| stream * ROW_BLOCK) {
                    results.copy_within(stream + L::MAX_ROWS..stream + L::MAX_ROWS + R, stream + first_row(1));
                }
            }
        }
    }
}

/// A row of a row block and `LANES` outputs of the panel that is not whole.
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
                F::load_scales(l, block, lane, &mut scales);
                let source = PackedSource::<F> { block, lane, prefetched: [block; STREAMS], format: PhantomData };
                if F::TYPE.block_len() < 256 {
                    add_short_block::<L, F, _, 1>(l, &source, &scales, x, rows.rows, &mut y);
                } else {
                    add_block::<L, F, _, 1>(l, &source, &scales, x, rows.rows, |_, sum, by| {
                        y[0] = l.fma(sum, by, y[0])
                    });
                }
                x = x.add(block_words::<F>() * rows.rows);
            }
            l.store(self.results.as_mut_ptr().add(lane), y[0]);
        }
    }
}

/// A panel times more rows than the registers hold, each block unpacked once.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panel, and the row blocks are `x`'s, of as many
/// inputs.
#[inline(always)]
unsafe fn unpacked_panel<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panel: usize,
    pass: Range<usize>,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.packed_block_bytes();
    let mut tail = PackedBlock::new();
    let mut unpacked = UnpackedBlock([0; 64 * QUAD_BYTES]);
    // SAFETY: as the caller's.
    let mut scales = unsafe { BlockScales::empty(l) };
    let parts = pass.clone().map(|b| x.row_blocks().get(b).rows.div_ceil(L::MAX_ROWS)).sum::<usize>();
    let passes = PANEL_ROWS / L::LANES * parts;
    for b in 0..weights.blocks() {
        // SAFETY: the caller entered the features; the panel and the row blocks have `weights.blocks()` blocks; an
        // `UnpackedBlock` has room for the 64 quads of the longest block.
        unsafe {
            let block = match weights.panel(panel) {
                Panel::Packed(panel) => panel.as_ptr().add(b * block_bytes),
                Panel::Rows(rows) => {
                    tail_block(F::TYPE, rows, weights.row_bytes(), b, &mut tail);
                    tail.0.as_ptr()
                }
            };
            for (nth, lane) in (0..PANEL_ROWS).step_by(L::LANES).enumerate() {
                F::load_scales(l, block, lane, &mut scales);
                let scales = (&raw const scales).cast();
                let memory = unpacked.0.as_mut_ptr();
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
    // Instances that are needed only: the first row block has five rows at least, the others four.
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
    /// A `BlockScales<L>` of the lanes that evaluate this: [`PanelOp::eval`] chooses `L`, so the type cannot say it.
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
struct UnpackedBlock([u8; 64 * QUAD_BYTES]);
