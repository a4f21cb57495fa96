//! Row-parallel loops on the current thread pool.

use rayon::prelude::*;

/// Rows per task; below twice that one thread does all. A task must outweigh a few microseconds of scheduling.
const ROWS_PER_TASK: usize = 16;

/// Calls `work(first_row, rows)` for blocks of whole rows that together cover `y`, which is `(rows, width)`.
///
/// Tasks are small and dynamically scheduled, so that a preempted thread does not delay the others.
pub fn for_row_blocks(y: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    let rows = y.len() / width.max(1);
    if rows < 2 * ROWS_PER_TASK || rayon::current_num_threads() == 1 {
        work(0, y);
    } else {
        y.par_chunks_mut(ROWS_PER_TASK * width).enumerate().for_each(|(task, rows)| work(task * ROWS_PER_TASK, rows));
    }
}
