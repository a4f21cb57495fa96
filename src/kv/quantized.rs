//! TurboQuant K or V: quantized pages between an exact head and an exact tail, which are [`ExactRows`].
//!
//! Every row is rotated once, on append, including exact ones: exact and quantized keys are scored by the same rotated
//! query, and exact and quantized values are summed in one output, rotated back once.

use std::ops::Range;

use foretoken_kernels::Isa;
use foretoken_kernels::attention::turboquant::{
    CodeFormat, NonFinite, Page, PageLayout, PageMut, RotationGroups, Side, encode_page, rotate,
};

use super::exact::{ExactRows, NotFinite, out_of_memory};
use super::format::ExactZones;
use super::layout::PAGE;
use super::pool::{PagePool, SharedPage, is_shared, page_mut};
use super::ring::{Retention, first_exact_page};
use crate::nn::{cast, cast_mut, map, row_blocks};
use crate::{Error, Result};

/// The quantized pages of K or V of one layer. A clone shares them.
#[derive(Clone)]
pub(super) struct QuantizedPages {
    layout: PageLayout,
    num_kv_heads: usize,
    zones: ExactZones,
    retention: Retention,
    /// `(pages, num_kv_heads)`; each: quantized rows, then `f16` scales, then the `f16` mean.
    pages: Vec<SharedPage>,
    /// Pages quantized from the rows last written. A dropped round may leave more in `pages`; they are stale.
    quantized_pages: usize,
}

impl QuantizedPages {
    /// # Errors
    /// If `head_dim` is not a multiple of 16.
    pub(super) fn new(
        format: CodeFormat,
        side: Side,
        num_kv_heads: usize,
        head_dim: usize,
        retention: Retention,
        zones: ExactZones,
    ) -> Result<Self> {
        let groups = RotationGroups::of(head_dim).ok_or_else(|| {
            let what = format!("K/V heads of {head_dim} channels in {}", format.name());
            Error::Unsupported { path: None, what, problem: "are not a multiple of 16; use f16, bf16 or f32".into() }
        })?;
        let layout = PageLayout::new(format, side, groups);
        Ok(Self { layout, num_kv_heads, zones, retention, pages: Vec::new(), quantized_pages: 0 })
    }

    /// Format and rotation groups.
    pub(super) fn quantization(&self) -> (CodeFormat, RotationGroups) {
        (self.layout.format(), self.layout.groups())
    }

    /// Allocates the pages that a write of `positions` quantizes, and makes them unique.
    ///
    /// # Errors
    /// If the pool is exhausted.
    pub(super) fn reserve(&mut self, pool: &PagePool, positions: Range<usize>) -> Result<()> {
        let Range { start, end } = positions;
        while self.pages.len() < self.num_pages(end) {
            self.pages.push(pool.take(self.layout.bytes()).ok_or_else(|| out_of_memory(end))?);
        }
        for page in self.quantized_by(start, end) {
            let heads = self.retention.slot(page) * self.num_kv_heads..;
            for page in &mut self.pages[heads][..self.num_kv_heads] {
                pool.make_unique(page).ok_or_else(|| out_of_memory(end))?;
            }
        }
        Ok(())
    }

    /// Frees the pages that only positions from `end` on took.
    pub(super) fn trim(&mut self, end: usize) {
        self.quantized_pages = self.quantized_pages.min(first_exact_page(end, self.zones.tail));
        self.pages.truncate(self.num_pages(end));
    }

    /// An upper bound of the bytes that [`QuantizedPages::reserve`] takes.
    pub(super) fn bytes_to_reserve(&self, positions: Range<usize>) -> usize {
        let missing = self.num_pages(positions.end).saturating_sub(self.pages.len());
        let of_pages = self.quantized_by(positions.start, positions.end).flat_map(|page| {
            let heads = self.retention.slot(page) * self.num_kv_heads;
            self.pages.iter().skip(heads).take(self.num_kv_heads)
        });
        (missing + of_pages.filter(|page| is_shared(page)).count()) * self.layout.bytes()
    }

    /// The pages that a write of the positions `first..end` quantizes.
    fn quantized_by(&self, first: usize, end: usize) -> Range<usize> {
        self.quantized_pages.min(first / PAGE)..first_exact_page(end, self.zones.tail)
    }

