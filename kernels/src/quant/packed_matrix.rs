//! A packed matrix, and the blocks of its rows.

use std::mem::MaybeUninit;

use crate::quant::ggml::Block;
use crate::quant::layout::{MAX_BLOCK_BYTES, PANEL_ROWS};
use crate::quant::pack::{extract, interleave};
use crate::quant::recode::{decode, is_recoded};
use crate::quant::unpack::Format;
use crate::quant::weight_type::WeightType;

/// A packed `(outputs, inputs)` matrix.
#[derive(Clone, Copy, Debug)]
pub struct PackedMatrix<'a> {
    weight_type: WeightType,
    outputs: usize,
    inputs: usize,
    bytes: &'a [u8],
}

impl<'a> PackedMatrix<'a> {
    /// A matrix over what [`super::pack`] wrote. `bytes` should be aligned to 64 bytes: a vector is
    /// then one cache line.
    ///
    /// # Panics
    /// If `bytes` is not [`WeightType::packed_bytes_for`] the shape.
    pub fn new(weight_type: WeightType, outputs: usize, inputs: usize, bytes: &'a [u8]) -> Self {
        let len = weight_type.packed_bytes_for(outputs, inputs);
        assert_eq!(Some(bytes.len()), len, "packed matrix: wrong length for this shape");
        Self { weight_type, outputs, inputs, bytes }
    }

    /// The format.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Rows of the matrix.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Columns of the matrix.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The packed bytes.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub(super) fn blocks(&self) -> usize {
        self.inputs / self.weight_type.block_len()
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.blocks() * self.weight_type.packed_block_bytes()
    }

    pub(super) fn panel(&self, panel: usize) -> Panel<'a> {
        let size = PANEL_ROWS * self.row_bytes();
        let rest = &self.bytes[panel * size..];
        match rest.get(..size) {
            Some(packed) => Panel::Packed(packed),
            None => Panel::Rows(rest),
        }
    }
}

/// A panel's bytes.
#[derive(Clone, Copy)]
pub(super) enum Panel<'a> {
    /// Sixteen rows in the packed order.
    Packed(&'a [u8]),
    /// The fewer rows after the last whole panel, one after the other.
    Rows(&'a [u8]),
}

/// Memory for one packed block of any type, aligned for vector loads.
#[repr(align(64))]
pub(super) struct PackedBlock(pub [u8; PANEL_ROWS * MAX_BLOCK_BYTES]);

impl PackedBlock {
    pub const fn new() -> Self {
        Self([0; PANEL_ROWS * MAX_BLOCK_BYTES])
    }
}

/// Packs block `b` of the rows that do not fill a panel. Results of lanes without a row are not read.
#[inline(never)]
pub(super) fn tail_block(weight_type: WeightType, rows: &[u8], row_bytes: usize, b: usize, out: &mut PackedBlock) {
    let bytes = weight_type.packed_block_bytes();
    interleave(weight_type, |lane| rows.get(lane * row_bytes + b * bytes..)?.get(..bytes), &mut out.0);
}

/// Packed block `b` of a panel; in `tail` if the panel is the partial one.
///
/// # Safety
/// The matrix has the panel, and the panel the block.
#[inline(always)]
pub(super) unsafe fn packed_block<F: Format>(
    weights: &PackedMatrix<'_>,
    panel: usize,
    b: usize,
    tail: &mut MaybeUninit<PackedBlock>,
) -> *const u8 {
    match weights.panel(panel) {
        // SAFETY: the caller names a block that the panel has.
        Panel::Packed(panel) => unsafe { panel.as_ptr().add(b * PANEL_ROWS * F::TYPE.packed_block_bytes()) },
        Panel::Rows(rows) => {
            let tail = tail.write(PackedBlock::new());
            tail_block(F::TYPE, rows, weights.row_bytes(), b, tail);
            tail.0.as_ptr()
        }
    }
}

/// Dequantizes row `row` of a packed matrix, for an embedding lookup; the values are [`super::dequantize_row`]'s.
///
/// # Panics
/// If `row` is out of range or `out` is not `inputs` long.
pub fn dequantize_packed_row(matrix: &PackedMatrix<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), matrix.inputs(), "dequantize: out is not `inputs` long");
    for (b, out) in out.chunks_exact_mut(matrix.weight_type().block_len()).enumerate() {
        block(matrix, row, b).values(out);
    }
}

/// Block `b` of row `row`.
pub(super) fn block(matrix: &PackedMatrix<'_>, row: usize, b: usize) -> Block {
    let weight_type = matrix.weight_type();
    let block_bytes = weight_type.packed_block_bytes();
    let mut bytes = [0; MAX_BLOCK_BYTES];
    let bytes = &mut bytes[..block_bytes];
    match matrix.panel(row / PANEL_ROWS) {
        Panel::Packed(panel) => {
            let packed = &panel[b * PANEL_ROWS * block_bytes..][..PANEL_ROWS * block_bytes];
            extract(weight_type, packed, row % PANEL_ROWS, bytes);
        }
        Panel::Rows(rows) => {
            let start = row % PANEL_ROWS * matrix.row_bytes() + b * block_bytes;
            bytes.copy_from_slice(&rows[start..][..block_bytes]);
        }
    }
    if is_recoded(weight_type) { decode(weight_type, bytes) } else { Block::new(weight_type, bytes) }
}
