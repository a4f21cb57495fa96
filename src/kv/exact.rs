//! Floating-point K or V in pages of [`PAGE`] positions.

use std::ops::Range;

use foretoken_kernels::{ElementType, Elements};
use half::slice::HalfFloatSliceExt;

use super::layout::PAGE;
use super::options::MEMORY_REMEDY;
use super::pool::{PagePool, SharedPage, is_shared, page_mut};
use super::ring::Retention;
use crate::nn::{cast_mut, elements, map};
use crate::{Error, Result};

/// The largest magnitude representable in every format: that of `f16`. Normalized K and V stay far below it.
const LARGEST: f32 = 65504.0;

/// Positions per task of a write.
const ROWS_PER_TASK: usize = 32;

/// A value that no page may hold: NaN, or above [`LARGEST`].
#[derive(Clone, Copy)]
pub(super) struct NotFinite {
    pub(super) position: usize,
    pub(super) value: f32,
}

/// K or V of one layer. Position `p` is in page `p / PAGE`. A clone shares the pages.
#[derive(Clone)]
pub(super) struct ExactRows {
    element: ElementType,
    num_kv_heads: usize,
    head_dim: usize,
    retention: Retention,
    pages: Vec<SharedPage>, // (num_kv_heads, PAGE, head_dim), so that the kernels read a head's rows contiguously
}

impl ExactRows {
    pub(super) fn new(element: ElementType, num_kv_heads: usize, head_dim: usize, retention: Retention) -> Self {
        Self { element, num_kv_heads, head_dim, retention, pages: Vec::new() }
    }

    pub(super) fn element(&self) -> ElementType {
        self.element
    }

    /// Allocates pages for `positions` and makes them unique.
    ///
    /// # Errors
    /// If the pool is exhausted.
    pub(super) fn reserve(&mut self, pool: &PagePool, positions: Range<usize>) -> Result<()> {
        let (end, bytes) = (positions.end, self.page_bytes());
        while self.pages.len() < self.retention.held(end.div_ceil(PAGE)) {
            self.pages.push(pool.take(bytes).ok_or_else(|| out_of_memory(end))?);
        }
        for page in positions.start / PAGE..end.div_ceil(PAGE) {
            pool.make_unique(&mut self.pages[self.retention.slot(page)]).ok_or_else(|| out_of_memory(end))?;
        }
        Ok(())
    }

    /// Frees the pages that only positions from `end` on took.
    pub(super) fn trim(&mut self, end: usize) {
        self.pages.truncate(self.retention.held(end.div_ceil(PAGE)));
    }

    /// An upper bound of the bytes that [`ExactRows::reserve`] takes.
    pub(super) fn bytes_to_reserve(&self, positions: Range<usize>) -> usize {
        let pages = positions.start / PAGE..positions.end.div_ceil(PAGE);
        let missing = self.retention.held(pages.end).saturating_sub(self.pages.len());
        let held = pages.filter_map(|page| self.pages.get(self.retention.slot(page)));
        // A prompt may be longer than a ring, which is copied once. Otherwise no two pages are one, and counting all
        // would take time for the whole context.
        let of_ring = |_| self.pages.iter().filter(|page| is_shared(page)).count();
        let most = self.retention.ring().map_or(usize::MAX, of_ring);
        (missing + held.filter(|page| is_shared(page)).count().min(most)) * self.page_bytes()
    }

