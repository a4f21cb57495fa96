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
    /// Whether weights are shifted by amounts that depend on their scale's index.
    const SHIFTED: bool;
    type Cursor: Copy;
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor;
    unsafe fn weights(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I;
}

/// A packed block.
pub(super) struct Packed<F> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format> Source<L, F> for Packed<F> {
    const SHIFTED: bool = !L::ALL_BYTES;
    type Cursor = F::Cursor<L>;

    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: as the caller's; prefetching reads nothing.
        unsafe {
            let bytes = F::TYPE.block_bytes() * 4 * F::SCALED * PANEL_ROWS / F::TYPE.block_len();
            if self.lane == 0 {
                for at in (0..bytes).step_by(64) {
                    prefetch(self.block.wrapping_add(PREFETCH + s * bytes + at));
                }
            }
            F::cursor(l, self.block, self.lane, s)
        }
    }
    #[inline(always)]
    unsafe fn weights(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { F::weights(l, cursor, g) }
    }
}

/// One that was unpacked.
pub(super) struct Staged {
    pub stage: *const u8,
    pub ahead: Ahead,
}

/// The cache lines that a tile asks for while it works: without them the next block's unpacking would wait for memory, and
/// 12 rows would cost twice what 8 do.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    from: *const u8,
    lines_per_scale: usize,
}

impl Ahead {
    pub const NOTHING: Self = Self { from: std::ptr::null(), lines_per_scale: 0 };

    /// The part of tile `tile` of `tiles`, for a block at `block`. From three tiles on computing takes so much longer than
    /// reading that the processor's own prefetching is enough, and asking costs 5 %.
    #[inline(always)]
    pub fn new<F: Format>(block: *const u8, tile: usize, tiles: usize) -> Self {
        if tiles > 2 {
            return Self::NOTHING;
        }
        let lines = (PANEL_ROWS * F::TYPE.block_bytes()).div_ceil(64).div_ceil(tiles);
        let lines_per_scale = lines.div_ceil(F::TYPE.block_len() / 4 / F::SCALED);
        Self { from: block.wrapping_add(PREFETCH + tile * lines * 64), lines_per_scale }
    }
}

impl<L: ByteLanes, F: Format> Source<L, F> for Staged {
    const SHIFTED: bool = false;
    type Cursor = *const u8;

    #[inline(always)]
    unsafe fn cursor(&self, _: L, s: usize) -> *const u8 {
        let Ahead { from, lines_per_scale } = self.ahead;
        // SAFETY: the stage holds every group of the block; prefetching reads nothing.
        unsafe {
            for line in s * lines_per_scale..(s + 1) * lines_per_scale {
                prefetch(from.wrapping_add(line * 64));
            }
            self.stage.add(s * F::SCALED * 4 * L::LANES)
        }
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

/// The integer products over scale `s`, for `R` rows.
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
            && (L::ALL_BYTES || F::BYTES == Bytes::Unsigned)
        {
            let at = if F::TYPE.block_len() == 256 { q8k::OFFSETS } else { q8_1::OFFSETS };
            for (r, from) in from.iter_mut().enumerate() {
                *from = *x.add((at + s) * stride + r) >> shift;
            }
        }
        let mut sums = l.begin(from);
        let cursor = source.cursor(l, s);
        for g in (0..F::SCALED).step_by(2) {
            let weights = [source.weights(l, cursor, g), source.weights(l, cursor, g + 1)];
            // As many words can be read as the lanes may: others follow the quants, and the pairs below.
            let x = x.add((s * F::SCALED + g) * stride);
            l.add_products(&mut sums, F::BYTES, weights, [x, x.add(stride)]);
        }
        l.end(sums)
    }
}

/// Adds what the inputs of scale `s` give to `sums`.
#[inline(always)]
unsafe fn add_scale<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    header: &Header<L>,
    x: *const i32,
    stride: usize,
    s: usize,
    sums: &mut [L::V; R],
) {
    // SAFETY: as the caller's.
    unsafe {
        let dots = dots::<L, F, S, R>(l, source, x, stride, s);
        for r in 0..R {
            sums[r] = l.fma(l.to_float(dots[r]), header.scales[s], sums[r]);
        }
    }
}

/// Adds one block's part to `y`, for `R` rows whose words of this block start at `x`.
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
            let dots = dots::<L, F, S, R>(l, source, x, stride, 0);
            for r in 0..R {
                y[r] = l.fma(l.mul(l.to_float(dots[r]), float(q8_1::SCALE, r)), header.scales[0], y[r]);
                if F::MINIMUM {
                    y[r] = l.fma(header.minimum, float(q8_1::SUM, r), y[r]);
                }
            }
            return;
        }
        let mut sums = [l.splat(0.0); R];
        let scales = 64 / F::SCALED;
        if S::SHIFTED {
            // Two at a time: the shifts that single out nibbles are then constants, half of them zero.
            for s in (0..scales).step_by(2) {
                add_scale::<L, F, S, R>(l, source, header, x, stride, s, &mut sums);
                add_scale::<L, F, S, R>(l, source, header, x, stride, s + 1, &mut sums);
            }
        } else {
            for s in 0..scales {
                add_scale::<L, F, S, R>(l, source, header, x, stride, s, &mut sums);
            }
        }
        if F::PAIRS > 0 {
            let at = if F::PAIRS == 4 { q8k::PAIRS_OF_32 } else { q8k::PAIRS_OF_16 };
            let mut totals = [l.zero(); R];
            for p in 0..F::PAIRS {
                l.add_pairs(&mut totals, header.minima[p], x.add((at + p) * stride));
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
