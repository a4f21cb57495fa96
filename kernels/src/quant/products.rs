//! What one block of a panel gives to up to 8 rows: integer products, then the float operations of `reference.rs` in their
//! order.

use super::activations::{q8_1, q8k};
use super::format::{Format, Header};
use super::lanes::{ByteLanes, Bytes};
use super::pack::PANEL_ROWS;
use crate::lanes::prefetch;
use std::marker::PhantomData;

/// How far ahead of the weights in use the next ones are asked for, in bytes: under a page, a multiple of which would meet the
/// weights in use in their set of the first-level cache.
pub(super) const PREFETCH: usize = 3584;

/// Runs of panels that are read side by side: one run of addresses keeps too few cache lines on their way.
pub(super) const STREAMS: usize = 4;

/// Where a tile's weights come from.
///
/// # Safety
/// The caller of any function is inside a function with `L`'s features; the block has a scale `s`, the scale has groups `g` and
/// `g + 1`, and `cursor` is of this source.
pub(super) trait Source<L: ByteLanes, F: Format> {
    /// Scales whose products are written out one behind the other, so that what depends on a scale's index is constant.
    const UNROLLED: usize;
    type Cursor: Copy;
    /// Asks for a part of the weights that come next, when groups `g` and `g + 1` of scale `s` are in turn.
    unsafe fn ask(&self, s: usize, g: usize);
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor;
    unsafe fn weights(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I;
}

/// A packed block.
pub(super) struct Packed<F> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    /// Quarters of blocks to ask for meanwhile, a line of each in turn.
    pub ahead: [*const u8; STREAMS],
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format> Source<L, F> for Packed<F> {
    const UNROLLED: usize = if L::BARRIERS { F::SCALES } else { 2 };
    type Cursor = F::Cursor<L>;

    // A few lines each time, as evenly as they go: the processor has not many on their way at once.
    #[inline(always)]
    unsafe fn ask(&self, s: usize, g: usize) {
        if L::LANES < PANEL_ROWS && self.lane > 0 {
            return;
        }
        let bytes = PANEL_ROWS * F::TYPE.block_bytes();
        let (step, steps) = ((s * F::SCALED + g) / 2, F::TYPE.block_len() / 8);
        let lines = STREAMS * (bytes / STREAMS).div_ceil(64);
        for line in step * lines / steps..(step + 1) * lines / steps {
            prefetch(self.ahead[line % STREAMS].wrapping_add(line / STREAMS * 64));
        }
    }
    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: as the caller's.
        unsafe { F::cursor(l, self.block, self.lane, s) }
    }
    #[inline(always)]
    unsafe fn weights(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { F::weights(l, cursor, g) }
    }
}

/// One that was unpacked.
pub(super) struct Staged(pub *const u8);

impl<L: ByteLanes, F: Format> Source<L, F> for Staged {
    const UNROLLED: usize = 1;
    type Cursor = *const u8;

    #[inline(always)]
    unsafe fn ask(&self, _: usize, _: usize) {}
    #[inline(always)]
    unsafe fn cursor(&self, _: L, s: usize) -> *const u8 {
        // SAFETY: the stage holds every group of the block.
        unsafe { self.0.add(s * F::SCALED * 4 * L::LANES) }
    }
    #[inline(always)]
    unsafe fn weights(&self, l: L, cursor: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { l.load_words(cursor.add(g * 4 * L::LANES)) }
    }
}

pub(super) const fn block_words<F: Format>() -> usize {
    if F::TYPE.block_len() == 256 { q8k::WORDS } else { q8_1::WORDS }
}

/// Adds the integer products of groups `g` and `g + 1` of scale `s`.
///
/// # Safety
/// As [`add_block`]; `g` and `g + 1` are groups of the scale `s`, of which `cursor` is.
#[inline(always)]
unsafe fn add_groups<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    cursor: S::Cursor,
    x: *const i32,
    stride: usize,
    (s, g): (usize, usize),
    sums: &mut [L::Sum; R],
) {
    // SAFETY: as the caller's. As many words can be read as the lanes may: others follow the quants, and the pairs below.
    unsafe {
        let x = x.add((s * F::SCALED + g) * stride);
        source.ask(s, g);
        let weights = [source.weights(l, cursor, g), source.weights(l, cursor, g + 1)];
        l.add_products(sums, F::BYTES, (g, F::SCALED), weights, [x, x.add(stride)]);
    }
}

