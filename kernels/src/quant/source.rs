//! Where a microkernel's weights come from: packed blocks, unpacked in registers, or memory into which they were
//! unpacked; and the products of a scale's quads.

use std::marker::PhantomData;

use crate::quant::layout::ROW_BLOCK;
use crate::quant::unpack::Format;
use crate::simd::bytes::{ByteLanes, Bytes, Scale};
use crate::simd::opaque::opaque;
use crate::simd::prefetch::{prefetch, prefetch_to};

/// What to prefetch while a block of 256 that was unpacked into memory is multiplied: 32 addresses, one per two quads.
#[derive(Clone, Copy)]
pub(super) struct Prefetched {
    pub from: *const u8,
    /// Bytes from one address to the next: less than a cache line if many parts of the rows share the memory.
    pub step: usize,
}

impl Prefetched {
    /// Part `index` of the `count` equal parts of `bytes` bytes.
    pub(super) fn part(from: *const u8, bytes: usize, index: usize, count: usize) -> Self {
        Self { from: from.wrapping_add(bytes * index / count), step: bytes.div_ceil(32 * count) }
    }
}

/// The pointer, [`opaque`] if registers hold only half a row block. If they hold all of it, one row is 20 % slower when
/// addresses are not precomputed and words shared by several scales are reloaded.
#[inline(always)]
fn opaque_if_few_registers<L: ByteLanes, T>(pointer: *const T) -> *const T {
    if const { L::MAX_ROWS < ROW_BLOCK } { opaque(pointer) } else { pointer }
}

/// A source of a block's weights.
///
/// # Safety
/// The caller of any function is inside a function with `L`'s features; the block has a scale `s`, the scale has quads
/// `g` and `g + 1`, and `cursor` is of this source.
pub(super) trait Source<L: ByteLanes, F: Format>: Sized {
    /// Scales per iteration, unrolled so that shifts and masks that depend on a scale's index are constants.
    const UNROLLED: usize;
    /// The encoding of [`Source::quad`].
    const BYTES: Bytes;
    type Cursor: Copy;
    /// Prefetches a part of the next weights, while quads `g` and `g + 1` of scale `s` are multiplied.
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

    /// Adds the integer dot products over scale `s`, times `scale`, for `R` rows, whose quants of that scale are next.
    ///
    /// # Safety
    /// As [`add_block`](super::microkernel::add_block); the block has a scale `s`.
    #[inline(always)]
    unsafe fn add_scale<const R: usize>(
        &self,
        l: L,
        x: &mut Quants,
        s: usize,
        scale: Option<Scale<L::I>>,
        sums: &mut [L::Sum; R],
    ) {
        // SAFETY: the caller entered the features; the block has scale `s`, and `R` rows of its quants are next.
        unsafe { add_quads_of_scale::<L, F, Self, R>(l, self, x, s, scale, sums) }
    }
}

/// Whether [`PackedSource`] has indices. With more rows, their sums do not fit the registers.
const fn has_indices<L: ByteLanes, F: Format, const R: usize>() -> bool {
    L::MASKS && F::INDICES.is_some() && R <= 2
}

/// Whether [`UnpackedSource`] has magnitudes and masks.
pub(super) const fn has_masks<L: ByteLanes, F: Format>() -> bool {
    L::MASKS && matches!(F::BYTES, Bytes::Biased)
}

/// Bytes of a scale's quads in an [`UnpackedSource`].
const fn unpacked_scale_bytes<L: ByteLanes, F: Format>() -> usize {
    4 * L::LANES * if has_masks::<L, F>() { 2 * F::QUADS_PER_SCALE + 1 } else { F::QUADS_PER_SCALE }
}

/// Byte offset of the factors of a block shorter than 256 in an [`UnpackedSource`], after its quads.
pub(super) const fn factors_at<L: ByteLanes, F: Format>() -> usize {
    F::SCALES * unpacked_scale_bytes::<L, F>()
}

/// Bytes of a block in an [`UnpackedSource`].
pub(super) const fn unpacked_block_bytes<L: ByteLanes, F: Format>() -> usize {
    let factors = if F::TYPE.block_len() < 256 { F::SCALES + F::HAS_MIN as usize } else { 0 };
    factors_at::<L, F>() + 4 * L::LANES * factors
}

/// Bytes of each of `streams` to prefetch while the lanes' part of a block is multiplied: in total over streams and
/// lanes, one block.
pub(super) const fn prefetched_bytes<L: ByteLanes, F: Format>(streams: usize) -> usize {
    F::TYPE.packed_block_bytes() * L::LANES / streams
}

