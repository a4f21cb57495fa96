//! The two sides of a product of byte matrices: sixteen rows' quants, and a panel's unpacked weights, of the inputs of one
//! scale.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use super::Activations;
use super::activations::{q8_1, q8k};
use super::format::{Format, GROUP_BYTES, Header};
use super::products::block_words;
use crate::lanes::{Avx512Lanes, Lanes};

/// Rows of a left side.
pub(super) const ROWS: usize = 16;
/// Bytes of the left sides of a part.
pub(super) const LEFT_BYTES: usize = 256 << 10;

/// What the rows of a chunk bring to a part of the blocks.
pub(super) struct Part {
    /// `(spans, rows / 16, scales, 16, inputs of a scale)`, as left sides take them.
    pub quants: Quants,
    /// `(blocks, words, rows)`: the scale, then pairs of sums or the scaled sum.
    pub brought: [i32; 2 * LEFT_BYTES / 32],
    /// Rows, with those that fill up the last sixteen.
    pub rows: usize,
    /// Of the matrix.
    pub blocks: Range<usize>,
}

#[repr(C, align(64))]
pub(super) struct Quants(pub [MaybeUninit<u8>; LEFT_BYTES]);

impl Part {
    pub const NONE: Self =
        Self { quants: Quants([MaybeUninit::uninit(); LEFT_BYTES]), brought: [0; _], rows: 0, blocks: 0..0 };

    /// Puts the rows of `tiles` in order, for `blocks`.
    #[inline(always)]
    pub fn set<F: Format>(&mut self, x: &Activations<'_>, tiles: Range<usize>, blocks: Range<usize>) {
        let all = x.tiles();
        let first_row = all.get(tiles.start).first;
        let last = all.get(tiles.end - 1);
        self.rows = (last.first + last.rows - first_row).next_multiple_of(ROWS);
        self.blocks = blocks.clone();
        for tile in tiles.map(|t| all.get(t)) {
            for (i, b) in blocks.clone().enumerate() {
                let words = &x.tile(tile, b)[..block_words::<F>() * tile.rows];
                for r in 0..tile.rows {
                    let row = tile.first - first_row + r;
                    for s in 0..scales::<F>() {
                        let words = &words[s * F::SCALED * tile.rows + r..];
                        let at = self.at::<F>(i, s, row / ROWS) + row % ROWS * depth::<F>();
                        let to = &mut self.quants.0[at..at + depth::<F>()];
                        for (to, word) in to.as_chunks_mut().0.iter_mut().zip(words.iter().step_by(tile.rows)) {
                            *to = word.to_le_bytes().map(MaybeUninit::new);
                        }
                    }
                    for (n, from) in brought::<F>().enumerate() {
                        self.brought[(i * brought::<F>().len() + n) * self.rows + row] = words[from * tile.rows + r];
                    }
                }
            }
        }
    }

    /// Where the left side of sixteen rows and a scale begins; those of a span follow each other.
    #[inline(always)]
    pub fn at<F: Format>(&self, block: usize, scale: usize, sixteen: usize) -> usize {
        let (n, i) = (block / span::<F>(), block % span::<F>());
        (n * self.rows + sixteen * ROWS) * SPAN + (i * scales::<F>() + scale) * ROWS * depth::<F>()
    }
}

/// Inputs that are unpacked together.
pub(super) const SPAN: usize = 256;

/// Their blocks.
pub(super) const fn span<F: Format>() -> usize {
    SPAN / F::TYPE.block_len()
}

/// Inputs of a scale.
pub(super) const fn depth<F: Format>() -> usize {
    4 * F::SCALED
}

/// Scales of a block.
pub(super) const fn scales<F: Format>() -> usize {
    F::TYPE.block_len() / depth::<F>()
}

/// The words of a block that a row brings besides its quants: the scale first.
pub(super) fn brought<F: Format>() -> impl ExactSizeIterator<Item = usize> {
    let (scale, others) = match (F::TYPE.block_len(), F::PAIRS) {
        (32, _) => (q8_1::SCALE, q8_1::SUM..q8_1::SUM + usize::from(F::MINIMUM)),
        (_, 4) => (q8k::SCALE, q8k::PAIRS_OF_32..q8k::PAIRS_OF_32 + 4),
        (_, pairs) => (q8k::SCALE, q8k::PAIRS_OF_16..q8k::PAIRS_OF_16 + pairs),
    };
    (0..1 + others.len()).map(move |i| if i == 0 { scale } else { others.start + i - 1 })
}

/// Unpacked weights of a span, as right sides take them, and what belongs to their scales.
#[repr(C, align(64))]
pub(super) struct Right {
    pub weights: [MaybeUninit<u8>; SPAN / 4 * GROUP_BYTES],
    /// Of blocks of 32: block `s`'s scale at `scales[s]`.
    pub header: Header<Avx512Lanes>,
    /// Of blocks of 32, block by block.
    pub minimum: [__m512; SPAN / 32],
}

impl Right {
    /// # Safety
    /// The caller is inside a function with AVX-512's features.
    #[inline(always)]
    pub unsafe fn new(l: Avx512Lanes) -> Self {
        // SAFETY: as the caller's.
        unsafe { Self { weights: [MaybeUninit::uninit(); _], header: Header::empty(l), minimum: [l.splat(0.0); _] } }
    }

    /// Unpacks block `i` of the span.
    ///
    /// # Safety
    /// The caller is inside a function with AVX-512's features; `block` is a packed block of format `F`, and `i` is below
    /// [`span`].
    #[inline(always)]
    pub unsafe fn unpack<F: Format>(&mut self, l: Avx512Lanes, block: *const u8, i: usize) {
        // SAFETY: as the caller's: the features, and a packed block of this format.
        unsafe {
            if F::TYPE.block_len() == SPAN {
                F::header(l, block, 0, &mut self.header);
            } else {
                let mut header = Header::empty(l);
                F::header(l, block, 0, &mut header);
                self.header.scales[i] = header.scales[0];
                self.minimum[i] = header.minimum;
            }
            let to = self.weights.as_mut_ptr().add(i * F::TYPE.block_len() / 4 * GROUP_BYTES);
            for s in 0..scales::<F>() {
                let cursor = F::cursor(l, block, 0, s);
                for g in 0..F::SCALED {
                    let mut bytes = F::weights(l, cursor, g);
                    // Weights with an offset become signed, the others are unsigned.
                    if let Some(shift) = F::OFFSET {
                        let offset = if F::TYPE.block_len() == 256 { 32 } else { 128u8 } >> shift;
                        bytes = _mm512_sub_epi8(bytes, _mm512_set1_epi8(offset as i8));
                    }
                    _mm512_store_si512(to.add((s * F::SCALED + g) * GROUP_BYTES).cast(), bytes);
                }
            }
        }
    }
}
