//! Floating-point weights times `f32` rows: `matmul_float.cpp`.

use super::matmul::{Buckets, MAX_PRODUCTS, Product};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};
use foretoken_kernels::ElementType;

/// One or several `(outputs, inputs)` matrices, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct FloatMatrix {
    element: ElementType,
    count: usize,
    outputs: usize,
    inputs: usize,
    weights: DeviceSlice<u8>,
}

impl FloatMatrix {
    /// `count` matrices.
    ///
    /// # Errors
    /// If `inputs` is not a multiple of 4, or `weights` is too short.
    pub fn new(
        element: ElementType,
        (count, outputs, inputs): (usize, usize, usize),
        weights: DeviceSlice<u8>,
    ) -> Result<Self, LaunchError> {
        if inputs == 0 || !inputs.is_multiple_of(4) {
            return Err(LaunchError(format!("{inputs} inputs are not a multiple of 4")));
        }
        let elements = outputs.checked_mul(inputs).and_then(|len| len.checked_mul(count));
        let bytes = elements.and_then(|len| len.checked_mul(element.size()));
        weights.checked(
            "the weights",
            bytes.ok_or_else(|| LaunchError(format!("invalid shape: {outputs} by {inputs}")))?,
        )?;
        dimension("outputs", outputs)?;
        dimension("inputs", inputs)?;
        Ok(Self { element, count, outputs, inputs, weights })
    }

    fn grid(&self, tiles: usize) -> Result<[u32; 3], LaunchError> {
        Ok([self.outputs.div_ceil(32) as u32, blocks("rows", tiles)?, 1])
    }
}

/// Parameters of the products: up to three matrices with the same inputs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct FloatParams {
    pub(super) products: [Product; MAX_PRODUCTS],
    pub(super) x: u64,
    pub(super) rows: i32,
    pub(super) inputs: i32,
    pub(super) count: i32,
    pub(super) row_bytes: i32,
}

// SAFETY: the `Params` of matmul_float.cpp.
unsafe impl Params for FloatParams {}

/// `y = x w^T`: `x` is `(rows, inputs)`, `y` `(rows, outputs)`.
///
/// # Errors
/// If a slice is too short.
pub fn matmul(
    w: &FloatMatrix,
    (x, rows): (DeviceSlice<f32>, usize),
    y: DeviceSlice<f32>,
) -> Result<Launch<FloatParams>, LaunchError> {
    let (kernels, tile) = match rows {
        1 => (["matmul_f32_1", "matmul_f16_1", "matmul_bf16_1"], 1),
        2..=4 => (["matmul_f32_4", "matmul_f16_4", "matmul_bf16_4"], 4),
        _ => (["matmul_f32_16", "matmul_f16_16", "matmul_bf16_16"], 16),
    };
    let grid = w.grid(rows.div_ceil(tile))?;
    let y = y.checked("y", rows * w.outputs)?;
    let product = Product { weights: w.weights.address(), y, outputs: w.outputs as i32, end: grid[0] as i32 };
    let params = FloatParams {
        products: [product; MAX_PRODUCTS],
        x: x.checked("x", rows * w.inputs)?,
        rows: dimension("rows", rows)?,
        inputs: w.inputs as i32,
        count: 1,
        row_bytes: dimension("bytes of a row", w.inputs * w.element.size())?,
    };
    Ok(Launch { kernel: kernel_of(w.element, kernels), grid, block: [256, 1, 1], params })
}

/// The kernel for an element type.
fn kernel_of(element: ElementType, [f32, f16, bf16]: [&'static str; 3]) -> &'static str {
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

/// As [`super::matmul::matmul_buckets`]: `y` is `(entries, outputs)`, for at most `max_buckets` buckets.
///
/// # Errors
/// If a slice is too short.
pub fn matmul_buckets(
    w: &FloatMatrix,
    (x, rows): (DeviceSlice<f32>, usize),
    lists: &Buckets,
    (max_buckets, entries): (usize, usize),
    y: DeviceSlice<f32>,
) -> Result<Launch<FloatBucketParams>, LaunchError> {
    if max_buckets > w.count.saturating_mul(entries) {
        return Err(LaunchError(format!(
            "too many buckets: {max_buckets} for {entries} entries over {} matrices",
            w.count
        )));
    }
    let params = FloatBucketParams {
        weights: w.weights.address(),
        x: x.checked("x", rows * w.inputs)?,
        y: y.checked("y", entries * w.outputs)?,
        matrices: lists.matrices.checked("the buckets' matrices", max_buckets)?,
        starts: lists.starts.checked("the buckets' starts", max_buckets + 1)?,
        count: lists.count.checked("the number of buckets", 1)?,
        rows: optional(lists.rows, "the entries' rows", entries)?,
        inputs: w.inputs as i32,
        outputs: w.outputs as i32,
    };
    let kernel = kernel_of(w.element, ["matmul_buckets_f32", "matmul_buckets_f16", "matmul_buckets_bf16"]);
    Ok(Launch { kernel, grid: w.grid(max_buckets)?, block: [256, 1, 1], params })
}
