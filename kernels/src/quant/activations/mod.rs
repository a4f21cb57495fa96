//! Activations in 8-bit blocks, quantized once per input and format, and shared by every matrix that reads them.

mod block;
mod row_blocks;
mod tiles;

use std::mem::MaybeUninit;

use crate::isa::Isa;
use crate::quant::weight_type::{ActivationType, WeightType};
use crate::simd::bytes::{ByteLanes, PanelOp};
use block::{Loops, ScalarLoops, VectorLoops};
pub(super) use row_blocks::{RowBlock, RowBlocks};
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_imports))]
pub(super) use tiles::{PASS_ROWS, Pass, Passes, SPAN, TILE_ROWS, has_tiles, tile};

/// The order of quantized rows in memory; drawn in `layout.rs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ActivationLayout {
    /// Up to eight rows interleaved, for vectors and scalar code.
    RowBlocks,
    /// Operands of AMX's tile registers.
    Tiles,
}

/// What rows are quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ActivationFormat {
    /// The type of their blocks.
    pub blocks: ActivationType,
    /// The order of the blocks.
    pub layout: ActivationLayout,
}

impl ActivationFormat {
    /// The format with which [`matmul`](super::matmul) is fastest for so many rows.
    pub fn new(isa: Isa, weight_type: WeightType, rows: usize) -> Self {
        let layout = match isa.has_tiles() && tiles::tiles_are_faster(weight_type, rows) {
            true => ActivationLayout::Tiles,
            false => ActivationLayout::RowBlocks,
        };
        Self { blocks: weight_type.activation_type(), layout }
    }

    /// Words of scratch that [`Activations::quantize`] needs for `rows` rows of `inputs`; `None` if the rows are not
    /// whole blocks or the product overflows.
    pub fn scratch_len(self, rows: usize, inputs: usize) -> Option<usize> {
        if !inputs.is_multiple_of(self.blocks.block_len()) {
            return None;
        }
        let (units, words) = match self.layout {
            ActivationLayout::RowBlocks => ([inputs / self.blocks.block_len(), rows], self.blocks.block_words()),
            ActivationLayout::Tiles => ([inputs.div_ceil(SPAN), rows.div_ceil(TILE_ROWS)], tile::words(self.blocks)),
        };
        units[0].checked_mul(units[1])?.checked_mul(words)
    }
}

/// Quantized rows, in words that the caller owns.
#[derive(Clone, Copy, Debug)]
pub struct Activations<'a> {
    words: &'a [i32],
    format: ActivationFormat,
    rows: usize,
    inputs: usize,
    row_blocks: RowBlocks,
}

