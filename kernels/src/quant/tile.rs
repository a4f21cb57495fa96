//! The matmul over byte lanes: panels of 16 outputs against tiles of up to 8 rows.
//!
//! Nothing is ever reduced across lanes: a lane is an output. One register of weights (four inputs of 16 outputs) meets
//! every row of the tile as one `vpdpbusd` with the row's four quants broadcast from memory, so unpacking is paid once per
//! tile. Integer sums are exact, and the float operations per output are those of `reference.rs` in their order; that is
//! why neither the tile, nor the column range, nor the instruction set changes a bit.
//!
//! Weights are unpacked in registers, again for every tile; a tile reads several panels side by side. Only where registers
//! hold but half a tile, several tiles of blocks of 256 unpack each block once into the first-level cache and run from there.

use super::activations::{TILE_ROWS, Tile};
use super::format::{Format, GROUP_BYTES, Header};
use super::lanes::{ByteLanes, PanelOp};
#[cfg(target_arch = "x86_64")]
use super::matrix;
use super::pack::{PANEL_ROWS, PackedBlock, Panel, interleave};
use super::products::{PREFETCH, Packed, STREAMS, Staged, add_block, block_words};
use super::{Activations, PackedMatrix, WeightType};
use crate::{ColumnsMut, Isa};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Rows that share an unpacked block: their sums take 4 KiB of stack, their quants of a block 24 KiB.
const CHUNK_TILES: usize = 8;

/// Inputs of a panel that are multiplied before the next stream's turn: those of the longest block.
const TURN: usize = 256;

/// Runs an operation for the matrix's type on the processor's lanes, or the reference where it has none.
macro_rules! dispatch {
    ($isa:ident, $weight_type:expr, $op:ident $fields:tt, else $reference:expr) => {
        match $isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(isa) => dispatch!(@types isa.run_panels, $weight_type, $op $fields),
            Isa::Scalar => $reference,
        }
    };
    (@types $isa:ident.$run:ident, $weight_type:expr, $op:ident $fields:tt) => {
        dispatch!(@each $isa.$run, $weight_type, $op $fields,
            Q4_0 Q40, Q4_1 Q41, Q5_0 Q50, Q5_1 Q51, Q8_0 Q80, Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K,
            IQ4_NL Iq4Nl)
    };
    (@each $isa:ident.$run:ident, $weight_type:expr, $op:ident $fields:tt, $($type:ident $format:ident),*) => {
        match $weight_type {
            $(WeightType::$type => $isa.$run(dispatch!(@op $op $fields $format)),)*
        }
    };
    (@op $op:ident { $($field:ident),* } $format:ident) => {
        $op { $($field,)* format: PhantomData::<$crate::quant::format::$format> }
    };
}

