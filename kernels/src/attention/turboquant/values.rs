//! Weighted sums of quantized values, in vectors: lanes are channels, and four tokens' integer weights are broadcast.

use std::mem::MaybeUninit;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::layout::LANES;
use super::operands::{ActiveOutputs, TokenFloats};
use super::page::Page;
use super::runs::{PackedRun, UnpackedRun, Values, Vectors};
use super::scalar::{self, WEIGHT_MAX, WEIGHT_MIN};
use super::side::PAGE_TOKENS;
use super::unpack::{CHUNK, Unpacker, for_chunk, for_query_parts, with_planes};
use crate::attention::query::{QUERY_BLOCK, Query};
use crate::isa::Isa;
use crate::simd::levels::{LevelLanes, LevelOp};

/// `output[n] += sum_t weights[n * 128 + t] * v[t]` over the tokens `t` of `range`, for every query `n` that sees any
/// of them; weights outside `range` are zero.
pub(in crate::attention) fn add_values(
    isa: Isa,
    page: &Page<'_>,
    queries: &mut [Query<'_>],
    range: Range<usize>,
    weights: &[f32],
) {
    #[cfg(target_arch = "x86_64")]
    if let Isa::Amx(isa) = isa
        && amx::suits(page, queries.len())
    {
        return amx::add_values(isa, page, queries, weights);
    }
    let Some(isa) = isa.vectors() else { return scalar::add_values(page, queries, range, weights) };
    with_planes!(page, |UPPER, LOWER| isa.run_levels(AddValues::<UPPER, LOWER> { page, queries, range, weights }));
}

struct AddValues<'a, 'q, const UPPER: usize, const LOWER: usize> {
    page: &'a Page<'a>,
    queries: &'a mut [Query<'q>],
    range: Range<usize>,
    weights: &'a [f32],
}

/// A query's integer weights of a page, two words per four tokens, in the order of [`LevelLanes::store_weights`].
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Weights([i32; PAGE_TOKENS / 2]);

impl<const UPPER: usize, const LOWER: usize> LevelOp for AddValues<'_, '_, UPPER, LOWER> {
    #[inline(always)]
    fn eval<L: LevelLanes>(self, l: L) {
        let Self { page, queries, range, weights } = self;
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length.
        let ActiveOutputs { weights, outputs, count } = unsafe { ActiveOutputs::begin(l, page, queries, weights) };
        let chunks = range.start / LANES..range.end.div_ceil(LANES);
        let mut integers = [const { MaybeUninit::<Weights>::uninit() }; QUERY_BLOCK];
        let mut operands = [ValueQuery::NONE; QUERY_BLOCK];
        // SAFETY: `run_levels` entered the features; `attend_block` checked every length and range.
        unsafe {
            let unpacker = Unpacker::<L, UPPER, LOWER>::new(l, page, L::BIAS);
            let mut values = UnpackedRun::<L, Values>::UNINIT;
            for group in page.layout.scale_groups() {
                let scales = &page.scales[group.index * PAGE_TOKENS..][..PAGE_TOKENS];
                for n in 0..count {
                    let to = integers[n].as_mut_ptr().cast();
                    let (offset, unit) = integer_weights(l, page, weights[n], scales, to);
                    operands[n] = ValueQuery { weights: to, offset, unit, output: outputs[n] };
                }
                let last = operands[count - 1];
                operands[count..].fill(last);
                let runs = page.layout.runs(group);
                for strip in 0..group.len / LANES {
                    for half in 0..LANES / L::LANES {
                        let run = PackedRun::new(&unpacker, page, runs, (strip, half));
                        let channel = group.first + strip * LANES + half * L::LANES;
                        if const { UPPER == 8 } || count <= L::QUERIES {
                            for_query_parts!(L, count, |first, N| {
                                let part = (&operands[first..], (count - first).min(N));
                                add_sums::<L, N>(l, (&run, chunks.clone()), part, channel);
                            });
                        } else {
                            values.unpack(&run, chunks.clone());
                            for_query_parts!(L, count, |first, N| {
                                let part = (&operands[first..], (count - first).min(N));
                                add_sums::<L, N>(l, (&values, chunks.clone()), part, channel);
                            });
                        }
                    }
                }
            }
        }
    }
}

