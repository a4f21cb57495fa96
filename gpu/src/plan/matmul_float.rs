//! Floating-point weights times `f32` rows: `matmul_float.cpp`, `matmul_bf16.cpp`.

use super::H200_BLOCKS;
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
    /// If `inputs` is not a multiple of 4, there are no weights, or `weights` is too short.
    pub fn new(
        element: ElementType,
        (count, outputs, inputs): (usize, usize, usize),
        weights: DeviceSlice<u8>,
    ) -> Result<Self, LaunchError> {
        if inputs == 0 || !inputs.is_multiple_of(4) {
            return Err(LaunchError(format!("{inputs} inputs are not a multiple of 4")));
        }
        let elements = outputs.checked_mul(inputs).and_then(|len| len.checked_mul(count));
        let bytes = elements.and_then(|len| len.checked_mul(element.size())).filter(|bytes| *bytes > 0);
        let shape = || LaunchError(format!("invalid shape: {count} matrices of {outputs} by {inputs} weights"));
        weights.checked("the weights", bytes.ok_or_else(shape)?)?;
        dimension("outputs", outputs)?;
        dimension("inputs", inputs)?;
        Ok(Self { element, count, outputs, inputs, weights })
    }

    /// The kernel for so many rows, and its tiles.
    fn tiled(&self, rows: usize) -> Tiled {
        let (kernel, rows, outputs) = match (self.element, rows) {
            (ElementType::F32, 1) => ("matmul_f32_1", 1, 32),
            (ElementType::F32, 2..=4) => ("matmul_f32_4", 4, 32),
            (ElementType::F32, _) => ("matmul_f32_16", 16, 32),
            (ElementType::F16, 1) => ("matmul_f16_1", 1, 32),
            (ElementType::F16, 2..=4) => ("matmul_f16_4", 4, 32),
            (ElementType::F16, _) => ("matmul_f16_16", 16, 32),
            (ElementType::Bf16, 9..) if rows * self.outputs >= TILED => return MANY_ROWS,
            (ElementType::Bf16, _) if self.outputs >= WIDE => ("matmul_bf16_8_wide", 8, 32),
            (ElementType::Bf16, _) => ("matmul_bf16_8", 8, 16),
        };
        Tiled { kernel, rows, outputs }
    }
}

/// Rows by outputs from which tiles of 32 by 128 are faster: 64 tiles, half an H200. With fewer, its memory and most of
/// its multiprocessors would idle, and reading the weights again from the cache for every eight rows takes less time.
const TILED: usize = 64 * 32 * 128;

/// Outputs from which a block of eight rows has 32 instead of 16, and reads the inputs half as often.
const WIDE: usize = H200_BLOCKS * 32;

/// A kernel, and the rows and outputs of a block.
struct Tiled {
    kernel: &'static str,
    rows: usize,
    outputs: usize,
}

/// Of bf16, for many rows.
const MANY_ROWS: Tiled = Tiled { kernel: "matmul_bf16_32", rows: 32, outputs: 128 };

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
    pub(super) block_outputs: i32,
}

// SAFETY: the `Params` of float_products.h.
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
    product(w, (x, rows), y, w.tiled(rows))
}

/// [`matmul`] of bf16 by the kernel for many rows, however many there are.
///
/// # Errors
/// If the weights are of another type, or a slice is too short.
pub fn matmul_tiles(
    w: &FloatMatrix,
    (x, rows): (DeviceSlice<f32>, usize),
    y: DeviceSlice<f32>,
) -> Result<Launch<FloatParams>, LaunchError> {
    match w.element {
        ElementType::Bf16 => product(w, (x, rows), y, MANY_ROWS),
        other => Err(LaunchError(format!("no kernel for tiles of {other:?}; supported: bf16"))),
    }
}

fn product(
    w: &FloatMatrix,
    (x, rows): (DeviceSlice<f32>, usize),
    y: DeviceSlice<f32>,
    tiled: Tiled,
) -> Result<Launch<FloatParams>, LaunchError> {
    let grid = [blocks("rows", rows.div_ceil(tiled.rows))?, blocks("outputs", w.outputs.div_ceil(tiled.outputs))?, 1];
    let y = y.checked("y", rows * w.outputs)?;
    let product = Product { weights: w.weights.address(), y, outputs: w.outputs as i32, end: grid[1] as i32 };
    let params = FloatParams {
        products: [product; MAX_PRODUCTS],
        x: x.checked("x", rows * w.inputs)?,
        rows: dimension("rows", rows)?,
        inputs: w.inputs as i32,
        count: 1,
        row_bytes: dimension("bytes of a row", w.inputs * w.element.size())?,
        block_outputs: tiled.outputs as i32,
    };
    Ok(Launch { kernel: tiled.kernel, grid, threads: 256, shared: 0, params })
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

// SAFETY: the `BucketParams` of float_products.h.
unsafe impl Params for FloatBucketParams {}

/// Entries of a bucket of [`matmul_buckets`], at most.
pub const LARGEST_BUCKET: usize = 16;

/// As [`super::matmul::matmul_buckets`]: `y` is `(entries, outputs)`.
///
/// # Errors
/// If a slice is too short.
pub fn matmul_buckets(
    w: &FloatMatrix,
    (x, rows): (DeviceSlice<f32>, usize),
    lists: &Buckets,
    y: DeviceSlice<f32>,
) -> Result<Launch<FloatBucketParams>, LaunchError> {
    lists.check(w.count)?;
    let params = FloatBucketParams {
        weights: w.weights.address(),
        x: x.checked("x", rows * w.inputs)?,
        y: y.checked("y", lists.entries * w.outputs)?,
        matrices: lists.matrices.checked("the buckets' matrices", lists.max_buckets)?,
        starts: lists.starts.checked("the buckets' starts", lists.max_buckets + 1)?,
        count: lists.count.checked("the number of buckets", 1)?,
        rows: optional(lists.rows, "the entries' rows", lists.entries)?,
        inputs: w.inputs as i32,
        outputs: w.outputs as i32,
    };
    let (kernel, outputs) = match w.element {
        ElementType::F32 => ("matmul_buckets_f32", 32),
        ElementType::F16 => ("matmul_buckets_f16", 32),
        ElementType::Bf16 => ("matmul_buckets_bf16", 16),
    };
    let grid = [w.outputs.div_ceil(outputs) as u32, blocks("buckets", lists.max_buckets)?, 1];
    Ok(Launch { kernel, grid, threads: 256, shared: 0, params })
}
