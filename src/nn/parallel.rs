//! Work over rows, divided among the threads of the current pool.

use rayon::prelude::*;

/// Rows below which one thread does all: a piece must outlast the few microseconds that handing it over costs.
const ROWS_PER_PIECE: usize = 16;

/// Calls `work(first_row, rows)` for blocks of whole rows that together cover `y`, which is `(rows, width)`.
///
/// Pieces are small and taken by whichever thread is free, so that a thread that loses its processor for a while does
/// not hold up the others.
pub fn for_row_blocks(y: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = y.len() / width.max(1);
    if rows < 2 * ROWS_PER_PIECE || rayon::current_num_threads() == 1 {
        work(0, y);
    } else {
        y.par_chunks_mut(ROWS_PER_PIECE * width)
            .enumerate()
            .for_each(|(piece, rows)| work(piece * ROWS_PER_PIECE, rows));
    }
}