/// Calls `$run` with the constant `R` for parts of a tile's rows, `$first` being the part's first row: all rows at once, or
/// two nearly equal parts where the registers hold no more than half a tile's.
macro_rules! in_parts {
    ($lanes:ident, $rows:expr, |$first:ident, $R:ident| $run:expr) => {
        let rows = $rows;
        let part = if rows > $lanes::TILE_ROWS { rows.div_ceil(2) } else { rows };
        let mut $first = 0;
        while $first < rows {
            macro_rules! part {
                ($r:literal) => {{
                    const $R: usize = $r;
                    $run;
                    $first += $r;
                }};
            }
            match part.min(rows - $first) {
                1 => part!(1),
                2 => part!(2),
                3 => part!(3),
                5 if $lanes::TILE_ROWS == 8 => part!(5),
                6 if $lanes::TILE_ROWS == 8 => part!(6),
                7 if $lanes::TILE_ROWS == 8 => part!(7),
                8 if $lanes::TILE_ROWS == 8 => part!(8),
                _ => part!(4),
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) use dispatch;

pub(super) fn matmul(isa: Isa, weights: &PackedMatrix<'_>, x: &Activations<'_>, y: ColumnsMut<'_>) {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Amx(isa) = isa
        && x.rows() >= matrix::FEWEST
        && weights.blocks() > 0
    {
        return matrix::matmul(isa, weights, x, y);
    }
    dispatch!(isa, weights.weight_type(), MatMul { weights, x, y }, else super::reference::matmul(weights, x, y));
}

pub(super) fn dot_rows(isa: Isa, weights: &PackedMatrix<'_>, indices: &[u32], x: &Activations<'_>, out: &mut [f32]) {
    dispatch!(isa, weights.weight_type(), DotRows { weights, indices, x, out },
        else super::reference::dot_rows(weights, indices, x, out));
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

/// A panel's results for up to `CHUNK_TILES` tiles.
type Results = [[f32; PANEL_ROWS]; CHUNK_TILES * TILE_ROWS];

impl<F: Format> PanelOp for MatMul<'_, F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(mut self, l: L) {
        let range = self.y.range();
        let (first, end) = (range.start / PANEL_ROWS, range.end.div_ceil(PANEL_ROWS));
        let mut results: Results = [[0.0; PANEL_ROWS]; _];
        let tiles = self.x.tiles();
        // Chunks outside: their activations stay in the second-level cache, while reading the weights again for the next
        // 64 rows costs little beside computing with them.
        for chunk in (0..tiles.count).step_by(CHUNK_TILES) {
            let chunk = chunk..(chunk + CHUNK_TILES).min(tiles.count);
            let (first_row, last) = (tiles.get(chunk.start).first, tiles.get(chunk.end - 1));
            let rows = last.first + last.rows - first_row;
            let staged = tiles.count > 1 && L::TILE_ROWS < TILE_ROWS && F::TYPE.block_len() > 32;
            let streamed = if staged { first } else { self.whole_panels(first, end) };
            // SAFETY: as below.
            unsafe { self.stream(l, first..streamed, chunk.clone(), &mut results) };
            for panel in streamed..end {
                // SAFETY: `run_panels` entered the features; the shapes were checked by `super::matmul`.
                unsafe {
                    if staged {
                        results[..rows].fill([0.0; PANEL_ROWS]);
                        staged_tiles::<L, F>(l, self.weights, self.x, panel, chunk.clone(), &mut results);
                    } else {
                        for tile in chunk.clone().map(|t| tiles.get(t)) {
                            let results = &mut results[tile.first - first_row..];
                            fused_tile::<L, F>(l, self.weights, self.x, panel, tile, results);
                        }
                    }
                }
                store_panel(&mut self.y, panel, first_row, &results[..rows]);
            }
        }
    }
}

impl<F: Format> MatMul<'_, F> {
    /// The end of the panels from `first` on that `stream` can take: a multiple of the streams, all of whole panels.
    fn whole_panels(&self, first: usize, end: usize) -> usize {
        let whole = (self.weights.outputs / PANEL_ROWS).min(end);
        first + whole.saturating_sub(first) / STREAMS * STREAMS
    }

    /// The panels, cut into `STREAMS` runs that are read side by side, `TURN` inputs of each in turn. Further tiles find them
    /// in the second-level cache.
    ///
    /// # Safety
    /// The caller is inside a function with `L`'s features; the panels are whole ones of the matrix, and the tiles are `x`'s.
    #[inline(always)]
    unsafe fn stream<L: ByteLanes>(&mut self, l: L, panels: Range<usize>, tiles: Range<usize>, results: &mut Results) {
        let run = panels.len() / STREAMS;
        for panel in panels.start..panels.start + run {
            for tile in tiles.clone().map(|t| self.x.tiles().get(t)) {
                for lane in (0..PANEL_ROWS).step_by(L::LANES) {
                    in_parts!(L, tile.rows, |first, R| {
                        let (weights, x, results) = (self.weights, self.x, &mut results[..]);
                        let op =
                            Streams::<F, R> { weights, x, panel, run, lane, tile, first, results, format: PhantomData };
                        // SAFETY: the caller is inside the features.
                        unsafe { l.call(op) }
                    });
                }
                for stream in 0..STREAMS {
                    let results = &results[stream * TILE_ROWS..][..tile.rows];
                    store_panel(&mut self.y, panel + stream * run, tile.first, results);
                }
            }
        }
    }
}

/// Writes a panel's results for rows from `first_row` on.
#[inline(always)]
pub(super) fn store_panel(y: &mut ColumnsMut<'_>, panel: usize, first_row: usize, results: &[[f32; PANEL_ROWS]]) {
    let range = y.range();
    let (start, stop) = ((panel * PANEL_ROWS).max(range.start), ((panel + 1) * PANEL_ROWS).min(range.end));
    for (row, result) in results.iter().enumerate() {
        let y = &mut y.row_mut(first_row + row)[start - range.start..stop - range.start];
        // One store instead of a call.
        if let Some(y) = y.first_chunk_mut() {
            *y = result.map(MaybeUninit::new);
        } else {
            for (y, result) in y.iter_mut().zip(&result[start - panel * PANEL_ROWS..]) {
                y.write(*result);
            }
        }
    }
}

impl<F: Format> PanelOp for DotRows<'_, F> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let mut results: Results = [[0.0; PANEL_ROWS]; _];
        let (tile, mut done) = (self.x.tiles().get(0), None);
        for (index, out) in self.indices.iter().zip(self.out) {
            let (panel, lane) = (*index as usize / PANEL_ROWS, *index as usize % PANEL_ROWS);
            if done != Some(panel) {
                // SAFETY: `run_panels` entered the features; the shapes were checked by `super::dot_rows`.
                unsafe { fused_tile::<L, F>(l, self.weights, self.x, panel, tile, &mut results) };
                done = Some(panel);
            }
            *out = results[0][lane];
        }
    }
}

