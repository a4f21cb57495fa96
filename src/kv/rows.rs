//! Rows of K or of V in pages of [`PAGE`] positions, as floating point.

use std::ops::Range;

use foretoken_kernels::{ElementType, Elements};
use half::slice::HalfFloatSliceExt;

use super::PAGE;
use super::format::ExactZones;
use crate::nn::{Arena, Piece, cast, cast_mut};
use crate::{Error, Result};

/// The rows of one layer. Position `p` lies in page `p / PAGE`.
pub(super) struct Rows {
    element: ElementType,
    num_kv_heads: usize,
    head_dim: usize,
    keep: Keep,
    pages: Vec<Piece>, // (num_kv_heads, PAGE, head_dim), so that a head's rows are one run for the kernels
}

/// The pages that are kept.
#[derive(Clone, Copy)]
pub(crate) enum Keep {
    /// All.
    All,
    /// The first `pinned`, and the newest `newest` of the others: those take the place of the oldest.
    Ring { pinned: usize, newest: usize },
}

impl Keep {
    /// What a window needs: that of the oldest query and the rows of one round, in whole pages, whose boundaries are fixed in
    /// the sequence.
    pub(crate) fn window(window: usize, max_round_rows: usize) -> Self {
        Keep::Ring { pinned: 0, newest: (window - 1).saturating_add(max_round_rows).div_ceil(PAGE) }
    }

    /// What stays exact beside codes. A page is whole until it is coded, and what the first query of a round reads exactly
    /// lasts as long: the oldest such row is less than a page older than the tail.
    pub(crate) fn zones(zones: ExactZones, max_round_rows: usize) -> Self {
        let newest = zones.tail.saturating_add(PAGE - 1).saturating_add(max_round_rows).div_ceil(PAGE);
        Keep::Ring { pinned: zones.head.div_ceil(PAGE), newest }
    }

    /// Pages that stay, and pages of the ring, where it is one.
    pub(crate) fn ring(self) -> Option<(usize, usize)> {
        match self {
            Keep::All => None,
            Keep::Ring { pinned, newest } => Some((pinned, newest)),
        }
    }

    /// Where page `page` of the sequence lies.
    pub(super) fn slot(self, page: usize) -> usize {
        match self {
            Keep::Ring { pinned, newest } if page >= pinned => pinned + (page - pinned) % newest,
            _ => page,
        }
    }

    /// Pages held once the first `pages` of the sequence were written.
    pub(crate) fn held(self, pages: usize) -> usize {
        match self {
            Keep::All => pages,
            Keep::Ring { pinned, newest } => pages.min(pinned.saturating_add(newest)),
        }
    }
}

impl Rows {
    pub(super) fn new(element: ElementType, num_kv_heads: usize, head_dim: usize, keep: Keep) -> Self {
        Self { element, num_kv_heads, head_dim, keep, pages: Vec::new() }
    }

    pub(super) fn element(&self) -> ElementType {
        self.element
    }

    /// Makes room for positions below `end`.
    ///
    /// # Errors
    /// If the system has no more memory.
    pub(super) fn reserve(&mut self, arena: &mut Arena, end: usize) -> Result<()> {
        while self.pages.len() < self.keep.held(end.div_ceil(PAGE)) {
            self.pages.push(arena.take(PAGE * self.bytes_per_position()).ok_or_else(|| out_of_memory(end))?);
        }
        Ok(())
    }

    /// Writes `rows` `(n, num_kv_heads, head_dim)` at `first` and the positions after it, for which there is room.
    pub(super) fn write(&mut self, first: usize, rows: &[f32]) {
        let heads = rows.chunks_exact(self.head_dim);
        for (i, row) in heads.enumerate() {
            let (position, head) = (first + i / self.num_kv_heads, i % self.num_kv_heads);
            let at = (head * PAGE + position % PAGE) * self.head_dim;
            let page = self.pages[self.keep.slot(position / PAGE)].as_mut_slice();
            let range = at..at + self.head_dim;
            match self.element {
                ElementType::F32 => cast_mut(page)[range].copy_from_slice(row),
                ElementType::F16 => cast_mut::<half::f16>(page)[range].convert_from_f32_slice(row),
                ElementType::Bf16 => cast_mut::<half::bf16>(page)[range].convert_from_f32_slice(row),
            }
        }
    }

    /// The first `len` rows of one head in page `page` of the sequence: `(len, head_dim)`.
    pub(super) fn tile(&self, page: usize, head: usize, len: usize) -> Elements<'_> {
        let start = head * PAGE * self.head_dim;
        let page = self.pages[self.keep.slot(page)].as_slice();
        let elements = match self.element {
            ElementType::F32 => Elements::F32(cast(page)),
            ElementType::F16 => Elements::F16(cast(page)),
            ElementType::Bf16 => Elements::Bf16(cast(page)),
        };
        elements.slice(start..start + len * self.head_dim)
    }

    /// The pages that hold the positions below `end`.
    pub(super) fn pieces(&self, end: usize) -> &[Piece] {
        &self.pages[..self.keep.held(end.div_ceil(PAGE))]
    }

    /// As [`Rows::pieces`], to be filled.
    pub(super) fn pieces_mut(&mut self, end: usize) -> &mut [Piece] {
        &mut self.pages[..self.keep.held(end.div_ceil(PAGE))]
    }

    /// Bytes once positions below `end` were written.
    pub(super) fn bytes_at(&self, end: usize) -> usize {
        self.keep.held(end.div_ceil(PAGE)).saturating_mul(PAGE * self.bytes_per_position())
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
                    rows.tile(position / PAGE, head, PAGE).slice(at..at + rows.head_dim).widen(&mut row);
                    row
                };
                row(self).iter().map(|x| x.to_bits()).eq(row(other).iter().map(|x| x.to_bits()))
            })
        })
    }
}

/// The error for a system that has no more memory.
pub(super) fn out_of_memory(end: usize) -> Error {
    Error::Input(format!("no memory is left for the K and V of {end} positions; use a smaller cache type or context"))
}
