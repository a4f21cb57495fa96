//! One block of a panel times up to 8 rows: integer sums, then the float operations of `scalar.rs` in their order.

use crate::quant::layout::{PAIRS, ROW_BLOCK, q8_1, q8k};
use crate::quant::source::{Quants, Source};
use crate::quant::unpack::{BlockScales, Format};
use crate::simd::bytes::{ByteLanes, Bytes, Offsets, Scale};
use crate::simd::opaque::opaque;

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
    if F::QUADS_PER_SCALE == 8 {
        return word(q8_1::OFFSETS) >> F::OFFSET_SHIFT;
    }
    assert!(F::ZERO_POINT == Some(16), "two scales per 32 inputs: NVFP4");
    word(q8_1::OFFSETS_OF_16 + s)
}

/// The sums over the block's pairs of `i16` times the activations' bsums, for `R` rows.
///
/// # Safety
/// As [`add_block`]; a block of 256, with `pairs` of this many sums.
#[inline(always)]
unsafe fn pair_totals<L: ByteLanes, const R: usize>(l: L, pairs: &[L::I], x: *const i32, stride: usize) -> [L::I; R] {
    // SAFETY: the caller entered the features; `x` has the bsums that `layout.rs` lists, `stride` words apart.
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
const fn has_offset<L: ByteLanes, F: Format, S: Source<L, F>>() -> bool {
    F::ZERO_POINT.is_some()
        && !(L::OFFSETS.is_some() && F::OFFSETS_SHIFT.is_some())
        && (L::ALL_BYTES || !matches!(S::BYTES, Bytes::Biased))
}

/// The `f32` of `index` in an activation block, for row `r`.
///
/// # Safety
/// As [`add_block`]; the activation block has the index, and the row block the row.
#[inline(always)]
unsafe fn float<L: ByteLanes>(l: L, x: *const i32, stride: usize, index: usize, r: usize) -> L::V {
    // SAFETY: the caller entered the features; the activation block has word `index`, the row block row `r`.
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
    (d, dmin): ([L::V; 4], L::V),
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
            if const { has_offset::<L, F, S>() } {
                for (r, from) in from.iter_mut().enumerate() {
                    *from = offset::<F>(x.add(r), stride, s);
                }
            }
            let mut quants = Quants { next: x.add(s * F::QUADS_PER_SCALE * stride), stride };
            let mut sums = l.begin(from);
            source.add_scale::<R>(l, &mut quants, $s, None, &mut sums);
            let dots = l.end(sums);
            for r in 0..R {
                let scaled = l.mul(l.to_float(dots[r]), float(l, x, stride, q8_1::SCALE, r));
                y[r] = l.fma(scaled, d[$s], y[r]);
                if F::HAS_MIN {
                    y[r] = l.fma(dmin, float(l, x, stride, q8_1::SUM, r), y[r]);
                }
            }
        })*};
    }
    // SAFETY: the caller entered the features; `x` has the words that `layout.rs` lists, of every activation block.
    unsafe {
        add_scales!(0);
        if const { F::SCALES > 1 } {
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
    // SAFETY: the caller entered the features.
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
unsafe fn end_rows<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    mut sums: [L::I; R],
    scales: &BlockScales<L>,
    pairs: &[L::I; 8],
    x: *const i32,
    stride: usize,
    mut add: impl FnMut(usize, L::V, L::V),
) {
    // SAFETY: the caller entered the features; `x` has the words that `layout.rs` lists, of `R` rows.
    unsafe {
        if const { has_offset::<L, F, S>() } {
            let totals = pair_totals::<L, R>(l, &pairs[..F::SCALES / 2], x, stride);
            for r in 0..R {
                sums[r] = l.sub_product(sums[r], totals[r], F::ZERO_POINT.unwrap_or_default().into());
            }
        }
        let mins = pair_totals::<L, R>(l, &scales.mins[..F::MIN_PAIRS], x, stride);
        for r in 0..R {
            let mut sum = l.mul(l.to_float(sums[r]), scales.d[0]);
            if const { F::MIN_PAIRS > 0 } {
                sum = l.fma(l.to_float(mins[r]), scales.dmin, sum);
            }
            add(r, sum, float(l, x, stride, q8k::SCALE, r));
        }
    }
}

/// One block's products for `R` rows whose words of this block start at `x`: `add` is called for
/// every row, with a sum and what to multiply it by.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `source` and `scales` are of one block of format `F`. `x`
/// points at the first of `R` rows in an activation block of a row block of `stride` rows.
#[inline(always)]
pub(super) unsafe fn add_block<L: ByteLanes, F: Format, S: Source<L, F>, const R: usize>(
    l: L,
    source: &S,
    scales: &BlockScales<L>,
    x: *const i32,
    stride: usize,
    mut add: impl FnMut(usize, L::V, L::V),
) {
    // SAFETY: the caller entered the features; `x` has the words that `layout.rs` lists, the source every scale.
    unsafe {
        let (mut sums, mut quants) = (l.begin([0; R]), Quants { next: x, stride });
        for first in (0..F::SCALES).step_by(S::UNROLLED) {
            macro_rules! add_scales {
                ($($s:literal)*) => {$(
                    let by = scales.scales[first + $s];
                    let offsets = F::OFFSETS_SHIFT.zip(L::OFFSETS).map(|(shift, offsets)| {
                        let at = if offsets == Offsets::Words { q8k::OFFSETS } else { q8k::PAIR_OFFSETS };
                        (x.add((at + first + $s) * stride), shift)
                    });
                    let scale = Some(Scale { by, offsets });
                    source.add_scale::<R>(l, &mut quants, first + $s, scale, &mut sums);
                )*};
            }
            add_scales!(0);
            if const { S::UNROLLED > 1 } {
                add_scales!(1);
            }
            if const { S::UNROLLED > 2 } {
                add_scales!(2 3 4 5 6 7);
            }
            if const { S::UNROLLED > 8 } {
                add_scales!(8 9 10 11 12 13 14 15);
            }
        }
        let sums = l.end(sums);
        let mut pairs = [l.zero(); 8];
        if const { has_offset::<L, F, S>() } {
            pairs = scale_pairs::<L, F>(l, scales);
        }
        if const { L::MAX_ROWS == ROW_BLOCK } {
            end_rows::<L, F, S, R>(l, sums, scales, &pairs, x, stride, add);
        } else {
            // Takes fewer registers than sum by sum.
            for (r, sum) in sums.into_iter().enumerate() {
                let x = opaque(x.add(r));
                end_rows::<L, F, S, 1>(l, [sum], scales, &pairs, x, stride, |_, sum, by| add(r, sum, by));
            }
        }
    }
}
