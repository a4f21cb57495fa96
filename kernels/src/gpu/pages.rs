//! The memory of K and V on the device: `pages.h`.

use super::{Span, Unfit};
use crate::ElementType;
use crate::turbo::PAGE_TOKENS;

/// Pages of a layer's keys, or values, by a table of their addresses on the device.
///
/// An exact page is `(kv_heads, 128, channels)` elements; a coded one `kv_heads` pages of
/// [`PageLayout::bytes`](crate::turbo::PageLayout::bytes), one after the other. What the table says is the caller's: an
/// address for every slot that a kernel reads or writes, aligned to 16 bytes.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    table: Span<u64>,
    pinned: usize,
    ring: usize,
}

impl Pages {
    /// Page `p` of the sequence in slot `p`.
    pub const fn all(table: Span<u64>) -> Self {
        Self { table, pinned: 0, ring: 0 }
    }

    /// The first `pinned` pages in slots of their own, the others in turn in the `ring` slots behind.
    pub const fn ring(table: Span<u64>, pinned: usize, ring: usize) -> Self {
        Self { table, pinned, ring }
    }

    pub(super) fn params(&self) -> Result<PagesParams, Unfit> {
        let slots = self.pinned + self.ring;
        let table = self.table.holding("the table of pages", slots.max(1))?;
        Ok(PagesParams { table, pinned: self.pinned as i32, ring: self.ring as i32 })
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PagesParams {
    table: u64,
    pinned: i32,
    ring: i32,
}

impl PagesParams {
    pub(super) const NONE: Self = Self { table: 0, pinned: 0, ring: 0 };
}

/// Bytes of an exact page.
pub const fn exact_page_bytes(element: ElementType, kv_heads: usize, channels: usize) -> usize {
    kv_heads * PAGE_TOKENS * channels * element.size()
}

pub(super) const fn element_number(element: ElementType) -> i32 {
    match element {
        ElementType::F32 => 0,
        ElementType::F16 => 1,
        ElementType::Bf16 => 2,
    }
}
