//! Rows of K or of V in pages of [`PAGE`] positions, in the type they are kept in.

use foretoken_kernels::{ElementType, Elements};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::PAGE;

/// The rows of one layer. Position `p` lies in page `p / PAGE`; a ring keeps the newest `ring` pages and reuses the
/// oldest, an append-only store keeps all.
pub(super) struct Rows {
    element: ElementType,
    num_kv_heads: usize,
    head_dim: usize,
    ring: Option<usize>,
    pages: Vec<Page>,
}

/// One page: `(num_kv_heads, PAGE, head_dim)`, so that a head's rows are one run for the kernels.
enum Page {
    F32(Box<[f32]>),
    F16(Box<[f16]>),
    Bf16(Box<[bf16]>),
}

impl Page {
    fn new(element: ElementType, len: usize) -> Self {
        match element {
            ElementType::F32 => Page::F32(vec![0.0; len].into()),
            ElementType::F16 => Page::F16(vec![f16::ZERO; len].into()),
            ElementType::Bf16 => Page::Bf16(vec![bf16::ZERO; len].into()),
        }
    }

    fn elements(&self) -> Elements<'_> {
        match self {
            Page::F32(x) => Elements::F32(x),
            Page::F16(x) => Elements::F16(x),
            Page::Bf16(x) => Elements::Bf16(x),
        }
    }

    fn write(&mut self, at: usize, row: &[f32]) {
        let range = at..at + row.len();
        match self {
            Page::F32(x) => x[range].copy_from_slice(row),
            Page::F16(x) => x[range].convert_from_f32_slice(row),
            Page::Bf16(x) => x[range].convert_from_f32_slice(row),
        }
    }
}

impl Rows {
    pub(super) fn new(element: ElementType, num_kv_heads: usize, head_dim: usize, ring: Option<usize>) -> Self {
        Self { element, num_kv_heads, head_dim, ring, pages: Vec::new() }
    }

    /// Makes room for positions below `end`.
    pub(super) fn reserve(&mut self, end: usize) {
        let pages = end.div_ceil(PAGE);
        let pages = self.ring.map_or(pages, |ring| pages.min(ring));
        while self.pages.len() < pages {
            self.pages.push(Page::new(self.element, self.num_kv_heads * PAGE * self.head_dim));
        }
    }

    /// Writes position `position`: `row` is `(num_kv_heads, head_dim)`.
    pub(super) fn write(&mut self, position: usize, row: &[f32]) {
        let page = self.page_of(position / PAGE);
        for (head, row) in row.chunks_exact(self.head_dim).enumerate() {
            let at = (head * PAGE + position % PAGE) * self.head_dim;
            self.pages[page].write(at, row);
        }
    }

    /// The first `len` rows of one head in page `page` of the sequence: `(len, head_dim)`.
    pub(super) fn tile(&self, page: usize, head: usize, len: usize) -> Elements<'_> {
        let start = head * PAGE * self.head_dim;
        self.pages[self.page_of(page)].elements().slice(start..start + len * self.head_dim)
    }

    pub(super) fn bytes(&self) -> usize {
        self.pages.len() * PAGE * self.bytes_per_position()
    }

    pub(super) fn bytes_per_position(&self) -> usize {
        self.num_kv_heads * self.head_dim * self.element.size()
    }

    pub(super) fn position_eq(&self, other: &Self, position: usize) -> bool {
        (0..self.num_kv_heads).all(|head| {
            let row = |rows: &Self| {
                let at = (position % PAGE) * rows.head_dim;
                let mut row = vec![0.0f32; rows.head_dim];
                rows.tile(position / PAGE, head, PAGE).slice(at..at + rows.head_dim).widen(&mut row);
                row
            };
            row(self).iter().map(|x| x.to_bits()).eq(row(other).iter().map(|x| x.to_bits()))
        })
    }

    fn page_of(&self, page: usize) -> usize {
        self.ring.map_or(page, |ring| page % ring)
    }
}
