//! Quantized pages: `encode.cpp`, and the formats that `planes.h` reads.

use std::ops::Range;

use super::pages::{Pages, PagesParams, check_head_dim, element_number};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension};
use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::{Levels, PAGE_TOKENS, PageLayout, Side};

/// An error unless there are kernels for this layout: any format of heads that the other kernels support.
pub(super) fn check(layout: PageLayout) -> Result<(), LaunchError> {
    check_head_dim(layout.head_dim())
}

/// Channels that share a scale: 32, 64 or 128.
pub fn scale_group(layout: PageLayout) -> usize {
    layout.head_dim() * PAGE_TOKENS / layout.scales()
}

/// The kernels' `scale_shift`: a scale group has `32 << scale_shift` channels.
pub(super) fn scale_shift(layout: PageLayout) -> i32 {
    (scale_group(layout) / 32).ilog2() as i32
}

/// A format, for the kernels of attention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct FormatParams {
    upper: i32,
    lower: i32,
    levels: [i8; 64],
    unit: f32,
    centred: i32,
    scale_shift: i32,
}

impl FormatParams {
    /// Of exact pages.
    pub(super) const NONE: Self = Self { upper: 0, lower: 0, levels: [0; 64], unit: 0.0, centred: 0, scale_shift: 0 };

    pub(super) fn new(layout: PageLayout) -> Self {
        let (upper, lower) = layout.plane_bits();
        let mut levels = [0; 64];
        if let Some(known) = layout.format().levels() {
            levels[..known.len()].copy_from_slice(known);
        }
        let centred = layout.format().centred(layout.side());
        Self {
            upper: upper as i32,
            lower: lower as i32,
            levels,
            unit: layout.format().unit(),
            centred: centred.into(),
            scale_shift: scale_shift(layout),
        }
    }
}

/// Parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EncodeParams {
    tables: u64,
    rows: PagesParams,
    codes: PagesParams,
    first: i32,
    channels: i32,
    head_bytes: i32,
    element: i32,
    keys: i32,
    centred: i32,
    least_squares: i32,
    upper: i32,
    lower: i32,
    boundaries: i32,
    scale_shift: i32,
    spread: f32,
    boundary: [f32; 64],
    level: [f32; 64],
}

// SAFETY: the `Params` of encode.cpp.
unsafe impl Params for EncodeParams {}

/// Quantizes `pages` of the sequence for all `kv_heads`, to the bytes of
/// [`encode_page`](foretoken_kernels::attention::turboquant::encode_page).
///
/// * `tables`: the sequence's, with entries for these pages.
/// * `rows`: exact pages of `element`, rotated, all of whose 128 rows are written and finite.
/// * `codes`: pages of the layout.
///
/// # Errors
/// If there are no kernels for the layout, `tables` ends before an entry of these pages, there are no pages or heads or
/// more than [`MAX_BLOCKS`](crate::MAX_BLOCKS) of either, or the first page or an entry does not fit in an `i32`.
pub fn encode(
    layout: PageLayout,
    tables: DeviceSlice<u64>,
    (rows, element): (&Pages, ElementType),
    codes: &Pages,
    pages: Range<usize>,
    kv_heads: usize,
) -> Result<Launch<EncodeParams>, LaunchError> {
    check(layout)?;
    let (mut boundary, mut level) = ([0.0; 64], [0.0; 64]);
    // `q4_0` and `q8_0` round to integers.
    let book = layout.format().codebook();
    let boundaries = book.map_or(&[][..], |book| book.boundaries);
    boundary[..boundaries.len()].copy_from_slice(boundaries);
    let least_squares = match book.map(|book| book.levels) {
        Some(Levels::Integers(levels)) => {
            level.iter_mut().zip(levels).for_each(|(to, from)| *to = f32::from(*from) * layout.format().unit());
            layout.side() == Side::Values
        }
        Some(Levels::Centroids(levels)) => {
            level[..levels.len()].copy_from_slice(levels);
            false
        }
        None => false,
    };
    let (upper, lower) = layout.plane_bits();
    let params = EncodeParams {
        tables: tables.checked("the page tables", rows.entries(pages.end).max(codes.entries(pages.end)))?,
        rows: rows.params()?,
        codes: codes.params()?,
        first: dimension("the first page", pages.start)?,
        channels: layout.head_dim() as i32,
        head_bytes: layout.bytes() as i32,
        element: element_number(element),
        keys: (layout.side() == Side::Keys).into(),
        centred: layout.format().centred(layout.side()).into(),
        least_squares: least_squares.into(),
        upper: upper as i32,
        lower: lower as i32,
        boundaries: boundaries.len() as i32,
        scale_shift: scale_shift(layout),
        spread: book.map_or(0.0, |book| book.spread),
        boundary,
        level,
    };
    let grid = [layout.head_dim().div_ceil(128) as u32, blocks("K/V heads", kv_heads)?, blocks("pages", pages.len())?];
    Ok(Launch { kernel: "encode_page", grid, threads: 256, shared: 0, params })
}