/// The stride between the words of one array: the tile's rows, which the compiler should know where they are all of `R`.
#[inline(always)]
fn stride<L: ByteLanes, const R: usize>(tile: Tile) -> usize {
    if L::TILE_ROWS == TILE_ROWS { R } else { tile.rows }
}

/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panel, and the tile is `x`'s, of as many inputs.
#[inline(always)]
unsafe fn fused_tile<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panel: usize,
    tile: Tile,
    results: &mut [[f32; PANEL_ROWS]],
) {
    for lane in (0..PANEL_ROWS).step_by(L::LANES) {
        in_parts!(L, tile.rows, |first, R| {
            let results = &mut results[first..first + R];
            let op = FusedTile::<F, R> { weights, x, panel, lane, tile, first, results, format: PhantomData };
            // SAFETY: the caller is inside the features.
            unsafe { l.call(op) }
        });
    }
}

/// Interleaves block `b` of the rows that do not fill a panel. The lanes without a row give results that nobody reads.
#[inline(never)]
pub(super) fn tail_block(weight_type: WeightType, rows: &[u8], row_bytes: usize, b: usize, out: &mut PackedBlock) {
    let bytes = weight_type.block_bytes();
    interleave(weight_type, |lane| rows.get(lane * row_bytes + b * bytes..)?.get(..bytes), &mut out.0);
}

/// Rows `first..first + R` of a tile and `LANES` columns, all blocks, weights unpacked in registers.
struct FusedTile<'a, F, const R: usize> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    panel: usize,
    lane: usize,
    tile: Tile,
    first: usize,
    results: &'a mut [[f32; PANEL_ROWS]],
    format: PhantomData<F>,
}

