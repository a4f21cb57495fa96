//! Rows in blocks of at most [`ROW_BLOCK`], interleaved.

use std::mem::MaybeUninit;

use super::block::{Loops, q8_1_block, q8k_block};
use crate::quant::layout::{ROW_BLOCK, q8_1, q8k};
use crate::quant::weight_type::ActivationType;

/// Rows `first..first + rows`, whose words are interleaved.
#[derive(Clone, Copy)]
pub(in crate::quant) struct RowBlock {
    pub first: usize,
    pub rows: usize,
}

/// The division of rows into row blocks: as few as possible, of sizes that differ by at most one, because a block of
/// one row costs nearly what a block of four does.
#[derive(Clone, Copy, Debug)]
pub(in crate::quant) struct RowBlocks {
    pub count: usize,
    size: usize,
    /// How many blocks, from the first on, have `size + 1` rows.
    larger: usize,
}

impl RowBlocks {
    pub fn new(rows: usize) -> Self {
        let count = rows.div_ceil(ROW_BLOCK);
        let of = count.max(1);
        Self { count, size: rows / of, larger: rows % of }
    }

    pub fn get(self, index: usize) -> RowBlock {
        let first = index * self.size + index.min(self.larger);
        RowBlock { first, rows: self.size + usize::from(index < self.larger) }
    }
}

/// Some activation blocks of a row block.
pub(super) struct Part {
    rows: RowBlock,
    block: usize,
    count: usize,
}

/// All blocks of so many rows, in the order of their words; at most `values` values in each, but at least one block.
pub(super) fn parts(of: ActivationType, rows: usize, inputs: usize, values: usize) -> impl Iterator<Item = Part> {
    let (row_blocks, blocks) = (RowBlocks::new(rows), inputs / of.block_len());
    (0..row_blocks.count).map(move |index| row_blocks.get(index)).flat_map(move |rows| {
        let count = (values / (rows.rows * of.block_len())).max(1);
        (0..blocks).step_by(count).map(move |block| Part { rows, block, count: count.min(blocks - block) })
    })
}

impl Part {
    /// The length of the part.
    pub fn words(&self, of: ActivationType) -> usize {
        self.rows.rows * self.count * of.block_words()
    }

    /// Quantizes the part's values of `x`, `(rows, inputs)`.
    #[inline(always)]
    pub fn quantize(
        self,
        loops: impl Loops,
        of: ActivationType,
        x: &[f32],
        inputs: usize,
        words: &mut [MaybeUninit<i32>],
    ) {
        let (block_len, block_words) = (of.block_len(), of.block_words());
        let RowBlock { first, rows } = self.rows;
        for row in 0..rows {
            let x = &x[(first + row) * inputs + self.block * block_len..][..self.count * block_len];
            for (x, words) in x.chunks_exact(block_len).zip(words.chunks_exact_mut(rows * block_words)) {
                match of {
                    ActivationType::Q8_K => {
                        let mut block = [0; q8k::WORDS];
                        q8k_block(loops, x, &mut block);
                        scatter(&block, words, rows, row);
                    }
                    ActivationType::Q8_1 => {
                        let mut block = [0; q8_1::WORDS];
                        q8_1_block(loops, x, &mut block);
                        scatter(&block, words, rows, row);
                    }
                }
            }
        }
    }
}

/// Interleaves one row's words with those of the row block's other rows.
#[inline(always)]
fn scatter<const N: usize>(block: &[i32; N], words: &mut [MaybeUninit<i32>], rows: usize, row: usize) {
    if rows == 1 {
        assert_eq!(words.len(), N);
        words.iter_mut().zip(block).for_each(|(to, word)| *to = MaybeUninit::new(*word));
    } else {
        for (words, word) in words.chunks_exact_mut(rows).zip(block) {
            words[row].write(*word);
        }
    }
}
