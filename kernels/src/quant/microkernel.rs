//! One block of a panel times up to 8 rows: integer dot products, then the float operations of `scalar.rs` in their order.

use crate::quant::layout::{PANEL_ROWS, q8_1, q8k};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::bytes::{ByteLanes, Bytes};
use crate::simd::prefetch::prefetch;
use std::marker::PhantomData;

/// Prefetch distance in bytes. Less than a 4 KiB page: at a multiple of it, a prefetched line would fall in the
/// first-level cache set of a line in use.
pub(super) const PREFETCH_DISTANCE: usize = 3584;

/// Runs of panels that are read side by side: a single sequential stream keeps too few cache lines in flight.
pub(super) const STREAMS: usize = 4;

/// A source of a block's weights.
///
/// # Safety
/// The caller of any function is inside a function with `L`'s features; the block has a scale `s`, the scale has quads
/// `g` and `g + 1`, and `cursor` is of this source.
pub(super) trait Source<L: ByteLanes, F: Format> {
    /// Scales per iteration, unrolled so that shifts and masks that depend on a scale's index are constants.
    const UNROLLED: usize;
    type Cursor: Copy;
    /// Prefetches a part of the weights that come next, while quads `g` and `g + 1` of scale `s` are multiplied.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn prefetch(&self, s: usize, g: usize);
    /// The place of scale `s`'s quads.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor;
    /// Quad `g`: four unsigned bytes per lane.
    ///
    /// # Safety
    /// As the trait's.
    unsafe fn quad(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I;
}

/// A packed block, unpacked in registers.
pub(super) struct PackedSource<F> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    /// Quarters of blocks to prefetch meanwhile, a line of each in turn.
    pub prefetched: [*const u8; STREAMS],
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format> Source<L, F> for PackedSource<F> {
    const UNROLLED: usize = if L::BARRIERS { F::SCALES } else { 2 };
    type Cursor = F::Cursor<L>;

    // A few lines each time, spread evenly: the line fill buffers are few.
    #[inline(always)]
    unsafe fn prefetch(&self, s: usize, g: usize) {
        if L::LANES < PANEL_ROWS && self.lane > 0 {
            return;
        }
        let bytes = PANEL_ROWS * F::TYPE.block_bytes();
        let (step, steps) = ((s * F::QUADS_PER_SCALE + g) / 2, F::TYPE.block_len() / 8);
        let lines = STREAMS * (bytes / STREAMS).div_ceil(64);
        for line in step * lines / steps..(step + 1) * lines / steps {
            prefetch(self.prefetched[line % STREAMS].wrapping_add(line / STREAMS * 64));
        }
    }
    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: as the caller's.
        unsafe { F::cursor(l, self.block, self.lane, s) }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { F::quad(l, cursor, g) }
    }
}

/// A block that was unpacked into memory: quads of `LANES` rows, one after the other.
pub(super) struct UnpackedSource(pub *const u8);

impl<L: ByteLanes, F: Format> Source<L, F> for UnpackedSource {
    const UNROLLED: usize = 1;
    type Cursor = *const u8;

    #[inline(always)]
    unsafe fn prefetch(&self, _: usize, _: usize) {}
    #[inline(always)]
    unsafe fn cursor(&self, _: L, s: usize) -> *const u8 {
        // SAFETY: the memory holds every quad of the block.
        unsafe { self.0.add(s * F::QUADS_PER_SCALE * 4 * L::LANES) }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, cursor: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { l.load_words(cursor.add(g * 4 * L::LANES)) }
    }
}

/// Words of an activation block per row.
pub(super) const fn block_words<F: Format>() -> usize {
    if F::TYPE.block_len() == 256 { q8k::WORDS } else { q8_1::WORDS }
}

/// Adds the integer dot products of quads `g` and `g + 1` of scale `s`.
///
/// # Safety
/// As [`add_block`]; `g` and `g + 1` are quads of the scale `s`, of which `cursor` is.
#[inline(always)]
unsafe fn add_quads<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    cursor: S::Cursor,
    x: *const i32,
    stride: usize,
    (s, g): (usize, usize),
    sums: &mut [L::Sum; R],
) {
    // SAFETY: as the caller's. Words can be read up to the next multiple of four rows: other arrays follow the quants.
    unsafe {
        let x = x.add((s * F::QUADS_PER_SCALE + g) * stride);
        source.prefetch(s, g);
        let weights = [source.quad(l, cursor, g), source.quad(l, cursor, g + 1)];
        l.add_products(sums, F::BYTES, (g, F::QUADS_PER_SCALE), weights, [x, x.add(stride)]);
    }
}

