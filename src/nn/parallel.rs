//! Loops divided among the threads of the current pool.

use std::mem::MaybeUninit;

use super::team::{for_each, threads};

/// Values per task; below twice that one thread does all. A task must outweigh a few microseconds of scheduling; with a
/// quarter and an eighth, passes took as long within 5 % (record: `2026-11-29-xeon-2vcpu/regions.txt`).
pub(super) const VALUES_PER_TASK: usize = 1 << 14;

/// Whether work on this many values is to be divided.
pub(crate) fn divides(values: usize) -> bool {
    values >= 2 * VALUES_PER_TASK && threads() > 1
}

/// Calls `work(first_row, rows)` for blocks of whole rows that together cover `y`, which is `(rows, width)`.
///
/// Tasks are small and dynamically scheduled, so that a preempted thread does not delay the others.
pub(crate) fn for_row_blocks(y: &mut [f32], width: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
    if divides(y.len()) {
        let rows = (VALUES_PER_TASK / width).max(1);
        for_each(y.chunks_mut(rows * width).enumerate(), |(task, y)| work(task * rows, y));
    } else {
        work(0, y);
    }
}

/// `(rows, width)` values: zeros, of which `work(first_row, rows)` changes blocks of whole rows.
pub(crate) fn row_blocks(rows: usize, width: usize, work: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let in_block = if divides(rows * width) { (VALUES_PER_TASK / width).max(1) } else { rows };
    blocks(rows * width, in_block * width, usize::MAX, |index, y| work(index * in_block, y))
}

/// `len` zeros, of which `work(index, block)` changes blocks of `block_len`. The first `at_once` blocks are divided
/// among the threads; the others follow one after the other, and `work` may divide each. A thread zeroes the blocks it
/// changes: memory is written once, and its pages are mapped by all threads.
pub(crate) fn blocks(
    len: usize,
    block_len: usize,
    at_once: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) -> Vec<f32> {
    let (block_len, mut all) = (block_len.max(1), Vec::with_capacity(len));
    let clear_and_work = |(index, block): (usize, &mut [MaybeUninit<f32>])| {
        block.fill(MaybeUninit::new(0.0));
        // SAFETY: all values are written.
        work(index, unsafe { &mut *(std::ptr::from_mut(block) as *mut [f32]) });
    };
    let mut blocks = all.spare_capacity_mut()[..len].chunks_mut(block_len).enumerate();
    for_each(blocks.by_ref().take(at_once), clear_and_work);
    blocks.for_each(clear_and_work);
    // SAFETY: the blocks cover all values, and each was cleared.
    unsafe { all.set_len(len) };
    all
}

/// `work` of every item, in order. `values` is the work of all.
pub(crate) fn map<T: Send, R: Send>(
    items: impl Iterator<Item = T>,
    values: usize,
    work: impl Fn(T) -> R + Sync,
) -> Vec<R> {
    if !divides(values) {
        return items.map(work).collect();
    }
    let mut results: Vec<(Option<T>, Option<R>)> = items.map(|item| (Some(item), None)).collect();
    for_each(results.iter_mut(), |(item, result)| *result = item.take().map(&work));
    results.into_iter().filter_map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_all_values_with_any_number_of_threads() {
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
            for (rows, width) in [(0, 5), (3, 0), (1, 7), (301, 1000), (2, 5 * VALUES_PER_TASK)] {
                let values = pool.install(|| {
                    row_blocks(rows, width, |first, y| {
                        for (row, y) in y.chunks_exact_mut(width).enumerate() {
                            y[1..].fill((first + row) as f32);
                        }
                    })
                });
                let of_row = |row: usize| (0..width).map(move |column| if column == 0 { 0.0 } else { row as f32 });
                assert!(values.into_iter().eq((0..rows).flat_map(of_row)), "{threads} threads, {rows} x {width}");
            }
        }
    }
}