impl<F: Format, const R: usize> PanelOp for FusedTile<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { weights, lane, .. } = self;
        let block_bytes = PANEL_ROWS * F::TYPE.block_bytes();
        let stride = stride::<L, R>(self.tile);
        let block_words = block_words::<F>() * stride;
        let mut tail = PackedBlock::new();
        // SAFETY: `call` entered the features; the panel and the tile have `weights.blocks()` blocks.
        unsafe {
            let mut header = Header::empty(l);
            let mut y = [l.splat(0.0); R];
            let mut x = self.x.tile(self.tile, 0).as_ptr().add(self.first);
            for b in 0..weights.blocks() {
                let block = match weights.panel(self.panel) {
                    Panel::Packed(panel) => panel.as_ptr().add(b * block_bytes),
                    Panel::Rows(rows) => {
                        tail_block(F::TYPE, rows, weights.row_bytes(), b, &mut tail);
                        tail.0.as_ptr()
                    }
                };
                F::header(l, block, lane, &mut header);
                let ahead = std::array::from_fn(|n| block.wrapping_add(PREFETCH + n * block_bytes / STREAMS));
                let source = Packed::<F> { block, lane, ahead, format: PhantomData };
                add_block::<L, F, _, R>(l, &source, &header, x, stride, &mut y);
                x = x.add(block_words);
            }
            for (results, y) in self.results.iter_mut().zip(y) {
                l.store(results.as_mut_ptr().add(lane), y);
            }
        }
    }
}

/// [`FusedTile`] of panels `panel`, `panel + run`, .. at once, [`TURN`] inputs of each in turn.
struct Streams<'a, F, const R: usize> {
    weights: &'a PackedMatrix<'a>,
    x: &'a Activations<'a>,
    panel: usize,
    run: usize,
    lane: usize,
    tile: Tile,
    first: usize,
    results: &'a mut [[f32; PANEL_ROWS]], // stream `s`, row `r` at `s * TILE_ROWS + r`
    format: PhantomData<F>,
}

impl<F: Format, const R: usize> PanelOp for Streams<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let Self { weights, lane, .. } = self;
        let block_bytes = PANEL_ROWS * F::TYPE.block_bytes();
        let panel_bytes = weights.blocks() * block_bytes;
        let stride = stride::<L, R>(self.tile);
        let block_words = block_words::<F>() * stride;
        // SAFETY: `call` entered the features; the panels are whole and, as the tile, have `weights.blocks()` blocks.
        unsafe {
            let mut header = Header::empty(l);
            let mut y = [[l.splat(0.0); R]; STREAMS];
            let mut x = self.x.tile(self.tile, 0).as_ptr().add(self.first);
            let first = weights.bytes.as_ptr().add(self.panel * panel_bytes);
            let mut blocks: [_; STREAMS] = std::array::from_fn(|stream| first.add(stream * self.run * panel_bytes));
            for done in (0..weights.blocks()).step_by(TURN / F::TYPE.block_len()) {
                let turn = (TURN / F::TYPE.block_len()).min(weights.blocks() - done);
                for (stream, y) in y.iter_mut().enumerate() {
                    let (mut sums, mut x) = (*y, x);
                    for b in 0..turn {
                        // A turn asks for a quarter of what every stream will need, not for all that its own will: lines of
                        // several streams arrive sooner than as many of one.
                        let quarter = PREFETCH + (stream * turn + b) * block_bytes / STREAMS;
                        let ahead = blocks.map(|block| block.wrapping_add(quarter));
                        let block = blocks[stream].add(b * block_bytes);
                        F::header(l, block, lane, &mut header);
                        let source = Packed::<F> { block, lane, ahead, format: PhantomData };
                        add_block::<L, F, _, R>(l, &source, &header, x, stride, &mut sums);
                        x = x.add(block_words);
                    }
                    *y = sums;
                }
                x = x.add(turn * block_words);
                blocks = blocks.map(|block| block.add(turn * block_bytes));
            }
            for (stream, y) in y.into_iter().enumerate() {
                for (r, y) in y.into_iter().enumerate() {
                    let row = stream * TILE_ROWS + self.first + r;
                    l.store(self.results[row].as_mut_ptr().add(lane), y);
                }
            }
        }
    }
}

