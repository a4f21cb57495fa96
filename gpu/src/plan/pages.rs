//! The memory of K and V on the device: `pages.h`.

use crate::launch::{LaunchError, dimension};
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::PAGE_TOKENS;

/// Head widths for which there are kernels.
pub const HEAD_DIMS: [usize; 5] = [32, 64, 128, 256, 512];

/// An error unless there are kernels for heads of `width`.
pub(super) fn check_head_dim(width: usize) -> Result<(), LaunchError> {
    if HEAD_DIMS.contains(&width) {
        return Ok(());
    }
    Err(LaunchError(format!("no kernels for heads of {width}; supported are 32, 64, 128, 256 and 512")))
}

/// The kernel of this name for heads of a width, an error as [`check_head_dim`]'s: `of_head_dim!("rows", 32)` is
/// `rows_32`.
macro_rules! of_head_dim {
    ($kernel:literal, $width:expr) => {
        $crate::plan::pages::check_head_dim($width).map(|()| match $width {
            32 => concat!($kernel, "_32"),
            64 => concat!($kernel, "_64"),
            128 => concat!($kernel, "_128"),
            256 => concat!($kernel, "_256"),
            _ => concat!($kernel, "_512"),
        })
    };
}

pub(super) use of_head_dim;

/// Pages of a layer's keys or values: a table of addresses on the device, among those of a sequence.
///
/// An exact page is `(kv_heads, 128, channels)` elements; a quantized one is `kv_heads` pages of
/// [`PageLayout::bytes`](foretoken_kernels::attention::turboquant::PageLayout::bytes), one after the other. The caller
/// guarantees an address, aligned to 16 bytes, for every slot that a kernel reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Pages {
    start: usize,
    pinned: usize,
    ring: usize,
}

impl Pages {
    /// Page `p` of the sequence is in slot `p`; slot 0 is entry `start` of the sequence's tables.
    pub const fn all(start: usize) -> Self {
        Self { start, pinned: 0, ring: 0 }
    }

    /// The first `pinned` pages are in the first slots; a later page `p` is in slot `pinned + (p - pinned) % ring`.
    pub const fn ring(start: usize, pinned: usize, ring: usize) -> Self {
        Self { start, pinned, ring }
    }

    /// Entries of a sequence's tables up to the last one of its first `pages` pages.
    pub(super) fn entries(&self, pages: usize) -> usize {
        let slots = if self.ring > 0 { pages.min(self.pinned.saturating_add(self.ring)) } else { pages };
        self.start.saturating_add(slots)
    }

    pub(super) fn params(&self) -> Result<PagesParams, LaunchError> {
        Ok(PagesParams {
            start: dimension("the table's first entry", self.start)?,
            pinned: dimension("the pinned pages", self.pinned)?,
            ring: dimension("the ring", self.ring)?,
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct PagesParams {
    start: i32,
    pinned: i32,
    ring: i32,
}

impl PagesParams {
    pub(super) const NONE: Self = Self { start: 0, pinned: 0, ring: 0 };
}

/// Bytes of an exact page.
pub const fn exact_page_bytes(element: ElementType, kv_heads: usize, channels: usize) -> usize {
    kv_heads * PAGE_TOKENS * channels * element.size()
}

/// The number of an element type in the kernels' parameters.
pub(super) const fn element_number(element: ElementType) -> i32 {
    match element {
        ElementType::F32 => 0,
        ElementType::F16 => 1,
        ElementType::Bf16 => 2,
    }
}
