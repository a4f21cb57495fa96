//! Operands of `tdpbssd` and `tdpbsud`, `C[m][n] += sum over i in 0..4 of A[m][4 p + i] * B[p][4 n + i]` for every `p`:
//! one product per scale, `DEPTH` = 16 or 32 inputs.
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
//! B holds a panel's unpacked weights, `DEPTH / 4` quads of 16 outputs, signed if the format has a zero point, else
//! unsigned. It is the packed order of [`crate::quant::layout`]:
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
//! A and B tiles are packed for a *K span* of 256 inputs at a time, scale after scale.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::quant::activations::Activations;
use crate::quant::layout::{QUAD_BYTES, q8_1, q8k};
use crate::quant::microkernel::block_words;
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::float::Floats;

/// Rows of an A tile.
pub(super) const ROWS: usize = 16;
/// Bytes of the packed A tiles: they stay in the L2 cache.
pub(super) const A_BYTES: usize = 256 << 10;

/// The activations of some rows and a range of blocks, packed for tile registers.
pub(super) struct PackedActivations {
    /// `(K spans, rows / 16, scales, 16, DEPTH)`: A tiles.
    pub a: ATiles,
    /// `(blocks, words, rows)`: the scale, then pairs of bsums or the scaled sum.
    pub bsums: [i32; 2 * A_BYTES / 32],
    /// Rows, rounded up to a multiple of 16. The padding is never stored.
    pub rows: usize,
    /// Blocks of the matrix.
    pub blocks: Range<usize>,
}

#[repr(C, align(64))]
pub(super) struct ATiles(pub [MaybeUninit<u8>; A_BYTES]);

impl PackedActivations {
    pub const EMPTY: Self = Self { a: ATiles([MaybeUninit::uninit(); A_BYTES]), bsums: [0; _], rows: 0, blocks: 0..0 };

    /// Packs the row blocks `pass` of `x` for `blocks`.
    #[inline(always)]
    pub fn pack<F: Format>(&mut self, x: &Activations<'_>, pass: Range<usize>, blocks: Range<usize>) {
        let all = x.row_blocks();
        let first_row = all.get(pass.start).first;
        let last = all.get(pass.end - 1);
        self.rows = (last.first + last.rows - first_row).next_multiple_of(ROWS);
        self.blocks = blocks.clone();
        for block_rows in pass.map(|b| all.get(b)) {
            for (i, b) in blocks.clone().enumerate() {
                let words = &x.words(block_rows, b)[..block_words::<F>() * block_rows.rows];
                for r in 0..block_rows.rows {
                    let row = block_rows.first - first_row + r;
                    for s in 0..scales::<F>() {
                        let words = &words[s * F::QUADS_PER_SCALE * block_rows.rows + r..];
                        let at = self.at::<F>(i, s, row / ROWS) + row % ROWS * depth::<F>();
                        let to = &mut self.a.0[at..at + depth::<F>()];
                        for (to, word) in to.as_chunks_mut().0.iter_mut().zip(words.iter().step_by(block_rows.rows)) {
                            *to = word.to_le_bytes().map(MaybeUninit::new);
                        }
                    }
                    for (n, from) in bsum_words::<F>().enumerate() {
                        self.bsums[(i * bsum_words::<F>().len() + n) * self.rows + row] =
                            words[from * block_rows.rows + r];
                    }
                }
            }
        }
    }

    /// The offset of the A tile of a block of the range, a scale of it, and 16 rows; those of a K span are contiguous.
    #[inline(always)]
    pub fn at<F: Format>(&self, block: usize, scale: usize, row_tile: usize) -> usize {
        let (n, i) = (block / span_blocks::<F>(), block % span_blocks::<F>());
        (n * self.rows + row_tile * ROWS) * K_SPAN + (i * scales::<F>() + scale) * ROWS * depth::<F>()
    }
}

/// Inputs of a K span, whose weights are unpacked together.
pub(super) const K_SPAN: usize = 256;

/// Blocks of a K span.
pub(super) const fn span_blocks<F: Format>() -> usize {
    K_SPAN / F::TYPE.block_len()
}

/// Inputs of a scale.
pub(super) const fn depth<F: Format>() -> usize {
    4 * F::QUADS_PER_SCALE
}

/// Scales of a block.
pub(super) const fn scales<F: Format>() -> usize {
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

/// The weights of a panel and a K span, unpacked, and their scales.
#[repr(C, align(64))]
pub(super) struct UnpackedWeights {
    /// B tiles: `(scales, QUADS_PER_SCALE, 64)`.
    pub b: [MaybeUninit<u8>; K_SPAN / 4 * QUAD_BYTES],
    /// Of a block of 256.
    pub scales: BlockScales<Avx512Lanes>,
    /// The scales and the mins of blocks of 32, block by block.
    pub d: [__m512; K_SPAN / 32],
    pub mins: [__m512; K_SPAN / 32],
}

impl UnpackedWeights {
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    pub unsafe fn new(l: Avx512Lanes) -> Self {
        // SAFETY: as the caller's.
        unsafe {
            let zeros = [l.splat(0.0); _];
            Self { b: [MaybeUninit::uninit(); _], scales: BlockScales::empty(l), d: zeros, mins: zeros }
        }
    }

    /// Unpacks block `i` of the K span.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; `block` is a packed block of format `F`, and `i` is below
    /// [`span_blocks`].
    #[inline(always)]
    pub unsafe fn unpack<F: Format>(&mut self, l: Avx512Lanes, block: *const u8, i: usize) {
        // SAFETY: the caller entered the features; `block` is a packed block of this format.
        unsafe {
            if F::TYPE.block_len() == K_SPAN {
                F::load_scales(l, block, 0, &mut self.scales);
            } else {
                let mut scales = BlockScales::empty(l);
                F::load_scales(l, block, 0, &mut scales);
                self.d[i] = scales.d[0];
                self.mins[i] = scales.dmin;
            }
            let to = self.b.as_mut_ptr().add(i * F::TYPE.block_len() / 4 * QUAD_BYTES);
            for s in 0..scales::<F>() {
                let cursor = F::cursor(l, block, 0, s);
                for g in 0..F::QUADS_PER_SCALE {
                    let mut bytes = F::quad(l, cursor, g);
                    // Signed if there is a zero point, else unsigned.
                    if let Some(zero_point) = F::ZERO_POINT {
                        bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8(zero_point as i8));
                    }
                    _mm512_store_si512(to.add((s * F::QUADS_PER_SCALE + g) * QUAD_BYTES).cast(), bytes);
                }
            }
        }
    }
}
