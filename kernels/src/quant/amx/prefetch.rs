//! Prefetches the memory that the next products need.

use std::ops::Range;

use super::panels::PANEL_GROUP;
use crate::columns::ColumnsMut;
use crate::quant::layout::PANEL_ROWS;
use crate::simd::prefetch::{prefetch, prefetch_to};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches a range of memory, a few cache lines per step.
pub(super) struct Prefetcher {
    from: *const u8,
    end: *const u8,
    step: usize,
}

impl Prefetcher {
    /// `bytes` from `from` on, spread over `steps`.
    #[inline(always)]
    pub fn new(from: *const u8, bytes: usize, steps: usize) -> Self {
        Self { from, end: from.wrapping_add(bytes), step: bytes.div_ceil(LINE * steps) * LINE }
    }

    #[inline(always)]
    pub fn step(&mut self) {
        if self.from < self.end {
            for line in (0..self.step).step_by(LINE) {
                prefetch(self.from.wrapping_add(line));
            }
            self.from = self.from.wrapping_add(self.step);
        }
    }
}

/// Prefetches the rows of `y` where the results of a group of panels will be stored, a row per step, into the L2 cache.
/// They are more than a page apart, which hardware prefetchers do not cover.
pub(super) struct OutputPrefetcher {
    /// The first result of the next row.
    next: *const u8,
    row_bytes: usize,
    rows: usize,
}

impl OutputPrefetcher {
    /// Of `rows`, results from column `column` on.
    #[inline(always)]
    pub fn new(y: &mut ColumnsMut<'_>, rows: Range<usize>, column: usize) -> Self {
        let skipped = column.saturating_sub(y.range().start);
        let next = y.row_mut(rows.start).as_ptr().wrapping_add(skipped).cast();
        Self { next, row_bytes: 4 * y.width(), rows: rows.len() }
    }

    #[inline(always)]
    pub fn step(&mut self) {
        if self.rows > 0 {
            // One line more, because rows of `y` need not be aligned.
            for line in 0..=PANEL_GROUP * PANEL_ROWS * 4 / LINE {
                prefetch_to::<2>(self.next.wrapping_add(line * LINE));
            }
            self.next = self.next.wrapping_add(self.row_bytes);
            self.rows -= 1;
        }
    }
}