/// The integer dot products over scale `s`, for `R` rows.
///
/// # Safety
/// As [`add_block`]; the block has a scale `s`.
#[inline(always)]
unsafe fn scale_dots<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    x: *const i32,
    stride: usize,
    s: usize,
) -> [L::I; R] {
    // SAFETY: as the caller's; an activation block has the words that `layout.rs` lists.
    unsafe {
        let mut from = [0; R];
        if F::ZERO_POINT.is_some() && (L::ALL_BYTES || F::BYTES != Bytes::Biased) {
            let at = if F::TYPE.block_len() == 256 { q8k::OFFSETS } else { q8_1::OFFSETS };
            for (r, from) in from.iter_mut().enumerate() {
                *from = *x.add((at + s) * stride + r) >> F::OFFSET_SHIFT;
            }
        }
        let mut sums = l.begin(from);
        let cursor = source.cursor(l, s);
        add_quads::<L, F, S, R>(l, source, cursor, x, stride, (s, 0), &mut sums);
        add_quads::<L, F, S, R>(l, source, cursor, x, stride, (s, 2), &mut sums);
        if F::QUADS_PER_SCALE == 8 {
            add_quads::<L, F, S, R>(l, source, cursor, x, stride, (s, 4), &mut sums);
            add_quads::<L, F, S, R>(l, source, cursor, x, stride, (s, 6), &mut sums);
        }
        l.end(sums)
    }
}

/// Adds one block's products to `y`, for `R` rows whose words of this block start at `x`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `source` and `scales` are of one block of format `F`. `x` points
/// at the first of `R` rows in an activation block of a row block of `stride` rows.
#[inline(always)]
pub(super) unsafe fn add_block<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    scales: &BlockScales<L>,
    x: *const i32,
    stride: usize,
    y: &mut [L::V; R],
) {
    // SAFETY: as the caller's; an activation block has the words that `layout.rs` lists.
    unsafe {
        let float = |index: usize, r: usize| l.splat(f32::from_bits(*x.add(index * stride + r) as u32));
        if F::TYPE.block_len() == 32 {
            let products = scale_dots::<L, F, S, R>(l, source, x, stride, 0);
            for r in 0..R {
                let scaled = l.mul(l.to_float(products[r]), float(q8_1::SCALE, r));
                y[r] = l.fma(scaled, scales.scales[0], y[r]);
                if F::HAS_MIN {
                    y[r] = l.fma(scales.dmin, float(q8_1::SUM, r), y[r]);
                }
            }
            return;
        }
        let mut sums = [l.splat(0.0); R];
        for first in (0..F::SCALES).step_by(S::UNROLLED) {
            macro_rules! add_scales {
                ($($s:literal)*) => {$(
                    let products = scale_dots::<L, F, S, R>(l, source, x, stride, first + $s);
                    for r in 0..R {
                        sums[r] = l.barrier(l.fma(l.to_float(products[r]), scales.scales[first + $s], sums[r]));
                    }
                )*};
            }
            add_scales!(0);
            if S::UNROLLED > 1 {
                add_scales!(1);
            }
            if S::UNROLLED > 2 {
                add_scales!(2 3 4 5 6 7);
            }
            if S::UNROLLED > 8 {
                add_scales!(8 9 10 11 12 13 14 15);
            }
        }
        if F::MIN_PAIRS > 0 {
            let at = if F::MIN_PAIRS == 4 { q8k::BSUMS_OF_32 } else { q8k::BSUMS_OF_16 };
            let mut totals = [l.zero(); R];
            for pair in 0..F::MIN_PAIRS {
                l.add_pairs(&mut totals, scales.mins[pair], x.add((at + pair) * stride));
            }
            for r in 0..R {
                sums[r] = l.fma(l.to_float(totals[r]), scales.dmin, sums[r]);
            }
        }
        for r in 0..R {
            y[r] = l.fma(sums[r], float(q8k::SCALE, r), y[r]);
        }
    }
}