    /// Whether the rows at `visible` remain after positions below `written` were written, for a query at `visible.end`.
    /// In whole pages: an exact page is quantized later, including rows that are not visible.
    pub(super) fn holds(&self, exact: &ExactRows, visible: Range<usize>, written: usize) -> bool {
        let oldest = visible.start / PAGE * PAGE;
        let exact_from = first_exact_page(visible.end, self.zones.tail) * PAGE;
        let quantized = first_exact_page(written, self.zones.tail) * PAGE;
        exact.holds(oldest.max(exact_from)..visible.end, written) && self.retention.holds(oldest..exact_from, quantized)
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, already reserved, to `exact`,
    /// rotated, and quantizes the pages that leave the exact tail. Rows written again after a dropped round are
    /// quantized again.
    ///
    /// # Errors
    /// At the first value that is not finite in every format once rotated, by which a value can grow by the root of the
    /// group's length; or that is not finite in a page to be quantized, whose rows may have been read from a file.
    pub(super) fn write(
        &mut self,
        isa: Isa,
        exact: &mut ExactRows,
        first: usize,
        rows: &[f32],
    ) -> std::result::Result<(), NotFinite> {
        let (layout, width) = (self.layout, self.layout.head_dim());
        let rotated = row_blocks(rows.len() / width, width, |row, rotated| {
            rotated.copy_from_slice(&rows[row * width..][..rotated.len()]);
            rotate(isa, rotated, layout.groups());
        });
        exact.write(first, &rotated)?;

        let end = first + rows.len() / (self.num_kv_heads * width);
        for pages in self.retention.distinct(self.quantized_by(first, end)) {
            let values = pages.len() * self.num_kv_heads * PAGE * width;
            let pages = self.retention.pages_mut(&mut self.pages, self.num_kv_heads, pages);
            let of_heads = pages.flat_map(|(page, heads)| (0..).zip(heads).map(move |(head, to)| (page, head, to)));
            let encode = |(page, head, to): (usize, usize, &mut SharedPage)| {
                let mut rows = vec![0.0; PAGE * width];
                exact.rows(page, head, PAGE).widen(&mut rows);
                let (codes, halves) = page_mut(to).split_at_mut(layout.code_bytes());
                let (scales, mean) = cast_mut(halves).split_at_mut(layout.scales());
                let encoded = encode_page(isa, layout, &rows, PageMut { codes, scales, mean });
                let NonFinite { row, channel } = encoded.err()?;
                Some(NotFinite { position: page * PAGE + row, value: rows[row * width + channel] })
            };
            let failed = map(of_heads, values, encode).into_iter().flatten().min_by_key(|failed| failed.position);
            failed.map_or(Ok(()), Err)?;
        }
        self.quantized_pages = first_exact_page(end, self.zones.tail);
        Ok(())
    }

    /// One head of quantized page `page` of the sequence.
    pub(super) fn page(&self, page: usize, head: usize) -> Page<'_> {
        let bytes = self.pages[self.retention.slot(page) * self.num_kv_heads + head].as_slice();
        let (codes, halves) = bytes.split_at(self.layout.code_bytes());
        let (scales, mean) = cast(halves).split_at(self.layout.scales());
        Page::new(self.layout, codes, scales, mean)
    }

    /// The pages of the positions below `end`.
    pub(super) fn pages(&self, end: usize) -> &[SharedPage] {
        &self.pages[..self.num_pages(end)]
    }

    /// All pages in memory.
    pub(super) fn held_pages(&self) -> &[SharedPage] {
        &self.pages
    }

    /// As [`QuantizedPages::pages`], writable.
    pub(super) fn pages_mut(&mut self, end: usize) -> &mut [SharedPage] {
        self.quantized_pages = first_exact_page(end, self.zones.tail);
        let pages = self.num_pages(end);
        &mut self.pages[..pages]
    }

    /// Bytes after positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        self.num_pages(end).saturating_mul(self.layout.bytes())
    }

    /// Quantized pages of all heads after positions below `end` were written.
    fn num_pages(&self, end: usize) -> usize {
        self.retention.held(first_exact_page(end, self.zones.tail)).saturating_mul(self.num_kv_heads)
    }

    /// Whether both hold the same quantized pages, and the same exact rows in head and tail, at `positions`.
    pub(super) fn same(&self, other: &Self, [exact, others]: [&ExactRows; 2], positions: Range<usize>) -> bool {
        let exact_from = first_exact_page(positions.end, self.zones.tail);
        let bytes = |rows: &Self, page: usize, head: usize| {
            let slot = rows.retention.slot(page) * rows.num_kv_heads + head;
            rows.pages[slot].as_slice().to_vec()
        };
        let same_page = |page| (0..self.num_kv_heads).all(|head| bytes(self, page, head) == bytes(other, page, head));
        (positions.start / PAGE..exact_from).all(same_page)
            && exact.same(others, positions.start..self.zones.head.min(positions.end))
            && exact.same(others, positions.start.max(exact_from * PAGE)..positions.end)
    }
}
