//! Floating-point K or V in pages of [`PAGE`] positions.

use std::ops::Range;

use foretoken_kernels::{ElementType, Elements};
use half::slice::HalfFloatSliceExt;

use super::layout::PAGE;
use super::options::SMALLER;
use super::pool::{PagePool, SharedPage, page_mut};
use super::ring::Retention;
use crate::nn::{cast, cast_mut};
use crate::{Error, Result};

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
        let (end, bytes) = (positions.end, PAGE * self.bytes_per_position());
        while self.pages.len() < self.retention.held(end.div_ceil(PAGE)) {
            self.pages.push(pool.take(bytes).ok_or_else(|| out_of_memory(end))?);
        }
        for page in positions.start / PAGE..end.div_ceil(PAGE) {
            pool.make_unique(&mut self.pages[self.retention.slot(page)]).ok_or_else(|| out_of_memory(end))?;
        }
        Ok(())
    }

    /// Whether the rows at `positions` remain after positions below `written` were written.
    pub(super) fn holds(&self, positions: Range<usize>, written: usize) -> bool {
        self.retention.holds(positions, written)
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, already reserved.
    pub(super) fn write(&mut self, first: usize, rows: &[f32]) {
        let heads = rows.chunks_exact(self.head_dim);
        for (i, row) in heads.enumerate() {
            let (position, head) = (first + i / self.num_kv_heads, i % self.num_kv_heads);
            let at = (head * PAGE + position % PAGE) * self.head_dim;
            let page = page_mut(&mut self.pages[self.retention.slot(position / PAGE)]);
            let range = at..at + self.head_dim;
            match self.element {
                ElementType::F32 => cast_mut(page)[range].copy_from_slice(row),
                ElementType::F16 => cast_mut::<half::f16>(page)[range].convert_from_f32_slice(row),
                ElementType::Bf16 => cast_mut::<half::bf16>(page)[range].convert_from_f32_slice(row),
            }
        }
    }

    /// The first `len` rows of one head in page `page` of the sequence: `(len, head_dim)`.
    pub(super) fn rows(&self, page: usize, head: usize, len: usize) -> Elements<'_> {
        let start = head * PAGE * self.head_dim;
        let page = self.pages[self.retention.slot(page)].as_slice();
        let elements = match self.element {
            ElementType::F32 => Elements::F32(cast(page)),
            ElementType::F16 => Elements::F16(cast(page)),
            ElementType::Bf16 => Elements::Bf16(cast(page)),
        };
        elements.slice(start..start + len * self.head_dim)
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

    pub(super) fn page_bytes(&self) -> usize {
        PAGE * self.bytes_per_position()
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.iter().map(|page| page.as_slice().len()).sum()
    }

    fn bytes_per_position(&self) -> usize {
        self.num_kv_heads * self.head_dim * self.element.size()
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

/// The error for K and V of `end` positions that do not fit memory.
pub(super) fn out_of_memory(end: usize) -> Error {
    let what = format!("K and V of {end} positions");
    Error::Memory { what, needed: None, available: None, fits: None, remedy: SMALLER.into() }
}
