//! Rows as operands of tile registers: a *row tile* of 16 rows and a *span* of 256 inputs at a time.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::block::{Loops, q8_1_block, q8k_block};
use crate::quant::layout::{q8_1, q8k};
use crate::quant::weight_type::{ActivationType, WeightType};

/// Rows of a row tile.
pub(in crate::quant) const TILE_ROWS: usize = 16;
/// Inputs of a span, whose weights are unpacked together.
pub(in crate::quant) const SPAN: usize = 256;
/// Maximum rows of a pass, which share unpacked weights.
pub(in crate::quant) const PASS_ROWS: usize = 256;

/// Whether there are products in tile registers for the type: not for several activation blocks per block of weights, as
/// in NVFP4.
pub(in crate::quant) const fn has_tiles(weight_type: WeightType) -> bool {
    weight_type.block_len() == weight_type.activation_type().block_len()
}

/// Whether products in tile registers are faster than those in vector registers for this many rows.
pub(super) const fn tiles_are_faster(weight_type: WeightType, rows: usize) -> bool {
    let from = if weight_type.block_len() == SPAN { 13 } else { 33 };
    rows >= from && has_tiles(weight_type)
}

/// Word offsets in a row tile's span.
pub(in crate::quant) mod tile {
    use super::{ActivationType, SPAN, TILE_ROWS};

    /// Quants; then, for every block, words of [`TILE_ROWS`] rows.
    pub const SUMS: usize = SPAN * TILE_ROWS / 4;

    /// Indices of a block's words.
    pub mod q8k {
        pub const SCALE: usize = 0;
        pub const BSUMS_OF_32: usize = 1;
        pub const BSUMS_OF_16: usize = 5;
        pub const WORDS: usize = 13;
    }
    pub mod q8_1 {
        pub const SCALE: usize = 0;
        pub const SUM: usize = 1;
        pub const WORDS: usize = 2;
    }

    pub const fn words(of: ActivationType) -> usize {
        let words = match of {
            ActivationType::Q8_K => q8k::WORDS,
            ActivationType::Q8_1 => q8_1::WORDS,
        };
        SUMS + SPAN / of.block_len() * words * TILE_ROWS
    }
}

/// Rows that share unpacked weights.
#[derive(Clone, Copy)]
pub(in crate::quant) struct Pass {
    pub first_tile: usize,
    pub tiles: usize,
}

/// The division of rows into passes: as few as possible, with equally many row tiles except in the last.
pub(in crate::quant) struct Passes {
    next: usize,
    tiles: usize,
    of_pass: usize,
}

impl Passes {
    pub fn new(rows: usize) -> Self {
        let tiles = rows.div_ceil(TILE_ROWS);
        Self { next: 0, tiles, of_pass: tiles.div_ceil(rows.div_ceil(PASS_ROWS).max(1)) }
    }
}

impl Iterator for Passes {
    type Item = Pass;

    fn next(&mut self) -> Option<Pass> {
        let pass = Pass { first_tile: self.next, tiles: self.of_pass.min(self.tiles - self.next) };
        self.next += pass.tiles;
        (pass.tiles > 0).then_some(pass)
    }
}

/// Consecutive spans of row tiles of a pass, whose order is `(spans, row tiles)`.
pub(super) struct Part {
    pass: Pass,
    of_pass: Range<usize>,
}

/// All of so many rows, in the order of their words; at most `values` values in each part, but at least a row tile's
/// span.
pub(super) fn parts(rows: usize, inputs: usize, values: usize) -> impl Iterator<Item = Part> {
    let count = (values / (TILE_ROWS * SPAN)).max(1);
    Passes::new(rows).flat_map(move |pass| {
        let tiles = pass.tiles * inputs.div_ceil(SPAN);
        (0..tiles)
            .step_by(count)
            .map(move |first| Part { pass, of_pass: first..tiles.min(first.saturating_add(count)) })
    })
}

impl Part {
    /// The length of the part.
    pub fn words(&self, of: ActivationType) -> usize {
        self.of_pass.len() * tile::words(of)
    }

    /// Quantizes the part's values of `x`, `(rows, inputs)`. Rows and blocks that the last ones lack are zero.
    #[inline(always)]
    pub fn quantize(
        self,
        loops: impl Loops,
        of: ActivationType,
        x: &[f32],
        inputs: usize,
        words: &mut [MaybeUninit<i32>],
    ) {
        let rows = x.len() / inputs;
        for (tile, words) in self.of_pass.zip(words.chunks_exact_mut(tile::words(of))) {
            let (span, tile) = (tile / self.pass.tiles * SPAN, self.pass.first_tile + tile % self.pass.tiles);
            let (width, rows) = (SPAN.min(inputs - span), TILE_ROWS.min(rows - tile * TILE_ROWS));
            if (width, rows) != (SPAN, TILE_ROWS) {
                words.fill(MaybeUninit::new(0));
            }
            for row in 0..rows {
                let x = &x[(tile * TILE_ROWS + row) * inputs + span..][..width];
                for (i, x) in x.chunks_exact(of.block_len()).enumerate() {
                    match of {
                        ActivationType::Q8_K => write_q8k(loops, x, words, row),
                        ActivationType::Q8_1 => write_q8_1(loops, x, words, i, row),
                    }
                }
            }
        }
    }
}

/// Writes a row's block.
#[inline(always)]
fn write_q8k(loops: impl Loops, x: &[f32], words: &mut [MaybeUninit<i32>], row: usize) {
    let mut block = [0; q8k::WORDS];
    q8k_block(loops, x, &mut block);
    let (quants, sums) = words.split_at_mut(tile::SUMS);
    for (product, quants) in quants.chunks_exact_mut(TILE_ROWS * 16).enumerate() {
        write(&mut quants[16 * row..], &block[16 * product..16 * product + 16]);
    }
    let mut set = |word: usize, value: i32| _ = sums[word * TILE_ROWS + row].write(value);
    set(tile::q8k::SCALE, block[q8k::SCALE]);
    (0..4).for_each(|p| set(tile::q8k::BSUMS_OF_32 + p, block[q8k::BSUMS_OF_32 + p]));
    (0..8).for_each(|p| set(tile::q8k::BSUMS_OF_16 + p, block[q8k::BSUMS_OF_16 + p]));
}

/// Writes block `i` of a row.
#[inline(always)]
fn write_q8_1(loops: impl Loops, x: &[f32], words: &mut [MaybeUninit<i32>], i: usize, row: usize) {
    let mut block = [0; q8_1::WORDS];
    q8_1_block(loops, x, &mut block);
    let (quants, sums) = words.split_at_mut(tile::SUMS);
    write(&mut quants[(i * TILE_ROWS + row) * 8..], &block[..8]);
    let mut set = |word: usize, value: i32| _ = sums[(i * tile::q8_1::WORDS + word) * TILE_ROWS + row].write(value);
    set(tile::q8_1::SCALE, block[q8_1::SCALE]);
    set(tile::q8_1::SUM, block[q8_1::SUM]);
}

#[inline(always)]
fn write(to: &mut [MaybeUninit<i32>], words: &[i32]) {
    to.iter_mut().zip(words).for_each(|(to, word)| *to = MaybeUninit::new(*word));
}
