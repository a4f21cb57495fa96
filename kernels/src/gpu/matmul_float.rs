//! Floating-point weights times `f32` rows: `matmul_float.cpp`.

use super::matmul::Buckets;
use super::{Launch, Params, Span, Unfit, blocks, dimension, optional};
use crate::ElementType;

/// One or several `(outputs, inputs)` matrices of elements, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct FloatMatrix {
    element: ElementType,
    count: usize,
    outputs: usize,
    inputs: usize,
    weights: Span<u8>,
}

impl FloatMatrix {
    /// `count` matrices.
    ///
    /// # Errors
    /// If `inputs` is no multiple of 4, or `weights` is too short.
    pub fn new(
        element: ElementType,
        (count, outputs, inputs): (usize, usize, usize),
        weights: Span<u8>,
    ) -> Result<Self, Unfit> {
        if inputs == 0 || !inputs.is_multiple_of(4) {
            return Err(Unfit(format!("{inputs} inputs are no multiple of 4")));
        }
        let elements = outputs.checked_mul(inputs).and_then(|len| len.checked_mul(count));
        let bytes = elements.and_then(|len| len.checked_mul(element.size()));
        weights.holding("the weights", bytes.ok_or_else(|| Unfit(format!("no {outputs} by {inputs} matrix")))?)?;
        dimension("outputs", outputs)?;
        dimension("inputs", inputs)?;
        Ok(Self { element, count, outputs, inputs, weights })
    }

    fn grid(&self, tiles: usize) -> Result<[u32; 3], Unfit> {
        Ok([self.outputs.div_ceil(32) as u32, blocks("rows", tiles)?, 1])
    }
}

/// Parameters of the products.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FloatParams {
    weights: u64,
    x: u64,
    y: u64,
    rows: i32,
    inputs: i32,
    outputs: i32,
}

// SAFETY: the `Params` of matmul_float.cpp.
unsafe impl Params for FloatParams {}

/// `y = x w^T`: `x` is `(rows, inputs)`, `y` `(rows, outputs)`.
///
/// # Errors
/// If a span is too short.
pub fn matmul(w: &FloatMatrix, (x, rows): (Span<f32>, usize), y: Span<f32>) -> Result<Launch<FloatParams>, Unfit> {
    let (kernels, tile) = match rows {
        1 => (["matmul_f32_1", "matmul_f16_1", "matmul_bf16_1"], 1),
        2..=4 => (["matmul_f32_4", "matmul_f16_4", "matmul_bf16_4"], 4),
        _ => (["matmul_f32_16", "matmul_f16_16", "matmul_bf16_16"], 16),
    };
    let params = FloatParams {
        weights: w.weights.address(),
        x: x.holding("x", rows * w.inputs)?,
        y: y.holding("y", rows * w.outputs)?,
        rows: dimension("rows", rows)?,
        inputs: w.inputs as i32,
        outputs: w.outputs as i32,
    };
    Ok(Launch { kernel: of(w.element, kernels), grid: w.grid(rows.div_ceil(tile))?, block: [256, 1, 1], params })
}

fn of(element: ElementType, [f32, f16, bf16]: [&'static str; 3]) -> &'static str {
    match element {
        ElementType::F32 => f32,
        ElementType::F16 => f16,
        ElementType::Bf16 => bf16,
    }
}

/// Parameters of the products by buckets.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FloatBucketParams {
    weights: u64,
    x: u64,
    y: u64,
    matrices: u64,
    starts: u64,
    count: u64,
    rows: u64,
    inputs: i32,
    outputs: i32,
}

// SAFETY: the `BucketParams` of matmul_float.cpp.
unsafe impl Params for FloatBucketParams {}

/// As [`super::matmul::matmul_buckets`]: `y` is `(entries, outputs)`, and there are `most` buckets at most.
///
/// # Errors
/// If a span is too short.
pub fn matmul_buckets(
    w: &FloatMatrix,
    (x, rows): (Span<f32>, usize),
    lists: &Buckets,
    (most, entries): (usize, usize),
    y: Span<f32>,
) -> Result<Launch<FloatBucketParams>, Unfit> {
    if most > w.count.saturating_mul(entries) {
        return Err(Unfit(format!("{most} buckets of {entries} entries over {} matrices", w.count)));
    }
    let params = FloatBucketParams {
        weights: w.weights.address(),
        x: x.holding("x", rows * w.inputs)?,
        y: y.holding("y", entries * w.outputs)?,
        matrices: lists.matrices.holding("the buckets' matrices", most)?,
        starts: lists.starts.holding("the buckets' starts", most + 1)?,
        count: lists.count.holding("the number of buckets", 1)?,
        rows: optional(lists.rows, "the entries' rows", entries)?,
        inputs: w.inputs as i32,
        outputs: w.outputs as i32,
    };
    let kernel = of(w.element, ["matmul_buckets_f32", "matmul_buckets_f16", "matmul_buckets_bf16"]);
    Ok(Launch { kernel, grid: w.grid(most)?, block: [256, 1, 1], params })
}
