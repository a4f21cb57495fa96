//! The scalar product: specification, fallback and test oracle. The vector kernels give these bits exactly.
//!
//! Per block of 256, with `dot(s)` the integer dot product and `bsum(s)` the sum of `x` over sub-block `s`, every `fma`
//! rounding once, the sums over `s` in `i32`, at most 256 * 127 * 32 * 128 here (Q6_K). The vector kernels leave some
//! weights or scales shifted left, so their sums are at most 256 * 127 * 4 * 32 * 256 = 1065353216 (Q3_K), below 2^31 as
//! well:
//!
//! ```text
//! sum = (sum over s of scale(s) * dot(s)) * d
//! if the format has mins:  sum = fma(sum over s of min(s) * bsum(s), -dmin, sum)
//! y = fma(sum, d_x, y)
//! ```
//!
//! Blocks of 32 and 64, per scale: `y = fma(dot * d_x, d, y)`, and with a min `m`, `y = fma(m, d_x * bsum, y)`.

use crate::columns::ColumnsMut;
use crate::quant::activations::{Activations, RowBlock};
use crate::quant::ggml::Block;
use crate::quant::layout::{ROW_BLOCK, q8_1, q8k};
use crate::quant::packed_matrix::{PackedMatrix, block};
use crate::quant::weight_type::{ActivationType, WeightType};

/// One row's quants of one block of weights.
struct Row<'a> {
    words: &'a [i32],
    rows: RowBlock,
    row: usize,
}

impl<'a> Row<'a> {
    /// The same from activation block `n` on.
    fn block(&self, n: usize, block_words: usize) -> Row<'a> {
        Row { words: &self.words[n * block_words * self.rows.rows..], ..*self }
    }

    fn word(&self, index: usize) -> i32 {
        self.words[index * self.rows.rows + self.row]
    }

    fn float(&self, index: usize) -> f32 {
        f32::from_bits(self.word(index) as u32)
    }

    fn quant(&self, i: usize) -> i32 {
        i32::from(self.word(i / 4).to_le_bytes()[i % 4] as i8)
    }
}

fn has_mins(weight_type: WeightType) -> bool {
    use WeightType::*;
    matches!(weight_type, Q4_1 | Q5_1 | Q2_K | Q4_K | Q5_K)
}

/// Adds one block's product to `y`.
fn add_block(weight_type: WeightType, block: &Block, x: &Row<'_>, y: f32) -> f32 {
    let dot = |s: usize| -> i32 {
        (s * block.sub_block..(s + 1) * block.sub_block).map(|i| i32::from(block.quants[i]) * x.quant(i)).sum()
    };
    match weight_type.activation_type() {
        ActivationType::Q8_K => {
            let sub_blocks = 256 / block.sub_block;
            let total: i32 = (0..sub_blocks).map(|s| i32::from(block.scales[s]) * dot(s)).sum();
            let sum = total as f32 * block.d[0];
            let sum = if has_mins(weight_type) {
                let bsum =
                    |s: usize| -> i32 { (s * block.sub_block..(s + 1) * block.sub_block).map(|i| x.quant(i)).sum() };
                let total: i32 = (0..sub_blocks).map(|s| i32::from(block.mins[s]) * bsum(s)).sum();
                (total as f32).mul_add(-block.dmin, sum)
            } else {
                sum
            };
            sum.mul_add(x.float(q8k::SCALE), y)
        }
        ActivationType::Q8_1 => {
            let (mut y, per_block) = (y, 32 / block.sub_block);
            for s in 0..weight_type.block_len() / block.sub_block {
                let x = x.block(s / per_block, q8_1::WORDS);
                let quants = &block.quants[s * block.sub_block..][..block.sub_block];
                let first = s % per_block * block.sub_block;
                let dot: i32 = (first..).zip(quants).map(|(i, q)| i32::from(*q) * x.quant(i)).sum();
                y = (dot as f32 * x.float(q8_1::SCALE)).mul_add(block.d[s], y);
            }
            if has_mins(weight_type) { (-block.dmin).mul_add(x.float(q8_1::SUM), y) } else { y }
        }
    }
}

pub(super) fn matmul(matrix: &PackedMatrix<'_>, x: &Activations<'_>, mut y: ColumnsMut<'_>) {
    let (weight_type, columns) = (matrix.weight_type(), y.range());
    let row_blocks = x.row_blocks();
    let activation_blocks = weight_type.block_len() / weight_type.activation_type().block_len();
    for column in columns.clone() {
        for rows in (0..row_blocks.count).map(|b| row_blocks.get(b)) {
            let mut sums = [0.0; ROW_BLOCK];
            for b in 0..matrix.blocks() {
                let block = block(matrix, column, b);
                for (row, sum) in sums[..rows.rows].iter_mut().enumerate() {
                    let words = x.words(rows, b * activation_blocks);
                    *sum = add_block(weight_type, &block, &Row { words, rows, row }, *sum);
                }
            }
            for (row, sum) in sums[..rows.rows].iter().enumerate() {
                y.row_mut(rows.first + row)[column - columns.start].write(*sum);
            }
        }
    }
}