/// Scales per iteration where a block is unpacked in registers.
const fn unrolled<L: ByteLanes, F: Format>() -> usize {
    match (L::BARRIERS, F::SCALES_DIFFER) {
        (true, true) => F::SCALES,
        // Fewer are up to 7 % slower there, and as fast where registers hold half a row block.
        (true, false) if L::MAX_ROWS == ROW_BLOCK => 8,
        _ => 2,
    }
}

/// A packed block, unpacked in registers, of one of `S` panels that are read side by side, for `R` rows.
pub(super) struct PackedSource<F, const R: usize, const S: usize> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    /// Where to prefetch [`prefetched_bytes`] from meanwhile, a line of each in turn.
    pub prefetched: [*const u8; S],
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format, const R: usize, const S: usize> Source<L, F> for PackedSource<F, R, S> {
    const UNROLLED: usize = unrolled::<L, F>();
    const BYTES: Bytes = match F::INDICES {
        Some(table) if has_indices::<L, F, R>() => Bytes::Indices(table),
        _ => F::BYTES,
    };
    type Cursor = F::Cursor<L>;

    // A few lines each time, spread evenly: there are few line fill buffers.
    #[inline(always)]
    unsafe fn prefetch(&self, s: usize, g: usize) {
        if const { S == 1 && R < F::PREFETCH_SINGLE_STREAM_FROM } {
            return;
        }
        let (step, steps) = ((s * F::QUADS_PER_SCALE + g) / 2, F::TYPE.block_len() / 8);
        let lines = S * prefetched_bytes::<L, F>(S).div_ceil(64);
        for line in step * lines / steps..(step + 1) * lines / steps {
            let at = self.prefetched[line % S].wrapping_add(line / S * 64);
            if const { S == 1 } { prefetch_to::<2>(at) } else { prefetch(at) }
        }
    }
    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: the caller entered the features; `self.block` has a scale `s`.
        unsafe { F::cursor(l, opaque_if_few_registers::<L, _>(self.block), self.lane, s) }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the scale that `cursor` is of has quad `g`.
        unsafe { if const { has_indices::<L, F, R>() } { F::indices(l, cursor, g) } else { F::quad(l, cursor, g) } }
    }
}

/// A packed block, unpacked in registers and from there into memory, for an [`UnpackedSource`].
pub(super) struct UnpackingSource<F> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    /// Space for every quad of the block.
    pub to: *mut u8,
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format> Source<L, F> for UnpackingSource<F> {
    const UNROLLED: usize = unrolled::<L, F>();
    const BYTES: Bytes = F::BYTES;
    type Cursor = (F::Cursor<L>, *mut u8);

    #[inline(always)]
    unsafe fn prefetch(&self, _: usize, _: usize) {}
    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: the caller entered the features; the block has scale `s`, and `to` space for every quad.
        unsafe {
            let to = self.to.add(s * const { unpacked_scale_bytes::<L, F>() });
            (F::cursor(l, opaque(self.block), self.lane, s), to)
        }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, (cursor, to): Self::Cursor, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the scale has quad `g`, and `to` space for it.
        unsafe {
            let quad = F::quad(l, cursor, g);
            l.store_words(to.add(g * 4 * L::LANES), quad);
            quad
        }
    }
    #[inline(always)]
    unsafe fn add_scale<const R: usize>(
        &self,
        l: L,
        x: &mut Quants,
        s: usize,
        scale: Option<Scale<L::I>>,
        sums: &mut [L::Sum; R],
    ) {
        // SAFETY: the caller entered the features; the block has scale `s`, and `to` its `unpacked_scale_bytes`.
        unsafe {
            if const { has_masks::<L, F>() } {
                assert!(R == 0, "blocks are unpacked before they are multiplied");
                let (cursor, to) = Source::<L, F>::cursor(self, l, s);
                let mut negative = l.zero();
                for g in 0..F::QUADS_PER_SCALE {
                    let quad = F::quad(l, cursor, g);
                    negative = l.store_masked(to.add(2 * g * 4 * L::LANES), quad, negative);
                }
                l.store_words(to.add(2 * F::QUADS_PER_SCALE * 4 * L::LANES), negative);
            } else {
                add_quads_of_scale::<L, F, Self, R>(l, self, x, s, scale, sums);
            }
        }
    }
}

/// A block that was unpacked into memory: quads of `LANES` rows, one after the other.
pub(super) struct UnpackedSource {
    pub from: *const u8,
    pub prefetched: Prefetched,
}

