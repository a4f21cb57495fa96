//! Operands of `tdpbssd` and `tdpbsud`, `C[m][n] += sum over i in 0..4 of A[m][4 p + i] * B[p][4 n + i]` for every `p`,
//! of `DEPTH` inputs: 64 of a block of 256, or a block of 32.
//!
//! A holds 16 rows' quants, signed:
//!
//! ```text
//!            byte 0     1          DEPTH - 1
//! row  0      | x 0  | x 1  | ... | x DEPTH-1 |     i8, rows DEPTH bytes apart
//!   ...
//! row 15      | x 0  | x 1  | ... | x DEPTH-1 |
//! ```
//!
//! B holds bytes of a panel's weights, `DEPTH / 4` quads of 16 outputs. It is the packed order of
//! [`crate::quant::layout`]:
//!
//! ```text
//!                byte 0                     4                          60
//! quad 0          | output 0: w 0, 1, 2, 3 | output 1: w 0, 1, 2, 3 | ... | output 15: w 0, 1, 2, 3 |
//! quad 1          | output 0: w 4, 5, 6, 7 | ...
//!   ...
//! quad DEPTH/4-1  | ...
//! ```
//!
//! C holds dot products, 16 rows by 16 outputs, `i32`.
//!
//! A and B tiles are packed for a *span* of 256 inputs at a time; A tiles once per input, for all products with it.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::quant::activations::{Activations, Pass, SPAN, TILE_ROWS, tile};
use crate::quant::layout::PANEL_ROWS;
use crate::quant::unpack::Format;

/// Bytes of A tiles that are multiplied by one panel after the other: they stay in the L2 cache.
pub(super) const A_BYTES: usize = 512 << 10;

/// The row tiles of a pass, and some spans.
pub(super) struct Tiles<'a> {
    /// `(spans, row tiles, words)`.
    words: &'a [i32],
    /// Row tiles.
    pub count: usize,
    /// Blocks of the matrix.
    pub blocks: Range<usize>,
}

impl<'a> Tiles<'a> {
    pub fn new<F: Format>(x: &Activations<'a>, pass: &Pass, spans: Range<usize>) -> Self {
        let blocks = x.inputs() / F::TYPE.block_len();
        let blocks = spans.start * span_blocks::<F>()..blocks.min(spans.end * span_blocks::<F>());
        Self { words: x.tiles(pass, spans.start), count: pass.tiles, blocks }
    }

    /// The A tiles of a row tile and the span that begins with a block of the range: one after the other, and
    /// [`tile_bytes`] from those of the next row tile.
    ///
    /// # Safety
    /// There are such a block and such a row tile.
    #[inline(always)]
    pub unsafe fn a<F: Format>(&self, block: usize, row_tile: usize) -> *const u8 {
        // SAFETY: the caller's tiles are in `words`.
        unsafe { self.words.as_ptr().add(self.tile::<F>(block, row_tile)).cast() }
    }

    /// The words of a block of the range and a row tile: [`TILE_ROWS`] of each.
    ///
    /// # Safety
    /// There are such a block and such a row tile.
    #[inline(always)]
    pub unsafe fn sums<F: Format>(&self, block: usize, row_tile: usize) -> *const i32 {
        let words = if F::TYPE.block_len() == SPAN { tile::q8k::WORDS } else { tile::q8_1::WORDS };
        let sums = tile::SUMS + block % span_blocks::<F>() * words * TILE_ROWS;
        // SAFETY: the caller's tile is in `words`.
        unsafe { self.words.as_ptr().add(self.tile::<F>(block, row_tile) + sums) }
    }

    /// The first word of a row tile's span.
    #[inline(always)]
    fn tile<F: Format>(&self, block: usize, row_tile: usize) -> usize {
        (block / span_blocks::<F>() * self.count + row_tile) * (tile_bytes::<F>() / 4)
    }
}

/// Bytes from a row tile's span to that of the next row tile.
pub(super) const fn tile_bytes<F: Format>() -> usize {
    4 * tile::words(F::TYPE.activation_type())
}

/// A stored C tile: `(16 rows, 16 outputs)`.
#[repr(C, align(64))]
pub(super) struct CTile(pub [MaybeUninit<i32>; TILE_ROWS * PANEL_ROWS]);

impl CTile {
    pub const EMPTY: Self = Self([MaybeUninit::uninit(); _]);
}

/// Blocks of a span.
pub(super) const fn span_blocks<F: Format>() -> usize {
    SPAN / F::TYPE.block_len()
}

/// Inputs of a tile product.
pub(super) const fn depth<F: Format>() -> usize {
    if F::TYPE.block_len() == 256 { 64 } else { 4 * F::QUADS_PER_SCALE }
}

/// Tile products over a block.
pub(super) const fn products<F: Format>() -> usize {
    F::TYPE.block_len() / depth::<F>()
}
