//! Stores a panel's results in `y`.

use std::mem::MaybeUninit;

use crate::columns::ColumnsMut;
use crate::quant::layout::PANEL_ROWS;

/// Writes a panel's results for rows from `first_row` on.
#[inline(always)]
pub(super) fn store_panel(y: &mut ColumnsMut<'_>, panel: usize, first_row: usize, results: &[[f32; PANEL_ROWS]]) {
    let range = y.range();
    let (start, stop) = ((panel * PANEL_ROWS).max(range.start), ((panel + 1) * PANEL_ROWS).min(range.end));
    for (row, result) in results.iter().enumerate() {
        let y = &mut y.row_mut(first_row + row)[start - range.start..stop - range.start];
        // One store instead of a call.
        if let Some(y) = y.first_chunk_mut() {
            *y = result.map(MaybeUninit::new);
        } else {
            for (y, result) in y.iter_mut().zip(&result[start - panel * PANEL_ROWS..]) {
                y.write(*result);
            }
        }
    }
}
