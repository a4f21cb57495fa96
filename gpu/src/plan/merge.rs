//! Merging consecutive launches: fewer and longer kernels, with the same results.
//!
//! On an H200 a kernel of one block takes 2 to 6 microseconds, and reading all weights of E2B takes 340.

use std::any::Any;

use super::attention::CombineParams;
use super::matmul::{MAX_PRODUCTS, MatMulParams, Product, QuantizeParams};
use super::matmul_float::FloatParams;
use super::pointwise::{GateParams, NormParams};
use super::rows::{MAX_PROJECTIONS, RowsParams};
use crate::launch::{Launch, blocks};

/// A launch that may be merged with the next one.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "copied twice per recorded launch, and not kept afterwards")]
pub enum Mergeable {
    /// One or two norms, and the quantization of their result.
    Norm(Launch<NormParams>),
    /// A gated activation, and the quantization of its result.
    Gate(Launch<GateParams>),
    /// A quantization.
    Quantize(Launch<QuantizeParams>),
    /// A merge of attention's splits, and the quantization of its result.
    Combine(Launch<CombineParams>),
    /// Heads of up to three projections.
    Rows(Launch<RowsParams>),
    /// Products with up to three quantized matrices.
    MatMul(Launch<MatMulParams>),
    /// Products with up to three floating-point matrices.
    MatMulFloat(Launch<FloatParams>),
}

impl Mergeable {
    /// A [`Launch`], if its kernel can take over another's work. Not generic, so that it is compiled once.
    pub fn of(launch: &dyn Any) -> Option<Self> {
        None.or_else(|| launch.downcast_ref().copied().map(Self::Norm))
            .or_else(|| launch.downcast_ref().copied().map(Self::Gate))
            .or_else(|| launch.downcast_ref().copied().map(Self::Quantize))
            .or_else(|| launch.downcast_ref().copied().map(Self::Combine))
            .or_else(|| launch.downcast_ref().copied().map(Self::Rows))
            .or_else(|| launch.downcast_ref().copied().map(Self::MatMul))
            .or_else(|| launch.downcast_ref().copied().map(Self::MatMulFloat))
    }

    /// One launch with the results of `self` and then `next`, or `None` if there is no such kernel. Neither launch may
    /// write what the other reads, except for a result of `self` that is the only input of `next`.
    pub fn merged(&self, next: &Self) -> Option<Self> {
        match (self, next) {
            (Self::Norm(first), Self::Norm(next)) => norms(first, next).map(Self::Norm),
            (Self::Norm(first), Self::Quantize(next)) => norm_quantize(first, next).map(Self::Norm),
            (Self::Gate(first), Self::Quantize(next)) => gate_quantize(first, next).map(Self::Gate),
            (Self::Combine(first), Self::Quantize(next)) => combine_quantize(first, next).map(Self::Combine),
            (Self::Rows(first), Self::Rows(next)) => rows(first, next).map(Self::Rows),
            (Self::MatMul(first), Self::MatMul(next)) => products(first, next).map(Self::MatMul),
            (Self::MatMulFloat(first), Self::MatMulFloat(next)) => float_products(first, next).map(Self::MatMulFloat),
            _ => None,
        }
    }
}

fn norms(first: &Launch<NormParams>, next: &Launch<NormParams>) -> Option<Launch<NormParams>> {
    let (a, b) = (&first.params, &next.params);
    let follows = b.x == a.norms[0].y && a.width == b.width && first.grid == next.grid;
    (a.count == 1 && b.count == 1 && a.block == 0 && follows).then(|| {
        let params = NormParams { norms: [a.norms[0], b.norms[0]], count: 2, out: b.out, block: b.block, ..*a };
        Launch { params, ..*first }
    })
}

fn norm_quantize(first: &Launch<NormParams>, next: &Launch<QuantizeParams>) -> Option<Launch<NormParams>> {
    let (a, b) = (&first.params, &next.params);
    let last = a.norms[a.count as usize - 1].y;
    let follows = b.x == last && b.out.inputs == a.width && first.grid[0] == next.grid[1];
    (a.block == 0 && follows).then_some(Launch { params: NormParams { out: b.out, block: b.block, ..*a }, ..*first })
}

fn gate_quantize(first: &Launch<GateParams>, next: &Launch<QuantizeParams>) -> Option<Launch<GateParams>> {
    let (a, b) = (&first.params, &next.params);
    let follows = b.x == a.y && b.out.inputs == a.width && first.grid[1] == next.grid[1];
    (a.block == 0 && follows).then_some(Launch { params: GateParams { out: b.out, block: b.block, ..*a }, ..*first })
}

fn combine_quantize(first: &Launch<CombineParams>, next: &Launch<QuantizeParams>) -> Option<Launch<CombineParams>> {
    let (a, b) = (&first.params, &next.params);
    let (rows, heads) = a.queries.shape();
    let follows = b.x == a.y && first.grid[0] == rows * heads as u32 && next.grid[1] == rows;
    // Others have fewer channels than a warp quantizes.
    let whole = ["combine_256", "combine_512", "combine_few_256", "combine_few_512"].contains(&first.kernel);
    (a.block == 0 && follows && whole)
        .then_some(Launch { params: CombineParams { out: b.out, block: b.block, ..*a }, ..*first })
}

fn rows(first: &Launch<RowsParams>, next: &Launch<RowsParams>) -> Option<Launch<RowsParams>> {
    let (a, b) = (first.grid[2] as usize, next.grid[2] as usize);
    let together = a + b <= MAX_PROJECTIONS && first.kernel == next.kernel && first.grid[1] == next.grid[1];
    together.then(|| {
        let mut params = first.params;
        params.of[a..a + b].copy_from_slice(&next.params.of[..b]);
        Launch { params, grid: [first.grid[0].max(next.grid[0]), first.grid[1], (a + b) as u32], ..*first }
    })
}

fn products(first: &Launch<MatMulParams>, next: &Launch<MatMulParams>) -> Option<Launch<MatMulParams>> {
    let (a, b) = (&first.params, &next.params);
    let together = first.kernel == next.kernel && a.x == b.x && a.shape == b.shape && a.rows == b.rows;
    let (products, count) = joined((&a.products, a.count), (&b.products, b.count)).filter(|_| together)?;
    let grid = [first.grid[0], blocks("outputs", (first.grid[1] + next.grid[1]) as usize).ok()?, 1];
    Some(Launch { params: MatMulParams { products, count, ..*a }, grid, ..*first })
}

fn float_products(first: &Launch<FloatParams>, next: &Launch<FloatParams>) -> Option<Launch<FloatParams>> {
    let (a, b) = (&first.params, &next.params);
    let together = first.kernel == next.kernel && a.x == b.x && a.inputs == b.inputs && a.rows == b.rows;
    let (products, count) = joined((&a.products, a.count), (&b.products, b.count)).filter(|_| together)?;
    let grid = [first.grid[0], blocks("outputs", (first.grid[1] + next.grid[1]) as usize).ok()?, 1];
    Some(Launch { params: FloatParams { products, count, ..*a }, grid, ..*first })
}

type Products = [Product; MAX_PRODUCTS];

/// The blocks of `b` after those of `a`; `None` if there are too many products.
fn joined((a, count): (&Products, i32), (b, more): (&Products, i32)) -> Option<(Products, i32)> {
    let (at, more) = (count as usize, more as usize);
    let mut products = *a;
    let blocks = a[at - 1].end;
    for (to, from) in products.get_mut(at..at + more)?.iter_mut().zip(b) {
        *to = Product { end: blocks + from.end, ..*from };
    }
    Some((products, (at + more) as i32))
}