/// All rows of several tiles. Each block is unpacked once.
///
/// # Safety
/// The caller is inside a function with `L`'s features; the matrix has the panel, and the tiles are `x`'s, of as many inputs.
#[inline(always)]
unsafe fn staged_tiles<L: ByteLanes, F: Format>(
    l: L,
    weights: &PackedMatrix<'_>,
    x: &Activations<'_>,
    panel: usize,
    tiles: Range<usize>,
    results: &mut Results,
) {
    let block_bytes = PANEL_ROWS * F::TYPE.block_bytes();
    let groups = F::TYPE.block_len() / 4;
    let mut tail = PackedBlock::new();
    let mut stage = Stage([0; 64 * GROUP_BYTES]);
    // SAFETY: as the caller's.
    let mut header = unsafe { Header::empty(l) };
    for b in 0..weights.blocks() {
        // SAFETY: as the caller's: the features are entered, and the panel and the tiles have `weights.blocks()` blocks;
        // a stage has room for the 64 groups of the longest block.
        unsafe {
            let block = match weights.panel(panel) {
                Panel::Packed(panel) => panel.as_ptr().add(b * block_bytes),
                Panel::Rows(rows) => {
                    tail_block(F::TYPE, rows, weights.row_bytes(), b, &mut tail);
                    tail.0.as_ptr()
                }
            };
            for lane in (0..PANEL_ROWS).step_by(L::LANES) {
                F::header(l, block, lane, &mut header);
                for s in 0..groups / F::SCALED {
                    let cursor = F::cursor(l, block, lane, s);
                    for g in 0..F::SCALED {
                        let to = stage.0.as_mut_ptr().add((s * F::SCALED + g) * 4 * L::LANES);
                        l.store_words(to, F::weights(l, cursor, g));
                    }
                }
                let mut done = 0;
                for tile in tiles.clone().map(|t| x.tiles().get(t)) {
                    let x = x.tile(tile, b).as_ptr();
                    in_parts!(L, tile.rows, |first, R| {
                        let results = &mut results[done + first..done + first + R];
                        let (x, stage, header) = (x.add(first), &stage, (&raw const header).cast());
                        l.call(StagedTile::<F, R> { stage, header, x, lane, tile, results, format: PhantomData });
                    });
                    done += tile.rows;
                }
            }
        }
    }
}

/// Rows `first..first + R` of a tile and `LANES` columns, one unpacked block.
struct StagedTile<'a, F, const R: usize> {
    stage: &'a Stage,
    /// A `Header<L>` of the lanes that evaluate this: [`PanelOp::eval`] chooses `L`, so the type cannot say it.
    header: *const (),
    x: *const i32,
    lane: usize,
    tile: Tile,
    results: &'a mut [[f32; PANEL_ROWS]],
    format: PhantomData<F>,
}

impl<F: Format, const R: usize> PanelOp for StagedTile<'_, F, R> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        let stride = stride::<L, R>(self.tile);
        // SAFETY: `staged_tiles` made this value with the `header` and the words of its own lanes and blocks, and called
        // with the same lanes, which entered the features.
        unsafe {
            let header = &*self.header.cast::<Header<L>>();
            let source = Staged(self.stage.0.as_ptr());
            let mut y = [l.splat(0.0); R];
            for (y, results) in y.iter_mut().zip(self.results.iter()) {
                *y = l.load(results.as_ptr().add(self.lane));
            }
            add_block::<L, F, _, R>(l, &source, header, self.x, stride, &mut y);
            for (results, y) in self.results.iter_mut().zip(y) {
                l.store(results.as_mut_ptr().add(self.lane), y);
            }
        }
    }
}

/// Unpacked weights of one block.
#[repr(align(64))]
struct Stage([u8; 64 * GROUP_BYTES]);
