//! One block of a panel times up to 8 rows: integer sums, then the float operations of `scalar.rs` in their order.

use crate::quant::layout::{PAIRS, ROW_BLOCK, q8_1, q8k};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::bytes::{ByteLanes, Bytes, Scale};
use crate::simd::opaque::opaque;
use crate::simd::prefetch::{prefetch, prefetch_to};
use std::marker::PhantomData;

/// What to prefetch while a block of 256 that was unpacked into memory is multiplied: 32 cache lines, one per two
/// quads.
#[derive(Clone, Copy)]
pub(super) struct Prefetched {
    pub from: *const u8,
    /// Bytes from one line to the next.
    pub step: usize,
}

impl Prefetched {
    /// Part `index` of the `count` equal parts of `bytes` bytes.
    pub(super) fn part(from: *const u8, bytes: usize, index: usize, count: usize) -> Self {
        Self { from: from.wrapping_add(bytes * index / count), step: bytes.div_ceil(32 * count) }
    }

    /// Prefetches with the quads `g` and `g + 1` of scale `s`.
    #[inline(always)]
    fn prefetch<F: Format>(self, s: usize, g: usize) {
        prefetch(self.from.wrapping_add((s * F::QUADS_PER_SCALE + g) / 2 * self.step));
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
pub(super) trait Source<L: ByteLanes, F: Format> {
    /// Scales per iteration, unrolled so that shifts and masks that depend on a scale's index are constants.
    const UNROLLED: usize;
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
    type Cursor = F::Cursor<L>;

    // A few lines each time, spread evenly: there are few line fill buffers.
    #[inline(always)]
    unsafe fn prefetch(&self, s: usize, g: usize) {
        if S == 1 && R < F::PREFETCH_ONE_RUN_FROM {
            return;
        }
        let (step, steps) = ((s * F::QUADS_PER_SCALE + g) / 2, F::TYPE.block_len() / 8);
        let lines = S * prefetched_bytes::<L, F>(S).div_ceil(64);
        for line in step * lines / steps..(step + 1) * lines / steps {
            let at = self.prefetched[line % S].wrapping_add(line / S * 64);
            if S == 1 { prefetch_to::<2>(at) } else { prefetch(at) }
        }
    }
    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: as the caller's.
        unsafe { F::cursor(l, opaque_if_few_registers::<L, _>(self.block), self.lane, s) }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, cursor: Self::Cursor, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { F::quad(l, cursor, g) }
    }
}

/// A packed block, unpacked in registers and from there into memory, for an [`UnpackedSource`].
pub(super) struct UnpackingSource<F> {
    /// The block, and the first of the panel's rows that the lanes hold.
    pub block: *const u8,
    pub lane: usize,
    /// Space for every quad of the block.
    pub to: *mut u8,
    pub prefetched: Prefetched,
    pub format: PhantomData<F>,
}

impl<L: ByteLanes, F: Format> Source<L, F> for UnpackingSource<F> {
    const UNROLLED: usize = unrolled::<L, F>();
    type Cursor = (F::Cursor<L>, *mut u8);

    #[inline(always)]
    unsafe fn prefetch(&self, s: usize, g: usize) {
        self.prefetched.prefetch::<F>(s, g);
    }
    #[inline(always)]
    unsafe fn cursor(&self, l: L, s: usize) -> Self::Cursor {
        // SAFETY: as the caller's; `to` has space for every quad.
        unsafe {
            let to = self.to.add(s * F::QUADS_PER_SCALE * 4 * L::LANES);
            (F::cursor(l, opaque(self.block), self.lane, s), to)
        }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, (cursor, to): Self::Cursor, g: usize) -> L::I {
        // SAFETY: as the caller's; `to` has space for the scale's quads.
        unsafe {
            let quad = F::quad(l, cursor, g);
            l.store_words(to.add(g * 4 * L::LANES), quad);
            quad
        }
    }
}

/// A block that was unpacked into memory: quads of `LANES` rows, one after the other.
pub(super) struct UnpackedSource {
    pub from: *const u8,
    pub prefetched: Prefetched,
}

impl<L: ByteLanes, F: Format> Source<L, F> for UnpackedSource {
    // Not fully, although that is 1-2 % faster for Q4_K: together with the unpacking code, two-plane formats would
    // exceed the L1 instruction cache.
    const UNROLLED: usize = 2;
    type Cursor = *const u8;