    /// Whether the rows at `positions` remain after positions below `written` were written.
    pub(super) fn holds(&self, positions: Range<usize>, written: usize) -> bool {
        self.retention.holds(positions, written)
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, already reserved.
    ///
    /// # Errors
    /// At the first value that is not finite in every format; rows were written.
    pub(super) fn write(&mut self, first: usize, rows: &[f32]) -> std::result::Result<(), NotFinite> {
        let end = first + rows.len() / (self.num_kv_heads * self.head_dim);
        let mut pages = self.retention.distinct(first / PAGE..end.div_ceil(PAGE));
        pages.try_for_each(|pages| self.write_pages(pages, first..end, rows))
    }

    /// Writes those of `rows`, at `positions`, that are in `pages`, no two of which share a slot.
    fn write_pages(
        &mut self,
        pages: Range<usize>,
        Range { start: first, end }: Range<usize>,
        rows: &[f32],
    ) -> std::result::Result<(), NotFinite> {
        let (element, heads, head_dim) = (self.element, self.num_kv_heads, self.head_dim);
        let row_bytes = head_dim * element.size();
        let pages = self.retention.pages_mut(&mut self.pages, 1, pages);
        // (head, first position, rows): the rows of one head that follow each other in a page.
        let tasks = pages.flat_map(|(page, shared)| {
            let start = first.max(page * PAGE);
            let bytes = start % PAGE * row_bytes..(end.min((page + 1) * PAGE) - page * PAGE) * row_bytes;
            let of_heads = page_mut(&mut shared[0]).chunks_exact_mut(PAGE * row_bytes).enumerate();
            of_heads.flat_map(move |(head, page)| {
                let blocks = page[bytes.clone()].chunks_mut(ROWS_PER_TASK * row_bytes);
                (start..).step_by(ROWS_PER_TASK).zip(blocks).map(move |(start, rows)| (head, start, rows))
            })
        });
        let write = |(head, start, block): (usize, usize, &mut [u8])| {
            let mut of_block = (start..).zip(block.chunks_exact_mut(row_bytes));
            of_block.find_map(|(position, bytes)| {
                let row = &rows[((position - first) * heads + head) * head_dim..][..head_dim];
                write_row(element, row, bytes).map(|value| NotFinite { position, value })
            })
        };
        let failed = map(tasks, rows.len(), write).into_iter().flatten().min_by_key(|failed| failed.position);
        failed.map_or(Ok(()), Err)
    }

    /// The first `len` rows of one head in page `page` of the sequence: `(len, head_dim)`.
    pub(super) fn rows(&self, page: usize, head: usize, len: usize) -> Elements<'_> {
        let start = head * PAGE * self.head_dim;
        let page = self.pages[self.retention.slot(page)].as_slice();
        elements(self.element, page).slice(start..start + len * self.head_dim)
    }

    /// The pages of the positions below `end`.
    pub(super) fn pages(&self, end: usize) -> &[SharedPage] {
        &self.pages[..self.retention.held(end.div_ceil(PAGE))]
    }

    /// All pages in memory.
    pub(super) fn held_pages(&self) -> &[SharedPage] {
        &self.pages
    }

    /// As [`ExactRows::pages`], writable.
    pub(super) fn pages_mut(&mut self, end: usize) -> &mut [SharedPage] {
        &mut self.pages[..self.retention.held(end.div_ceil(PAGE))]
    }

    /// Bytes after positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        self.retention.held(end.div_ceil(PAGE)).saturating_mul(self.page_bytes())
    }

    fn page_bytes(&self) -> usize {
        PAGE * self.num_kv_heads * self.head_dim * self.element.size()
    }

    /// Whether both hold the same bits at `positions`.
    pub(super) fn same(&self, other: &Self, mut positions: Range<usize>) -> bool {
        positions.all(|position| {
            (0..self.num_kv_heads).all(|head| {
                let row = |rows: &Self| {
                    let at = (position % PAGE) * rows.head_dim;
                    let mut row = vec![0.0f32; rows.head_dim];
                    rows.rows(position / PAGE, head, PAGE).slice(at..at + rows.head_dim).widen(&mut row);
                    row
                };
                row(self).iter().map(|x| x.to_bits()).eq(row(other).iter().map(|x| x.to_bits()))
            })
        })
    }
}

/// Writes `row` to `bytes`; if a value is not finite in every format, writes nothing and returns the first such value.
fn write_row(element: ElementType, row: &[f32], bytes: &mut [u8]) -> Option<f32> {
    let is_finite = |x: &f32| x.abs() <= LARGEST; // not NaN
    // Without an early end, in vectors.
    if !row.iter().fold(true, |finite, x| finite & is_finite(x)) {
        return row.iter().copied().find(|x| !is_finite(x));
    }
    match element {
        ElementType::F32 => cast_mut(bytes).copy_from_slice(row),
        ElementType::F16 => cast_mut::<half::f16>(bytes).convert_from_f32_slice(row),
        ElementType::Bf16 => cast_mut::<half::bf16>(bytes).convert_from_f32_slice(row),
    }
    None
}

/// The error for K or V (`what`) that is NaN, infinite or beyond `f16`.
pub(crate) fn not_finite(what: &'static str, layer: usize, position: usize, found: Option<f32>) -> Error {
    Error::NotFinite { what, layer: Some(layer), position: Some(position), found }
}

/// The error for K and V of `end` positions that do not fit memory.
pub(super) fn out_of_memory(end: usize) -> Error {
    let what = format!("K and V of {end} positions");
    Error::Memory { what, needed: None, available: None, fits: None, remedy: MEMORY_REMEDY.into() }
}