impl UnpackedSource {
    /// Block `b` of those that begin with this one.
    ///
    /// # Safety
    /// The memory has the block.
    #[inline(always)]
    pub(super) unsafe fn block<L: ByteLanes, F: Format>(&self, b: usize) -> Self {
        let Prefetched { from, step } = self.prefetched;
        let prefetched = Prefetched { from: from.wrapping_add(b * (F::TYPE.block_len() / 8) * step), step };
        // SAFETY: the caller names a block that the memory has.
        Self { from: unsafe { self.from.add(b * const { unpacked_block_bytes::<L, F>() }) }, prefetched }
    }
}

impl<L: ByteLanes, F: Format> Source<L, F> for UnpackedSource {
    // Not fully, although that is 1-2 % faster for Q4_K: together with the unpacking code, two-plane formats would
    // exceed the L1 instruction cache.
    const UNROLLED: usize = 2;
    const BYTES: Bytes = F::BYTES;
    type Cursor = *const u8;

    #[inline(always)]
    unsafe fn prefetch(&self, s: usize, g: usize) {
        let Prefetched { from, step } = self.prefetched;
        prefetch(from.wrapping_add((s * F::QUADS_PER_SCALE + g) / 2 * step));
    }
    #[inline(always)]
    unsafe fn cursor(&self, _: L, s: usize) -> *const u8 {
        // SAFETY: the memory holds every quad of the block.
        unsafe { self.from.add(s * const { unpacked_scale_bytes::<L, F>() }) }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, cursor: *const u8, g: usize) -> L::I {
        // SAFETY: the caller entered the features; the scale that begins at `cursor` has quad `g`.
        unsafe { l.load_words(cursor.add(g * 4 * L::LANES)) }
    }
    #[inline(always)]
    unsafe fn add_scale<const R: usize>(
        &self,
        l: L,
        x: &mut Quants,
        s: usize,
        scale: Option<Scale<L::I>>,
        sums: &mut [L::Sum; R],
    ) {
        // SAFETY: the caller entered the features; the memory has scale `s`, and `R` rows of its quants are next.
        unsafe {
            if const { has_masks::<L, F>() } {
                let cursor = Source::<L, F>::cursor(self, l, s);
                for g in 0..F::QUADS_PER_SCALE {
                    if g.is_multiple_of(2) {
                        Source::<L, F>::prefetch(self, s, g);
                    }
                    l.add_masked(sums, cursor, (g, F::QUADS_PER_SCALE), x.next, scale);
                    x.next = opaque_if_few_registers::<L, _>(x.next.add(x.stride));
                }
            } else {
                add_quads_of_scale::<L, F, Self, R>(l, self, x, s, scale, sums);
            }
        }
    }
}

/// A row block's quants, to be read quad after quad.
pub(super) struct Quants {
    pub next: *const i32,
    /// Words from one quad to the next: the row block's rows.
    pub stride: usize,
}

/// Adds the integer dot products of quads `g` and `g + 1` of scale `s`, times `scale`.
///
/// # Safety
/// As [`add_block`](super::microkernel::add_block); `g` and `g + 1` are quads of the scale `s`, of which `cursor` is.
#[inline(always)]
unsafe fn add_quads<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    cursor: S::Cursor,
    x: &mut Quants,
    (s, g): (usize, usize),
    scale: Option<Scale<L::I>>,
    sums: &mut [L::Sum; R],
) {
    // SAFETY: the caller entered the features; the scale has quads `g` and `g + 1`. Words of `x` can be read up to the
    // next multiple of four rows: other arrays follow the quants.
    unsafe {
        source.prefetch(s, g);
        let weights = [source.quad(l, cursor, g), source.quad(l, cursor, g + 1)];
        let quads = [x.next, x.next.add(x.stride)];
        l.add_products(sums, S::BYTES, (g, F::QUADS_PER_SCALE), weights, quads, scale);
        x.next = opaque_if_few_registers::<L, _>(quads[1].add(x.stride));
    }
}

/// [`Source::add_scale`], two quads at a time.
///
/// # Safety
/// As its own.
#[inline(always)]
unsafe fn add_quads_of_scale<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    x: &mut Quants,
    s: usize,
    scale: Option<Scale<L::I>>,
    sums: &mut [L::Sum; R],
) {
    // SAFETY: the caller entered the features; the block has scale `s`, and the scale `QUADS_PER_SCALE` quads.
    unsafe {
        let cursor = source.cursor(l, s);
        add_quads::<L, F, S, R>(l, source, cursor, x, (s, 0), scale, sums);
        add_quads::<L, F, S, R>(l, source, cursor, x, (s, 2), scale, sums);
        if const { F::QUADS_PER_SCALE == 8 } {
            let cursor = source.cursor(l, s);
            add_quads::<L, F, S, R>(l, source, cursor, x, (s, 4), scale, sums);
            add_quads::<L, F, S, R>(l, source, cursor, x, (s, 6), scale, sums);
        }
    }
}
