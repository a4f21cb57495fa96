//! Groups of panels: their blocks, and their results before they are stored.

use std::mem::MaybeUninit;

use crate::quant::activations::PASS_ROWS;
use crate::quant::layout::PANEL_ROWS;
use crate::quant::packed_matrix::{PackedBlock, PackedMatrix, Panel, tail_block};
use crate::quant::unpack::Format;

/// Panels whose results are stored together, row by row. Rows of `y` are often a multiple of 4 KiB apart, which is one
/// set of the L1 cache: stored panel by panel they would evict each other.
pub(super) const PANEL_GROUP: usize = 4;

/// Results of a group of panels: `(panels, rows, outputs)`. Those of the rows of a pass are initialised: to clear all
/// takes 3 % of the time of 16 rows.
pub(super) type Results = [[[MaybeUninit<f32>; PANEL_ROWS]; PASS_ROWS]; PANEL_GROUP];

/// Packed block `block` of a panel; that of the last panel, if it is not whole, is packed into `tail`.
///
/// # Safety
/// The matrix has the panel and the block.
#[inline(always)]
pub(super) unsafe fn panel_block<F: Format>(
    weights: &PackedMatrix<'_>,
    panel: usize,
    block: usize,
    tail: &mut PackedBlock,
) -> *const u8 {
    match weights.panel(panel) {
        // SAFETY: the caller gives a block that the panel has.
        Panel::Packed(panel) => unsafe { panel.as_ptr().add(block * PANEL_ROWS * F::TYPE.packed_block_bytes()) },
        Panel::Rows(rows) => {
            tail_block(F::TYPE, rows, weights.row_bytes(), block, tail);
            tail.0.as_ptr()
        }
    }
}
