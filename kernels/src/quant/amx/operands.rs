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
//! A and B tiles are packed for a *K span* of 256 inputs at a time.

use std::mem::MaybeUninit;
use std::ops::Range;

use crate::quant::activations::Activations;
use crate::quant::layout::{PANEL_ROWS, q8_1, q8k};
use crate::quant::microkernel::block_words;
use crate::quant::unpack::Format;

/// Rows of an A tile.
pub(super) const ROWS: usize = 16;
/// Rows that share unpacked weights.
pub(super) const PASS_ROWS: usize = 256;
/// Bytes of the packed A tiles: they stay in the L2 cache.
pub(super) const A_BYTES: usize = 512 << 10;

/// The activations of some rows and a range of blocks, packed for tile registers.
pub(super) struct PackedActivations {
    /// `(K spans, rows / 16, 256 / DEPTH, 16, DEPTH)`: A tiles.
    pub a: ATiles,
    /// `(blocks, words, rows)`: the scale, then pairs of bsums or the scaled sum.
    pub bsums: [MaybeUninit<i32>; 2 * A_BYTES / 32],
    /// Rows, rounded up to a multiple of 16. The padding's results are never stored.
    pub rows: usize,
    /// Blocks of the matrix.
    pub blocks: Range<usize>,
}

#[repr(C, align(64))]
pub(super) struct ATiles(pub [MaybeUninit<u8>; A_BYTES]);

impl PackedActivations {
    pub const EMPTY: Self =
        Self { a: ATiles([MaybeUninit::uninit(); A_BYTES]), bsums: [MaybeUninit::uninit(); _], rows: 0, blocks: 0..0 };

    /// Packs the row blocks `pass` of `x` for `blocks`.
    #[inline(always)]
    pub fn pack<F: Format>(&mut self, x: &Activations<'_>, pass: Range<usize>, blocks: Range<usize>) {
        let all = x.row_blocks();
        let first_row = all.get(pass.start).first;
        let last = all.get(pass.end - 1);
        let rows = last.first + last.rows - first_row;
        self.rows = rows.next_multiple_of(ROWS);
        self.blocks = blocks.clone();
        let words = bsum_words::<F>().len();
        for bsums in self.bsums[..blocks.len() * words * self.rows].chunks_exact_mut(self.rows) {
            bsums[rows..].fill(MaybeUninit::new(0));
        }
        for block_rows in pass.map(|b| all.get(b)) {
            for (i, b) in blocks.clone().enumerate() {
                let words = &x.words(block_rows, b)[..block_words::<F>() * block_rows.rows];
                for r in 0..block_rows.rows {
                    let row = block_rows.first - first_row + r;
                    for p in 0..products::<F>() {
                        let words = &words[p * depth::<F>() / 4 * block_rows.rows + r..];
                        let at = self.at::<F>(i, p, row / ROWS) + row % ROWS * depth::<F>();
                        let to = &mut self.a.0[at..at + depth::<F>()];
                        for (to, word) in to.as_chunks_mut().0.iter_mut().zip(words.iter().step_by(block_rows.rows)) {
                            *to = word.to_le_bytes().map(MaybeUninit::new);
                        }
                    }
                    for (n, from) in bsum_words::<F>().enumerate() {
                        let bsum = &mut self.bsums[(i * bsum_words::<F>().len() + n) * self.rows + row];
                        bsum.write(words[from * block_rows.rows + r]);
                    }
                }
            }
        }
    }

    /// The [`bsum_words`] of `row` and block `i` of the range: word by word, `rows` apart.
    ///
    /// # Safety
    /// The row is below `rows`, and `pack` was called with such a block.
    #[inline(always)]
    pub unsafe fn bsums<F: Format>(&self, i: usize, row: usize) -> *const i32 {
        // SAFETY: the caller's row is below `rows`, and `pack` packed block `i`: its words are in `bsums`.
        unsafe { self.bsums.as_ptr().add(i * bsum_words::<F>().len() * self.rows + row).cast() }
    }

    /// The offset of the A tile of a block of the range, one of its products, and 16 rows; those of
    /// a K span are contiguous.
    #[inline(always)]
    pub fn at<F: Format>(&self, block: usize, product: usize, row_tile: usize) -> usize {
        let (n, i) = (block / span_blocks::<F>(), block % span_blocks::<F>());
        (n * self.rows + row_tile * ROWS) * K_SPAN + (i * products::<F>() + product) * ROWS * depth::<F>()
    }
}

/// A stored C tile: `(16 rows, 16 outputs)`.
#[repr(C, align(64))]
pub(super) struct CTile(pub [MaybeUninit<i32>; ROWS * PANEL_ROWS]);

impl CTile {
    pub const EMPTY: Self = Self([MaybeUninit::uninit(); _]);
}

/// Inputs of a K span, whose weights are unpacked together.
pub(super) const K_SPAN: usize = 256;

/// Blocks of a K span.
pub(super) const fn span_blocks<F: Format>() -> usize {
    K_SPAN / F::TYPE.block_len()
}

/// Inputs of a tile product.
pub(super) const fn depth<F: Format>() -> usize {
    if F::TYPE.block_len() == 256 { 64 } else { 4 * F::QUADS_PER_SCALE }
}

/// Tile products over a block.
pub(super) const fn products<F: Format>() -> usize {
    F::TYPE.block_len() / depth::<F>()
}

/// The words of an activation block that the epilogue needs: the scale, then the bsums for the format's mins.
pub(super) fn bsum_words<F: Format>() -> impl ExactSizeIterator<Item = usize> {
    let (scale, others) = match (F::TYPE.block_len(), F::MIN_PAIRS) {
        (32, _) => (q8_1::SCALE, q8_1::SUM..q8_1::SUM + usize::from(F::HAS_MIN)),
        (_, 4) => (q8k::SCALE, q8k::BSUMS_OF_32..q8k::BSUMS_OF_32 + 4),
        (_, pairs) => (q8k::SCALE, q8k::BSUMS_OF_16..q8k::BSUMS_OF_16 + pairs),
    };
    (0..1 + others.len()).map(move |i| if i == 0 { scale } else { others.start + i - 1 })
}
