//! The scalar matmul: specification, fallback and oracle. The vector kernels give these bits exactly.
//!
//! Per block of 256, with `dot(s)` the integer product over group `s`, every `fma` rounding once:
//!
//! ```text
//! sum = 0;   for s in groups: sum = fma(dot(s), d * scale(s), sum)
//! if the format has minima:   sum = fma(total of minimum(s) * (sum of x over s), -dmin, sum)
//! y = fma(sum, d_x, y)
//! ```
//!
//! Per block of 32: `y = fma(dot * d_x, d, y)`, and with a minimum `m`, `y = fma(m, d_x * (sum of x), y)`.

use super::activations::{Tile, q8_1, q8k};
use super::block::Block;
use super::{ActivationType, Activations, PackedMatrix, WeightType, pack};
use crate::ColumnsMut;

/// One row's quants of one block.
struct Row<'a> {
    words: &'a [i32],
    tile: Tile,
    row: usize,
}

impl Row<'_> {
    fn word(&self, index: usize) -> i32 {
        self.words[index * self.tile.rows + self.row]
    }

    fn float(&self, index: usize) -> f32 {
        f32::from_bits(self.word(index) as u32)
    }

    fn quant(&self, i: usize) -> i32 {
        i32::from(self.word(i / 4).to_le_bytes()[i % 4] as i8)
    }
}

fn has_minima(weight_type: WeightType) -> bool {
    use WeightType::*;
    matches!(weight_type, Q4_1 | Q5_1 | Q2_K | Q4_K | Q5_K)
}

/// Adds one block's part to `y`.
fn add_block(weight_type: WeightType, block: &Block, x: &Row<'_>, y: f32) -> f32 {
    let dot = |s: usize| -> i32 {
        (s * block.group..(s + 1) * block.group).map(|i| i32::from(block.quants[i]) * x.quant(i)).sum()
    };
    match weight_type.activation_type() {
        ActivationType::Q8_K => {
            let groups = 256 / block.group;
            let sum = (0..groups).fold(0.0f32, |sum, s| (dot(s) as f32).mul_add(block.scales[s], sum));
            let sum = if has_minima(weight_type) {
                let of = |s: usize| -> i32 { (s * block.group..(s + 1) * block.group).map(|i| x.quant(i)).sum() };
                let total: i32 = (0..groups).map(|s| i32::from(block.minima[s]) * of(s)).sum();
                (total as f32).mul_add(-block.minimum, sum)
            } else {
                sum
            };
            sum.mul_add(x.float(q8k::SCALE), y)
        }
        ActivationType::Q8_1 => {
            let y = (dot(0) as f32 * x.float(q8_1::SCALE)).mul_add(block.scales[0], y);
            if has_minima(weight_type) { (-block.minimum).mul_add(x.float(q8_1::SUM), y) } else { y }
        }
    }
}

/// One output column, for every row: `set(row, value)`.
fn column(matrix: &PackedMatrix<'_>, x: &Activations<'_>, column: usize, mut set: impl FnMut(usize, f32)) {
    let weight_type = matrix.weight_type();
    let tiles = x.tiles();
    let mut bytes = [0; 210];
    let bytes = &mut bytes[..weight_type.block_bytes()];
    for tile in (0..tiles.count).map(|t| tiles.get(t)) {
        let mut y = [0.0; super::activations::TILE_ROWS];
        for b in 0..matrix.blocks() {
            pack::file_block(matrix, column, b, bytes);
            let block = Block::new(weight_type, bytes);
            for (row, y) in y[..tile.rows].iter_mut().enumerate() {
                *y = add_block(weight_type, &block, &Row { words: x.tile(tile, b), tile, row }, *y);
            }
        }
        y[..tile.rows].iter().enumerate().for_each(|(row, y)| set(tile.first + row, *y));
    }
}

pub(super) fn matmul(matrix: &PackedMatrix<'_>, x: &Activations<'_>, mut y: ColumnsMut<'_>) {
    let range = y.range();
    for j in range.clone() {
        column(matrix, x, j, |row, value| {
            y.row_mut(row)[j - range.start].write(value);
        });
    }
}

pub(super) fn dot_rows(matrix: &PackedMatrix<'_>, indices: &[u32], x: &Activations<'_>, out: &mut [f32]) {
    for (index, out) in indices.iter().zip(out) {
        column(matrix, x, *index as usize, |_, value| *out = value);
    }
}
