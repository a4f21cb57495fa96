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
const PREFETCH: usize = 3584;

/// Where a tile's weights come from.
pub(super) trait Source<L: ByteLanes, F: Format> {
    /// Scales whose products are written out one behind the other, so that what depends on a scale's index is constant.
    const UNROLLED: usize;
    type Cursor: Copy;
    /// Asks for the weights that come next, when groups `g` and `g + 1` of scale `s` are in turn.
    unsafe fn ask(&self, s: usize, g: usize);
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor;
    unsafe fn weights(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I;
}

/// A packed block.
#[derive(Clone, Copy)]
pub(super) struct Packed<F> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format> Source<L, F> for Packed<F> {
    const UNROLLED: usize = if L::SETTLES || F::PERIOD == 1 { F::PERIOD } else { 2 };
    type Cursor = F::Cursor<L>;

    // A few lines each time, as evenly as they go: the processor has not many on their way at once.
    #[inline(always)]
    unsafe fn ask(&self, s: usize, g: usize) {
        if L::LANES < PANEL_ROWS && self.lane > 0 {
            return;
        }
        let period = <Self as Source<L, F>>::UNROLLED * F::SCALED / 2;
        let bytes = F::TYPE.block_bytes() * 8 * PANEL_ROWS / F::TYPE.block_len();
        let step = (s * F::SCALED + g) / 2;
        let from = PREFETCH + step / period * period * bytes;
        for line in (step % period * bytes).div_ceil(64)..((step % period + 1) * bytes).div_ceil(64) {
            prefetch(self.block.wrapping_add(from + line * 64));
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
#[inline(always)]
unsafe fn add_groups<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize, const P: usize>(
    l: L,
    sources: &[S; P],
    cursors: &[S::Cursor; P],
    x: *const i32,
    stride: usize,
    (s, g): (usize, usize),
    sums: &mut [[L::Sum; R]; P],
) {
    // SAFETY: as the caller's. As many words can be read as the lanes may: others follow the quants, and the pairs below.
    unsafe {
        let x = x.add((s * F::SCALED + g) * stride);
        for p in 0..P {
            sources[p].ask(s, g);
            let weights = [sources[p].weights(l, cursors[p], g), sources[p].weights(l, cursors[p], g + 1)];
            l.add_products(&mut sums[p], F::BYTES, weights, [x, x.add(stride)]);
            for sum in &mut sums[p] {
                *sum = l.settle_words(*sum);
            }
        }
    }
}

/// The integer products over scale `s` of `P` panels, for `R` rows.
#[inline(always)]
unsafe fn dots<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize, const P: usize>(
    l: L,
    sources: &[S; P],
    x: *const i32,
    stride: usize,
    s: usize,
) -> [[L::I; R]; P] {
    // SAFETY: as the caller's; a block has the words that the activations' table lists.
    unsafe {
        let mut from = [0; R];
        if let Some(shift) = F::OFFSET
            && (L::ALL_BYTES || F::BYTES == Bytes::Unsigned)
        {
            let at = if F::TYPE.block_len() == 256 { q8k::OFFSETS } else { q8_1::OFFSETS };
            for (r, from) in from.iter_mut().enumerate() {
                *from = *x.add((at + s) * stride + r) >> shift;
            }
        }
        let mut sums = [l.begin(from); P];
        let mut cursors = [sources[0].cursor(l, s); P];
        for p in 1..P {
            cursors[p] = sources[p].cursor(l, s);
        }
        add_groups::<L, F, S, R, P>(l, sources, &cursors, x, stride, (s, 0), &mut sums);
        add_groups::<L, F, S, R, P>(l, sources, &cursors, x, stride, (s, 2), &mut sums);
        if F::SCALED == 8 {
            add_groups::<L, F, S, R, P>(l, sources, &cursors, x, stride, (s, 4), &mut sums);
            add_groups::<L, F, S, R, P>(l, sources, &cursors, x, stride, (s, 6), &mut sums);
        }
        let mut dots = [l.end(sums[0]); P];
        for p in 1..P {
            dots[p] = l.end(sums[p]);
        }
        dots
    }
}

/// Adds what the inputs of scale `s` give to `sums`.
#[inline(always)]
unsafe fn add_scale<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize, const P: usize>(
    l: L,
    sources: &[S; P],
    headers: &[Header<L>; P],
    x: *const i32,
    stride: usize,
    s: usize,
    sums: &mut [[L::V; R]; P],
) {
    // SAFETY: as the caller's.
    unsafe {
        let dots = dots::<L, F, S, R, P>(l, sources, x, stride, s);
        for p in 0..P {
            for r in 0..R {
                sums[p][r] = l.settle_floats(l.fma(l.to_float(dots[p][r]), headers[p].scales[s], sums[p][r]));
            }
        }
    }
}

/// Adds one block's part of `P` panels to `y`, for `R` rows whose words of this block start at `x`.
#[inline(always)]
pub(super) unsafe fn add_block<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize, const P: usize>(
    l: L,
    sources: &[S; P],
    headers: &[Header<L>; P],
    x: *const i32,
    stride: usize,
    y: &mut [[L::V; R]; P],
) {
    // SAFETY: as the caller's; a block has the words that the activations' table lists.
    unsafe {
        let float = |index: usize, r: usize| l.splat(f32::from_bits(*x.add(index * stride + r) as u32));
        if F::TYPE.block_len() == 32 {
            let dots = dots::<L, F, S, R, P>(l, sources, x, stride, 0);
            for p in 0..P {
                for r in 0..R {
                    let scaled = l.mul(l.to_float(dots[p][r]), float(q8_1::SCALE, r));
                    y[p][r] = l.fma(scaled, headers[p].scales[0], y[p][r]);
                    if F::MINIMUM {
                        y[p][r] = l.fma(headers[p].minimum, float(q8_1::SUM, r), y[p][r]);
                    }
                }
            }
            return;
        }
        let mut sums = [[l.splat(0.0); R]; P];
        let scales = 64 / F::SCALED;
        for first in (0..scales).step_by(S::UNROLLED) {
            macro_rules! scales {
                ($($s:literal)*) => {
                    $(add_scale::<L, F, S, R, P>(l, sources, headers, x, stride, first + $s, &mut sums);)*
                };
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
        for p in 0..P {
            if F::PAIRS > 0 {
                let at = if F::PAIRS == 4 { q8k::PAIRS_OF_32 } else { q8k::PAIRS_OF_16 };
                let mut totals = [l.zero(); R];
                for pair in 0..F::PAIRS {
                    l.add_pairs(&mut totals, headers[p].minima[pair], x.add((at + pair) * stride));
                }
                for r in 0..R {
                    sums[p][r] = l.fma(l.to_float(totals[r]), headers[p].minimum, sums[p][r]);
                }
            }
            for r in 0..R {
                y[p][r] = l.fma(sums[p][r], float(q8k::SCALE, r), y[p][r]);
            }
        }
    }
}
