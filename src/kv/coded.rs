//! Rows of K or of V in codes, with exact zones around them.
//!
//! All of it is in the rotated domain: a row is rotated once, when it is appended, so that exact and coded keys meet the
//! same rotated query, and exact and coded values add up in the same output.

use std::ops::Range;

use foretoken_kernels::turbo::{CodeFormat, Groups, Page, PageLayout, PageMut, Side, encode_page, rotate};
use foretoken_kernels::{Elements, Isa};
use rayon::prelude::*;

use super::format::ExactZones;
use super::rows::{Keep, Rows, out_of_memory};
use super::store::first_exact_page;
use super::{KvOptions, PAGE};
use crate::nn::{Arena, Piece, cast, cast_mut};
use crate::{Error, Result};

/// The rows of one layer: the newest and the first as they came, whole older pages as codes.
pub(super) struct CodedRows {
    layout: PageLayout,
    groups: Groups,
    num_kv_heads: usize,
    zones: ExactZones,
    exact: Rows,
    keep: Keep,
    /// `(pages, num_kv_heads)`: codes, then `f16` scales, then the `f16` mean.
    pages: Vec<Piece>,
    /// Pages of the sequence whose codes are those of the rows last written; a dropped round may have coded more.
    sealed: usize,
}

impl CodedRows {
    /// # Errors
    /// If heads of this width cannot be coded.
    pub(super) fn new(
        (format, side): (CodeFormat, Side),
        (num_kv_heads, head_dim): (usize, usize),
        keep: Keep,
        options: &KvOptions,
    ) -> Result<Self> {
        let groups = Groups::of(head_dim).ok_or_else(|| {
            let name = format.name();
            Error::Input(format!(
                "K/V heads of {head_dim} are no multiple of 16, as {name} needs; use f16, bf16 or f32"
            ))
        })?;
        let zones = options.exact;
        let whole = Keep::zones(zones, options.max_round_rows);
        let exact = Rows::new(zones.element, num_kv_heads, head_dim, whole);
        let layout = PageLayout::new(format, side, groups);
        Ok(Self { layout, groups, num_kv_heads, zones, exact, keep, pages: Vec::new(), sealed: 0 })
    }

    pub(super) fn format(&self) -> CodeFormat {
        self.layout.format()
    }

    pub(super) fn groups(&self) -> Groups {
        self.groups
    }

    /// Makes room for positions below `end`.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn reserve(&mut self, arena: &mut Arena, end: usize) -> Result<()> {
        self.exact.reserve(arena, end)?;
        while self.pages.len() < self.num_pages(end) * self.num_kv_heads {
            self.pages.push(arena.take(self.layout.bytes()).ok_or_else(|| out_of_memory(end))?);
        }
        Ok(())
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, for which there is room, and
    /// codes the pages that have left the tail of a query behind the last of them. Later rows at the same positions, after a dropped
    /// round, are coded again.
    pub(super) fn write(&mut self, isa: Isa, first: usize, rows: &[f32]) {
        let mut rotated = rows.to_vec();
        rotate(isa, &mut rotated, self.groups);
        self.exact.write(first, &rotated);

        let layout = self.layout;
        let end = first + rows.len() / (self.num_kv_heads * layout.head_dim());
        let leaving = first_exact_page(end, self.zones.tail);
        for page in self.sealed.min(first / PAGE)..leaving {
            let heads = self.keep.slot(page) * self.num_kv_heads..;
            let heads = self.pages[heads][..self.num_kv_heads].par_iter_mut().enumerate();
            heads.for_each(|(head, piece)| {
                let mut rows = vec![0.0; PAGE * layout.head_dim()];
                self.exact.tile(page, head, PAGE).widen(&mut rows);
                let (codes, halves) = piece.as_mut_slice().split_at_mut(layout.code_bytes());
                let (scales, mean) = cast_mut(halves).split_at_mut(layout.scales());
                let coded = encode_page(isa, layout, &rows, PageMut { codes, scales, mean });
                debug_assert!(coded.is_ok(), "rows were found finite before they were written");
            });
        }
        self.sealed = leaving;
    }

    /// The first `len` rows of one head in page `page` of the sequence, rotated: `(len, head_dim)`.
    pub(super) fn tile(&self, page: usize, head: usize, len: usize) -> Elements<'_> {
        self.exact.tile(page, head, len)
    }

    /// The codes of one head of page `page` of the sequence.
    pub(super) fn page(&self, page: usize, head: usize) -> Page<'_> {
        let bytes = self.pages[self.keep.slot(page) * self.num_kv_heads + head].as_slice();
        let (codes, halves) = bytes.split_at(self.layout.code_bytes());
        let (scales, mean) = cast(halves).split_at(self.layout.scales());
        Page::new(self.layout, codes, scales, mean)
    }

    /// The pages that hold the positions below `end`: exact ones, then coded ones.
    pub(super) fn pieces(&self, end: usize) -> impl Iterator<Item = &Piece> {
        self.exact.pieces(end).iter().chain(&self.pages[..self.num_pages(end) * self.num_kv_heads])
    }

    /// As [`CodedRows::pieces`], to be filled.
    pub(super) fn pieces_mut(&mut self, end: usize) -> impl Iterator<Item = &mut Piece> {
        self.sealed = first_exact_page(end, self.zones.tail);
        let coded = self.num_pages(end) * self.num_kv_heads;
        self.exact.pieces_mut(end).iter_mut().chain(&mut self.pages[..coded])
    }

    pub(super) fn bytes(&self) -> usize {
        self.exact.bytes() + self.pages.iter().map(|page| page.as_slice().len()).sum::<usize>()
    }

    /// Bytes once positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        let pages = self.num_pages(end).saturating_mul(self.num_kv_heads * self.layout.bytes());
        self.exact.bytes_at(end).saturating_add(pages)
    }

    /// Pages of codes held once positions below `end` were written.
    fn num_pages(&self, end: usize) -> usize {
        self.keep.held(first_exact_page(end, self.zones.tail))
    }

    /// Whether both hold the same codes of the pages within `positions`, and the same rows where they are read exactly.
    pub(super) fn same(&self, other: &Self, positions: Range<usize>) -> bool {
        let exact_from = first_exact_page(positions.end, self.zones.tail);
        let bytes = |rows: &Self, page: usize, head: usize| {
            let slot = rows.keep.slot(page) * rows.num_kv_heads + head;
            rows.pages[slot].as_slice().to_vec()
        };
        let same_page = |page| (0..self.num_kv_heads).all(|head| bytes(self, page, head) == bytes(other, page, head));
        (positions.start / PAGE..exact_from).all(same_page)
            && self.exact.same(&other.exact, positions.start..self.zones.head.min(positions.end))
            && self.exact.same(&other.exact, positions.start.max(exact_from * PAGE)..positions.end)
    }
}