/// A query's operands of one scale group.
#[derive(Clone, Copy)]
struct ValueQuery {
    weights: *const i32, // of a page's tokens, in the order of `Weights`
    offset: i32,
    unit: f32,
    output: *mut f32,
}

impl ValueQuery {
    /// No query.
    const NONE: Self = Self { weights: std::ptr::null(), offset: 0, unit: 0.0, output: std::ptr::null_mut() };
}

/// Adds the weighted sums of a vector of channels, from `channel` on, over the tokens of `chunks`, 16 each, to the
/// outputs of the first `count` of `N` queries.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `values` has these chunks; the queries, of which there are `N`,
/// have weights of a page's tokens and outputs with these channels.
#[inline(always)]
unsafe fn add_sums<L: LevelLanes, const N: usize>(
    l: L,
    (values, chunks): (&impl Vectors<L, Values>, Range<usize>),
    (queries, count): (&[ValueQuery], usize),
    channel: usize,
) {
    let queries = &queries[..N];
    // SAFETY: as this function's.
    unsafe {
        let mut sums = [[l.splat_word(0); 2]; N];
        for chunk in chunks {
            let values = values.chunk(chunk);
            for_chunk!(|V| {
                for n in 0..N {
                    sums[n] = l.dot_value(sums[n], values[V], queries[n].weights.add(2 * chunk * CHUNK), V);
                }
            });
        }
        for n in 0..N {
            if n < count {
                let ValueQuery { offset, unit, output, .. } = queries[n];
                let output = output.add(channel);
                let sum = l.to_float(l.join(sums[n], offset));
                l.store(output, l.fma(sum, l.splat(unit), l.load(output)));
            }
        }
    }
}

/// Weights times scales, in integers; returns the offset of their sums, and the value of integer weight 1 at level 1.
///
/// # Safety
/// The caller is inside a function with `L`'s features; `scales` has the page's tokens.
#[inline(always)]
unsafe fn integer_weights<L: LevelLanes>(
    l: L,
    page: &Page<'_>,
    page_weights: &[f32; PAGE_TOKENS],
    scales: &[half::f16],
    weights: *mut i32,
) -> (i32, f32) {
    let vectors = PAGE_TOKENS / L::LANES;
    // SAFETY: the caller entered the features; all arrays are of the page's tokens, and no vector
    // has fewer than 4 lanes.
    unsafe {
        let mut products = [l.splat(0.0); PAGE_TOKENS / 4];
        let mut stored = TokenFloats([0.0; PAGE_TOKENS]);
        for (v, product) in products.iter_mut().enumerate().take(vectors) {
            let at = v * L::LANES;
            *product = l.mul(l.load(page_weights.as_ptr().add(at)), l.load_f16(scales.as_ptr().add(at)));
            l.store(stored.0.as_mut_ptr().add(at), *product);
        }
        let largest = f32::from_bits(l.largest_magnitude(&stored.0));
        let negligible = largest < WEIGHT_MIN;
        let inverse = l.splat(if negligible { 0.0 } else { WEIGHT_MAX / largest });
        let mut total = l.splat_word(0);
        for (v, product) in products.iter().enumerate().take(vectors) {
            let to = weights.add(v * L::LANES / 2);
            total = l.add_words(total, l.store_weights(to, l.mul(*product, inverse)));
        }
        let offset = if L::BIAS == 0 { 0 } else { l.sum_words(total).wrapping_mul(-i32::from(L::BIAS)) };
        (offset, if negligible { 0.0 } else { largest * (page.layout.format().unit() / WEIGHT_MAX) })
    }
}