    #[inline(always)]
    unsafe fn prefetch(&self, s: usize, g: usize) {
        self.prefetched.prefetch::<F>(s, g);
    }
    #[inline(always)]
    unsafe fn cursor(&self, _: L, s: usize) -> *const u8 {
        // SAFETY: the memory holds every quad of the block.
        unsafe { self.from.add(s * F::QUADS_PER_SCALE * 4 * L::LANES) }
    }
    #[inline(always)]
    unsafe fn quad(&self, l: L, cursor: *const u8, g: usize) -> L::I {
        // SAFETY: as the caller's.
        unsafe { l.load_words(cursor.add(g * 4 * L::LANES)) }
    }
}

/// Words per row of the activation blocks of a block of weights.
pub(super) const fn block_words<F: Format>() -> usize {
    if F::TYPE.block_len() == 256 { q8k::WORDS } else { F::TYPE.block_len() / 32 * q8_1::WORDS }
}

/// Scales of a format with blocks shorter than 256, per activation block of 32.
const fn scales_per_block<F: Format>() -> usize {
    8 / F::QUADS_PER_SCALE
}

/// Initial value of the sum of scale `s` of an activation block of 32, for the row of `x`: minus the zero point times
/// the sum of the scale's quants.
///
/// # Safety
/// `x` points at a row of such a block, of a row block of `stride` rows; the block has a scale `s`.
#[inline(always)]
unsafe fn offset<F: Format>(x: *const i32, stride: usize, s: usize) -> i32 {
    // SAFETY: an activation block has the words that `layout.rs` lists.
    let word = |index: usize| unsafe { *x.add(index * stride) };
    let offset = match (F::QUADS_PER_SCALE, s) {
        (4, 0) => word(q8_1::OFFSET_OF_16),
        (4, _) => word(q8_1::OFFSETS) - word(q8_1::OFFSET_OF_16),
        _ => word(q8_1::OFFSETS),
    };
    offset >> F::OFFSET_SHIFT
}

/// A row block's quants, to be read quad after quad.
struct Quants {
    next: *const i32,
    /// Words from one quad to the next: the row block's rows.
    stride: usize,
}

/// Adds the integer dot products of quads `g` and `g + 1` of scale `s`, times `scale`.
///
/// # Safety
/// As [`add_block`]; `g` and `g + 1` are quads of the scale `s`, of which `cursor` is.
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
    // SAFETY: as the caller's. Words can be read up to the next multiple of four rows: other arrays follow the quants.
    unsafe {
        source.prefetch(s, g);
        let weights = [source.quad(l, cursor, g), source.quad(l, cursor, g + 1)];
        let quads = [x.next, x.next.add(x.stride)];
        l.add_products(sums, F::BYTES, (g, F::QUADS_PER_SCALE), weights, quads, scale);
        x.next = opaque_if_few_registers::<L, _>(quads[1].add(x.stride));
    }
}

/// Adds the integer dot products over scale `s`, times `scale`, for `R` rows, whose quants of that scale are next.
///
/// # Safety
/// As [`add_block`]; the block has a scale `s`.
#[inline(always)]
unsafe fn add_scale<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    x: &mut Quants,
    s: usize,
    scale: Option<Scale<L::I>>,
    sums: &mut [L::Sum; R],
) {
    // SAFETY: as the caller's.
    unsafe {
        let cursor = source.cursor(l, s);
        add_quads::<L, F, S, R>(l, source, cursor, x, (s, 0), scale, sums);
        add_quads::<L, F, S, R>(l, source, cursor, x, (s, 2), scale, sums);
        if F::QUADS_PER_SCALE == 8 {
            add_quads::<L, F, S, R>(l, source, cursor, x, (s, 4), scale, sums);
            add_quads::<L, F, S, R>(l, source, cursor, x, (s, 6), scale, sums);
        }
    }
}

/// The sums over the block's pairs of `i16` times the activations' bsums, for `R` rows.
///
/// # Safety
/// As [`add_block`]; a block of 256, with `pairs` of this many sums.
#[inline(always)]
unsafe fn pair_totals<L: ByteLanes, const R: usize>(l: L, pairs: &[L::I], x: *const i32, stride: usize) -> [L::I; R] {
    // SAFETY: as the caller's; an activation block has the words that `layout.rs` lists.
    unsafe {
        let at = if pairs.len() == 4 { q8k::BSUMS_OF_32 } else { q8k::BSUMS_OF_16 };
        let mut totals = [l.zero(); R];
        for (p, pair) in pairs.iter().enumerate() {
            l.add_pairs(&mut totals, *pair, x.add((at + p) * stride));
        }
        totals
    }
}

/// Whether weights are multiplied as stored, so that the zero point must be subtracted from the sums.
const fn has_offset<L: ByteLanes, F: Format>() -> bool {
    F::ZERO_POINT.is_some()
        && !(L::OFFSETS && F::OFFSETS_SHIFT.is_some())
        && (L::ALL_BYTES || !matches!(F::BYTES, Bytes::Biased))
}

/// The `f32` of `index` in an activation block, for row `r`.
///
/// # Safety
/// As [`add_block`]; the activation block has the index, and the row block the row.
#[inline(always)]
unsafe fn float<L: ByteLanes>(l: L, x: *const i32, stride: usize, index: usize, r: usize) -> L::V {
    // SAFETY: as the caller's.
    unsafe { l.splat(f32::from_bits(*x.add(index * stride + r) as u32)) }
}