/// The integer products over scale `s`, for `R` rows.
///
/// # Safety
/// As [`add_block`]; the block has a scale `s`.
#[inline(always)]
unsafe fn dots<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    x: *const i32,
    stride: usize,
    s: usize,
) -> [L::I; R] {
    // SAFETY: as the caller's; a block has the words that the activations' table lists.
    unsafe {
        let mut from = [0; R];
        if let Some(shift) = F::OFFSET
            && (L::ALL_BYTES || F::BYTES != Bytes::Biased)
        {
            let at = if F::TYPE.block_len() == 256 { q8k::OFFSETS } else { q8_1::OFFSETS };
            for (r, from) in from.iter_mut().enumerate() {
                *from = *x.add((at + s) * stride + r) >> shift;
            }
        }
        let mut sums = l.begin(from);
        let cursor = source.cursor(l, s);
        add_groups::<L, F, S, R>(l, source, cursor, x, stride, (s, 0), &mut sums);
        add_groups::<L, F, S, R>(l, source, cursor, x, stride, (s, 2), &mut sums);
        if F::SCALED == 8 {
            add_groups::<L, F, S, R>(l, source, cursor, x, stride, (s, 4), &mut sums);
            add_groups::<L, F, S, R>(l, source, cursor, x, stride, (s, 6), &mut sums);
        }
        l.end(sums)
    }
}

/// Adds one block's part to `y`, for `R` rows whose words of this block start at `x`.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `source` and `header` are of one block of format `F`. `x` points at the
/// first of `R` rows in a block of activations, laid out for a tile of `stride` rows.
#[inline(always)]
pub(super) unsafe fn add_block<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    header: &Header<L>,
    x: *const i32,
    stride: usize,
    y: &mut [L::V; R],
) {
    // SAFETY: as the caller's; a block has the words that the activations' table lists.
    unsafe {
        let float = |index: usize, r: usize| l.splat(f32::from_bits(*x.add(index * stride + r) as u32));
        if F::TYPE.block_len() == 32 {
            let products = dots::<L, F, S, R>(l, source, x, stride, 0);
            for r in 0..R {
                let scaled = l.mul(l.to_float(products[r]), float(q8_1::SCALE, r));
                y[r] = l.fma(scaled, header.scales[0], y[r]);
                if F::MINIMUM {
                    y[r] = l.fma(header.minimum, float(q8_1::SUM, r), y[r]);
                }
            }
            return;
        }
        let mut sums = [l.splat(0.0); R];
        for first in (0..F::SCALES).step_by(S::UNROLLED) {
            macro_rules! scales {
                ($($s:literal)*) => {$(
                    let products = dots::<L, F, S, R>(l, source, x, stride, first + $s);
                    for r in 0..R {
                        sums[r] = l.barrier(l.fma(l.to_float(products[r]), header.scales[first + $s], sums[r]));
                    }
                )*};
            }
            scales!(0);
            if S::UNROLLED > 1 {
                scales!(1);
            }
            if S::UNROLLED > 2 {
                scales!(2 3 4 5 6 7);
            }
            if S::UNROLLED > 8 {
                scales!(8 9 10 11 12 13 14 15);
            }
        }
        if F::PAIRS > 0 {
            let at = if F::PAIRS == 4 { q8k::PAIRS_OF_32 } else { q8k::PAIRS_OF_16 };
            let mut totals = [l.zero(); R];
            for pair in 0..F::PAIRS {
                l.add_pairs(&mut totals, header.minima[pair], x.add((at + pair) * stride));
            }
            for r in 0..R {
                sums[r] = l.fma(l.to_float(totals[r]), header.minimum, sums[r]);
            }
        }
        for r in 0..R {
            y[r] = l.fma(sums[r], float(q8k::SCALE, r), y[r]);
        }
    }
}