impl<'a> Activations<'a> {
    /// Quantizes `x`, `(rows, inputs)` row-major, into `scratch`. Rounds to nearest, ties to even: a row's result does
    /// not depend on the other rows nor, if the row is finite, on the ISA.
    ///
    /// # Panics
    /// If the rows are not whole blocks, or `scratch` is shorter than [`ActivationFormat::scratch_len`].
    pub fn quantize(
        isa: Isa,
        format: ActivationFormat,
        x: &[f32],
        inputs: usize,
        scratch: &'a mut [i32],
    ) -> Activations<'a> {
        let rows = x.len().checked_div(inputs).unwrap_or(0);
        let (words, count) = (scratch.as_mut_ptr().cast(), scratch.len());
        // SAFETY: the same memory, borrowed for as long; parts write initialised words only.
        let words = unsafe { std::slice::from_raw_parts_mut(words, count) };
        Self::parts(format, x, inputs, words, usize::MAX).for_each(|part| part.quantize(isa));
        let len = format.scratch_len(rows, inputs).expect("whole blocks, as `parts` checked");
        Self::from_words(format, &scratch[..len], rows, inputs)
    }

    /// Divides what [`Activations::quantize`] does: once every part is quantized, `scratch` is as after it. A part has
    /// at most `values` values, but at least one block of up to eight rows, or 256 inputs of 16 rows.
    ///
    /// # Panics
    /// As [`Activations::quantize`].
    pub fn parts<'s>(
        format: ActivationFormat,
        x: &'s [f32],
        inputs: usize,
        scratch: &'s mut [MaybeUninit<i32>],
        values: usize,
    ) -> impl Iterator<Item = ActivationsPart<'s>> {
        let rows = x.len().checked_div(inputs).unwrap_or(0);
        assert_eq!(x.len(), rows * inputs, "activations: x is not (rows, inputs)");
        let len = format.scratch_len(rows, inputs).expect("activations: rows are not whole blocks");
        assert!(len <= scratch.len(), "activations: scratch too short");
        let row_blocks = (format.layout == ActivationLayout::RowBlocks)
            .then(|| row_blocks::parts(format.blocks, rows, inputs, values).map(Place::RowBlock));
        let tiles =
            (format.layout == ActivationLayout::Tiles).then(|| tiles::parts(rows, inputs, values).map(Place::Tiles));
        let mut words = &mut scratch[..len];
        row_blocks.into_iter().flatten().chain(tiles.into_iter().flatten()).map(move |place| {
            let len = match &place {
                Place::RowBlock(part) => part.words(format.blocks),
                Place::Tiles(part) => part.words(format.blocks),
            };
            let (of_part, rest) = std::mem::take(&mut words).split_at_mut(len);
            words = rest;
            ActivationsPart { x, inputs, blocks: format.blocks, place, words: of_part }
        })
    }

    /// Reads what [`Activations::quantize`] wrote into `words` earlier.
    ///
    /// # Panics
    /// If `words` is not [`ActivationFormat::scratch_len`] long.
    pub fn from_words(format: ActivationFormat, words: &'a [i32], rows: usize, inputs: usize) -> Self {
        let len = format.scratch_len(rows, inputs);
        assert_eq!(len, Some(words.len()), "activations: wrong number of words for this shape");
        Self { words, format, rows, inputs, row_blocks: RowBlocks::new(rows) }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row: the columns of a matching matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The type of the blocks, and their order.
    pub fn format(&self) -> ActivationFormat {
        self.format
    }

    /// The row blocks.
    pub(super) fn row_blocks(&self) -> RowBlocks {
        self.row_blocks
    }

    /// The words of a row block's activation blocks from `block` on.
    pub(super) fn words(&self, rows: RowBlock, block: usize) -> &'a [i32] {
        let blocks = self.inputs / self.format.blocks.block_len();
        &self.words[(rows.first * blocks + rows.rows * block) * self.format.blocks.block_words()..]
    }

    /// The words of a pass's row tiles from span `span` on.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    pub(super) fn tiles(&self, pass: &Pass, span: usize) -> &'a [i32] {
        let tiles = pass.first_tile * self.inputs.div_ceil(SPAN) + span * pass.tiles;
        &self.words[tiles * tile::words(self.format.blocks)..]
    }
}

/// What one thread quantizes.
pub struct ActivationsPart<'a> {
    x: &'a [f32],
    inputs: usize,
    blocks: ActivationType,
    place: Place,
    words: &'a mut [MaybeUninit<i32>],
}

/// Which values a part has.
enum Place {
    RowBlock(row_blocks::Part),
    Tiles(tiles::Part),
}

impl ActivationsPart<'_> {
    /// Quantizes the part's values. Its words are then initialised.
    pub fn quantize(self, isa: Isa) {
        match isa.vectors() {
            Some(isa) => isa.run_panels(self),
            None => self.run(ScalarLoops),
        }
    }

    #[inline(always)]
    fn run(self, loops: impl Loops) {
        match self.place {
            Place::RowBlock(part) => part.quantize(loops, self.blocks, self.x, self.inputs, self.words),
            Place::Tiles(part) => part.quantize(loops, self.blocks, self.x, self.inputs, self.words),
        }
    }
}

impl PanelOp for ActivationsPart<'_> {
    #[inline(always)]
    fn eval<L: ByteLanes>(self, l: L) {
        self.run(VectorLoops(l));
    }
}