/// Adds one block's products to `y`, of a format with blocks of 32 or a multiple of 32.
///
/// # Safety
/// As [`add_block`].
#[inline(always)]
pub(super) unsafe fn add_short_block<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    scales: &BlockScales<L>,
    x: *const i32,
    stride: usize,
    y: &mut [L::V; R],
) {
    macro_rules! add_scales {
        ($($s:literal)*) => {$({
            let s = $s % scales_per_block::<F>();
            // The scale's activation block.
            let x = x.add($s / scales_per_block::<F>() * q8_1::WORDS * stride);
            let mut from = [0; R];
            if has_offset::<L, F>() {
                for (r, from) in from.iter_mut().enumerate() {
                    *from = offset::<F>(x.add(r), stride, s);
                }
            }
            let mut quants = Quants { next: x.add(s * F::QUADS_PER_SCALE * stride), stride };
            let mut sums = l.begin(from);
            add_scale::<L, F, S, R>(l, source, &mut quants, $s, None, &mut sums);
            let dots = l.end(sums);
            for r in 0..R {
                let scaled = l.mul(l.to_float(dots[r]), float(l, x, stride, q8_1::SCALE, r));
                y[r] = l.fma(scaled, scales.d[$s], y[r]);
                if F::HAS_MIN {
                    y[r] = l.fma(scales.dmin, float(l, x, stride, q8_1::SUM, r), y[r]);
                }
            }
        })*};
    }
    // SAFETY: as the caller's; an activation block has the words that `layout.rs` lists.
    unsafe {
        add_scales!(0);
        if F::SCALES > 1 {
            add_scales!(1 2 3);
        }
    }
}

/// The scales as pairs of `i16`, in the order of the bsums.
///
/// # Safety
/// As [`add_block`], of a format with blocks of 256.
#[inline(always)]
unsafe fn scale_pairs<L: ByteLanes, F: Format>(l: L, scales: &BlockScales<L>) -> [L::I; 8] {
    // SAFETY: as the caller's.
    unsafe {
        let mut pairs = [l.zero(); 8];
        for (p, pair) in pairs[..F::SCALES / 2].iter_mut().enumerate() {
            let (a, b) = PAIRS[p % 4];
            *pair = l.pair_scales(scales.scales[p / 4 * 8 + a], scales.scales[p / 4 * 8 + b]);
        }
        pairs
    }
}

/// The end of [`add_block`] for `R` rows, from the products' sums and [`scale_pairs`].
///
/// # Safety
/// As [`add_block`], of a format with blocks of 256.
#[inline(always)]
unsafe fn end_rows<L: ByteLanes, F: Format, const R: usize>(
    l: L,
    mut sums: [L::I; R],
    scales: &BlockScales<L>,
    pairs: &[L::I; 8],
    x: *const i32,
    stride: usize,
    mut add: impl FnMut(usize, L::V, L::V),
) {
    // SAFETY: as the caller's.
    unsafe {
        if let Some(zero_point) = F::ZERO_POINT
            && has_offset::<L, F>()
        {
            let totals = pair_totals::<L, R>(l, &pairs[..F::SCALES / 2], x, stride);
            for r in 0..R {
                sums[r] = l.sub_product(sums[r], totals[r], zero_point.into());
            }
        }
        let mins = pair_totals::<L, R>(l, &scales.mins[..F::MIN_PAIRS], x, stride);
        for r in 0..R {
            let mut sum = l.mul(l.to_float(sums[r]), scales.d[0]);
            if F::MIN_PAIRS > 0 {
                sum = l.fma(l.to_float(mins[r]), scales.dmin, sum);
            }
            add(r, sum, float(l, x, stride, q8k::SCALE, r));
        }
    }
}

/// One block's products for `R` rows whose words of this block start at `x`: `add` is called for every row, with a sum and
/// what to multiply it by.
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
    mut add: impl FnMut(usize, L::V, L::V),
) {
    // SAFETY: as the caller's; an activation block has the words that `layout.rs` lists.
    unsafe {
        let (mut sums, mut quants) = (l.begin([0; R]), Quants { next: x, stride });
        for first in (0..F::SCALES).step_by(S::UNROLLED) {
            macro_rules! add_scales {
                ($($s:literal)*) => {$(
                    let by = scales.scales[first + $s];
                    let offsets = match F::OFFSETS_SHIFT {
                        Some(shift) if L::OFFSETS => Some((x.add((q8k::OFFSETS + first + $s) * stride), shift)),
                        _ => None,
                    };
                    let scale = Some(Scale { by, offsets });
                    add_scale::<L, F, S, R>(l, source, &mut quants, first + $s, scale, &mut sums);
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
        let sums = l.end(sums);
        let mut pairs = [l.zero(); 8];
        if F::ZERO_POINT.is_some() && has_offset::<L, F>() {
            pairs = scale_pairs::<L, F>(l, scales);
        }
        if const { L::MAX_ROWS == ROW_BLOCK } {
            end_rows::<L, F, R>(l, sums, scales, &pairs, x, stride, add);
        } else {
            // Takes fewer registers than sum by sum.
            for (r, sum) in sums.into_iter().enumerate() {
                let x = opaque(x.add(r));
                end_rows::<L, F, 1>(l, [sum], scales, &pairs, x, stride, |_, sum, by| add(r, sum, by));
            }
        }
    }
}
