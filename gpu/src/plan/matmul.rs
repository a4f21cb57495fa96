//! Quantized weights times 8-bit activations: `quantize.cpp`, `matmul.cpp`, `matmul_tiles.cpp`.
//!
//! Weights are in the order of [`foretoken_kernels::quant::pack`], padded with zero rows to whole panels,
//! so that a file is packed once for CPU and GPU.

use super::H200_BLOCKS;
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};
use foretoken_kernels::quant::{ActivationType, PANEL_ROWS, WeightType};

/// Maximum warps per block of threads. A matrix of at most [`H200_BLOCKS`] panels needs that many to be read fast. More
/// panels would not all run at once on an H200; with half as many warps they do.
const MAX_WARPS: usize = 16;

/// Shared memory of a block of threads, at most: what devices have since capability 8.0, less what is reserved.
const SHARED_BYTES: usize = 96 << 10;

/// Stages of weights that a warp copies ahead.
const STAGES: usize = 2;

/// Rows and panels of a block of the kernels for many rows.
const TILE_ROWS: usize = 32;
const TILE_PANELS: usize = 8;

/// Rows from which on the kernels for many rows are chosen, if their blocks fill an H200: with fewer, a product waits
/// for its weights, which the other kernels load with more warps per panel.
const MANY_ROWS: usize = 65;

/// Entries of a bucket of [`matmul_buckets`], at most.
pub const LARGEST_BUCKET: usize = TILE_ROWS;

/// Quantized rows on the device.
#[derive(Clone, Copy, Debug)]
pub struct Activations {
    activation_type: ActivationType,
    rows: usize,
    inputs: usize,
    quants: DeviceSlice<u32>,
    scales: DeviceSlice<f32>,
    sums: DeviceSlice<i16>,
}

impl Activations {
    /// Words of the quants of `rows` rows, rounded up to a multiple of eight rows.
    pub const fn quants_len(rows: usize, inputs: usize) -> usize {
        rows.next_multiple_of(8) * (inputs / 4)
    }

    /// Number of scales of `rows` rows.
    pub const fn scales_len(activation_type: ActivationType, rows: usize, inputs: usize) -> usize {
        rows * (inputs / activation_type.block_len())
    }

    /// Number of sums of `rows` rows: one per 32 inputs.
    pub const fn sums_len(rows: usize, inputs: usize) -> usize {
        rows * (inputs / 32)
    }

    /// Memory for `rows` rows of `inputs`.
    ///
    /// # Errors
    /// If the rows are not whole blocks, or a slice is too short.
    pub fn new(
        activation_type: ActivationType,
        (rows, inputs): (usize, usize),
        (quants, scales, sums): (DeviceSlice<u32>, DeviceSlice<f32>, DeviceSlice<i16>),
    ) -> Result<Self, LaunchError> {
        if inputs == 0 || !inputs.is_multiple_of(activation_type.block_len()) {
            let block = activation_type.block_len();
            return Err(LaunchError(format!("rows of {inputs} inputs are not whole blocks of {block}")));
        }
        quants.checked("the activations' quants", Self::quants_len(rows, inputs))?;
        scales.checked("the activations' scales", Self::scales_len(activation_type, rows, inputs))?;
        sums.checked("the activations' sums", Self::sums_len(rows, inputs))?;
        Ok(Self { activation_type, rows, inputs, quants, scales, sums })
    }

    fn params(&self) -> ActivationsParams {
        ActivationsParams {
            quants: self.quants.address(),
            scales: self.scales.address(),
            sums: self.sums.address(),
            inputs: self.inputs as i32,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ActivationsParams {
    quants: u64,
    scales: u64,
    sums: u64,
    pub(super) inputs: i32,
}

impl ActivationsParams {
    pub(super) const NONE: Self = Self { quants: 0, scales: 0, sums: 0, inputs: 0 };
}

/// Parameters of the kernels that quantize.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct QuantizeParams {
    pub(super) x: u64,
    pub(super) out: ActivationsParams,
    pub(super) block: i32,
}

// SAFETY: the `Params` of quantize.cpp.
unsafe impl Params for QuantizeParams {}

/// Quantizes `x` `(rows, inputs)` into `out`.
///
/// # Errors
/// If `x` is too short.
pub fn quantize(x: DeviceSlice<f32>, out: &Activations) -> Result<Launch<QuantizeParams>, LaunchError> {
    let x = x.checked("x", out.rows * out.inputs)?;
    dimension("the activations' size", out.rows * out.inputs)?;
    let block = out.activation_type.block_len() as i32;
    let grid = [blocks("quantize", out.inputs.div_ceil(4 * 256))?, blocks("quantize", out.rows)?, 1];
    let params = QuantizeParams { x, out: out.params(), block };
    Ok(Launch { kernel: "quantize_rows", grid, threads: 128, shared: 0, params })
}

/// The kernels of a type.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernels {
    /// Up to 8 rows, up to 16, more.
    rows: [&'static str; 3],
    /// Many rows.
    tiles: &'static str,
    /// Buckets of up to 8, up to 16, up to 32.
    buckets: [&'static str; 3],
    /// Lookup in a table.
    pub(super) embed: &'static str,
}

macro_rules! kernels {
    ($name:literal) => {
        Kernels {
            rows: [concat!("matmul_", $name, "_8"), concat!("matmul_", $name, "_16"), concat!("matmul_", $name, "_32")],
            tiles: concat!("matmul_", $name, "_tiles"),
            buckets: [
                concat!("matmul_buckets_", $name, "_8"),
                concat!("matmul_buckets_", $name, "_16"),
                concat!("matmul_buckets_", $name, "_tiles"),
            ],
            embed: concat!("embed_", $name),
        }
    };
}

pub(super) const fn kernels_of(weight_type: WeightType) -> Option<Kernels> {
    Some(match weight_type {
        WeightType::Q4_0 => kernels!("q4_0"),
        WeightType::Q4_1 => kernels!("q4_1"),
        WeightType::Q5_0 => kernels!("q5_0"),
        WeightType::Q5_1 => kernels!("q5_1"),
        WeightType::Q8_0 => kernels!("q8_0"),
        WeightType::Q2_K => kernels!("q2_k"),
        WeightType::Q3_K => kernels!("q3_k"),
        WeightType::Q4_K => kernels!("q4_k"),
        WeightType::Q5_K => kernels!("q5_k"),
        WeightType::Q6_K => kernels!("q6_k"),
        WeightType::IQ4_NL => kernels!("iq4_nl"),
        WeightType::IQ4_XS => kernels!("iq4_xs"),
        WeightType::MXFP4 => kernels!("mxfp4"),
        _ => return None,
    })
}

/// One or several packed matrices of one shape, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    weight_type: WeightType,
    kernels: Kernels,
    outputs: usize,
    inputs: usize,
    count: usize,
    weights: DeviceSlice<u8>,
}

impl Matrix {
    /// Bytes of one `(outputs, inputs)` matrix, padded to whole panels; `None` if the rows are not whole blocks or the
    /// product overflows.
    pub fn bytes(weight_type: WeightType, outputs: usize, inputs: usize) -> Option<usize> {
        weight_type.packed_bytes_for(outputs.checked_next_multiple_of(PANEL_ROWS)?, inputs)
    }

    /// Whether there are kernels for this type.
    pub const fn supports(weight_type: WeightType) -> bool {
        kernels_of(weight_type).is_some()
    }

    /// `count` matrices of `outputs` rows each, padded with zero rows to whole panels.
    ///
    /// # Errors
    /// If there are no kernels for the type, or `weights` is not of this shape.
    pub fn new(
        weight_type: WeightType,
        (count, outputs, inputs): (usize, usize, usize),
        weights: DeviceSlice<u8>,
    ) -> Result<Self, LaunchError> {
        let Some(kernels) = kernels_of(weight_type) else {
            let name = weight_type.name();
            return Err(LaunchError(format!(
                "no kernels for {name} weights; supported: all but NVFP4, TQ and IQ1 to IQ3"
            )));
        };
        let bytes = Self::bytes(weight_type, outputs, inputs).and_then(|one| one.checked_mul(count));
        let bytes = bytes.filter(|bytes| *bytes > 0).ok_or_else(|| {
            let name = weight_type.name();
            LaunchError(format!("invalid shape: {count} matrices of {outputs} by {inputs} {name} weights"))
        })?;
        weights.checked("the weights", bytes)?;
        Ok(Self { weight_type, kernels, outputs: outputs.next_multiple_of(PANEL_ROWS), inputs, count, weights })
    }

    /// Blocks of inputs per warp, and number of warps. They depend on the shape only, and so does the order of
    /// summation: the sum over a warp's blocks has the CPU's bits, and the warps' sums are added in order.
    pub const fn warp_split(weight_type: WeightType, outputs: usize, inputs: usize) -> (usize, usize) {
        let blocks = inputs / weight_type.block_len();
        let few = outputs.div_ceil(PANEL_ROWS) <= H200_BLOCKS;
        let most = SHARED_BYTES / Self::warp_bytes(weight_type);
        let warps = if few { MAX_WARPS } else { MAX_WARPS / 2 };
        let per_warp = blocks.div_ceil(if most < warps { most } else { warps });
        (per_warp, blocks.div_ceil(per_warp))
    }

    const fn panels(&self) -> usize {
        self.outputs / PANEL_ROWS
    }

    fn shape(&self) -> Result<ShapeParams, LaunchError> {
        let (per_warp, _) = Self::warp_split(self.weight_type, self.outputs, self.inputs);
        let panel = self.weight_type.packed_bytes_for(PANEL_ROWS, self.inputs).unwrap_or(usize::MAX);
        Ok(ShapeParams {
            inputs: dimension("inputs", self.inputs)?,
            warp_blocks: per_warp as i32,
            panel_bytes: dimension("bytes of a panel", panel)?,
        })
    }

    fn check(&self, x: &Activations) -> Result<(), LaunchError> {
        if x.inputs != self.inputs || x.activation_type != self.weight_type.activation_type() {
            let (a, b) = ((x.inputs, x.activation_type), (self.inputs, self.weight_type.name()));
            return Err(LaunchError(format!("activations {a:?} do not match matrix {b:?}")));
        }
        dimension("the activations' size", x.rows.next_multiple_of(8) * x.inputs).map(drop)
    }

    /// Bytes of a warp's stages: 256 inputs each, or 128 if a block of 32 takes more than 24 bytes.
    const fn warp_bytes(weight_type: WeightType) -> usize {
        let (block, bytes) = (weight_type.block_len(), weight_type.block_bytes());
        let inputs = if block == 32 && bytes > 24 { 128 } else { 256 };
        STAGES * PANEL_ROWS * bytes * (inputs / block)
    }

    /// Threads of a block, and its shared memory, of a kernel whose blocks have a panel.
    fn block(&self) -> (u32, u32) {
        let (_, warps) = Self::warp_split(self.weight_type, self.outputs, self.inputs);
        (32 * warps as u32, (warps * Self::warp_bytes(self.weight_type)) as u32)
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct ShapeParams {
    inputs: i32,
    warp_blocks: i32,
    panel_bytes: i32,
}

/// Products of one launch, at most.
pub(super) const MAX_PRODUCTS: usize = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    pub(super) weights: u64,
    pub(super) y: u64,
    pub(super) outputs: i32,
    pub(super) end: i32,
}

/// Parameters of the kernels that multiply: up to three matrices with the same inputs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct MatMulParams {
    pub(super) products: [Product; MAX_PRODUCTS],
    pub(super) x: ActivationsParams,
    pub(super) shape: ShapeParams,
    pub(super) rows: i32,
    pub(super) count: i32,
}

// SAFETY: the `Params` of matrix.h.
unsafe impl Params for MatMulParams {}

/// `y = x w^T`: `y` is `(rows, outputs)`, outputs with the matrix's padding. The bits of a row do not depend on the
/// number of rows, nor on the kernel.
///
/// # Errors
/// If the shapes do not match, or `y` is too short.
pub fn matmul(w: &Matrix, x: &Activations, y: DeviceSlice<f32>) -> Result<Launch<MatMulParams>, LaunchError> {
    let tiles = x.rows.div_ceil(TILE_ROWS) * w.panels().div_ceil(TILE_PANELS);
    if x.rows >= MANY_ROWS && tiles >= H200_BLOCKS {
        return matmul_tiles(w, x, y);
    }
    let [kernel_8, kernel_16, kernel_32] = w.kernels.rows;
    let (kernel, tile) = match x.rows {
        ..=8 => (kernel_8, 8),
        9..=16 => (kernel_16, 16),
        _ => (kernel_32, 32),
    };
    let (threads, shared) = w.block();
    product(w, x, y, (kernel, [x.rows.div_ceil(tile), w.panels()], threads, shared))
}

/// [`matmul`] by the kernel for many rows, however many there are.
///
/// # Errors
/// If the shapes do not match, or `y` is too short.
pub fn matmul_tiles(w: &Matrix, x: &Activations, y: DeviceSlice<f32>) -> Result<Launch<MatMulParams>, LaunchError> {
    let grid = [x.rows.div_ceil(TILE_ROWS), w.panels().div_ceil(TILE_PANELS)];
    product(w, x, y, (w.kernels.tiles, grid, 32 * TILE_PANELS as u32, 0))
}

/// The launch of a kernel by blocks of rows and of panels.
fn product(
    w: &Matrix,
    x: &Activations,
    y: DeviceSlice<f32>,
    (kernel, grid, threads, shared): (&'static str, [usize; 2], u32, u32),
) -> Result<Launch<MatMulParams>, LaunchError> {
    w.check(x)?;
    let y = y.checked("y", x.rows * w.outputs)?;
    let grid = [blocks("rows", grid[0])?, blocks("outputs", grid[1])?, 1];
    let product =
        Product { weights: w.weights.address(), y, outputs: dimension("outputs", w.outputs)?, end: grid[1] as i32 };
    let rows = dimension("rows", x.rows)?;
    let params = MatMulParams { products: [product; MAX_PRODUCTS], x: x.params(), shape: w.shape()?, rows, count: 1 };
    Ok(Launch { kernel, grid, threads, shared, params })
}

/// Entries by matrix, in device memory. Bucket `b` is entries `starts[b]..starts[b + 1]`.
#[derive(Clone, Copy, Debug)]
pub struct Buckets {
    /// Number of buckets, at most.
    pub max_buckets: usize,
    /// Entries of all buckets.
    pub entries: usize,
    /// Entries of a bucket, at most: up to [`LARGEST_BUCKET`].
    pub largest: usize,
    /// `(max_buckets)`: the matrix of each.
    pub matrices: DeviceSlice<i32>,
    /// `(max_buckets + 1)`.
    pub starts: DeviceSlice<i32>,
    /// `(1)`: the number of buckets.
    pub count: DeviceSlice<i32>,
    /// `(entries)`: the row of `x` of each entry; `None` if entries are rows.
    pub rows: Option<DeviceSlice<i32>>,
}

impl Buckets {
    /// # Errors
    /// If there are more buckets than entries over so many matrices can have.
    pub(super) fn check(&self, matrices: usize) -> Result<(), LaunchError> {
        let Self { max_buckets, entries, .. } = self;
        if *max_buckets > matrices.saturating_mul(*entries) {
            let problem = format!("too many buckets: {max_buckets} for {entries} entries over {matrices} matrices");
            return Err(LaunchError(problem));
        }
        Ok(())
    }
}

/// Parameters of the kernels that multiply by buckets.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BucketParams {
    weights: u64,
    x: ActivationsParams,
    y: u64,
    matrices: u64,
    starts: u64,
    count: u64,
    rows: u64,
    shape: ShapeParams,
    outputs: i32,
}

// SAFETY: the `BucketParams` of matmul.cpp.
unsafe impl Params for BucketParams {}

/// `y[e] = x[rows[e]] w[matrix of e's bucket]^T` for the entries of all buckets: `y` is `(entries, outputs)`, outputs
/// with the matrix's padding. The caller guarantees that the lists are in range: matrices, rows of `x`, entries of `y`.
///
/// # Errors
/// If the shapes do not match, or a list is too short.
pub fn matmul_buckets(
    w: &Matrix,
    x: &Activations,
    lists: &Buckets,
    y: DeviceSlice<f32>,
) -> Result<Launch<BucketParams>, LaunchError> {
    w.check(x)?;
    lists.check(w.count)?;
    let [kernel_8, kernel_16, tiles] = w.kernels.buckets;
    let panels = w.panels();
    let (kernel, width, (threads, shared)) = match lists.largest {
        ..=8 => (kernel_8, panels, w.block()),
        9..=16 => (kernel_16, panels, w.block()),
        17..=LARGEST_BUCKET => (tiles, panels.div_ceil(TILE_PANELS), (32 * TILE_PANELS as u32, 0)),
        largest => {
            return Err(LaunchError(format!("buckets of {largest} entries; at most {LARGEST_BUCKET} are supported")));
        }
    };
    let params = BucketParams {
        weights: w.weights.address(),
        x: x.params(),
        y: y.checked("y", lists.entries * w.outputs)?,
        matrices: lists.matrices.checked("the buckets' matrices", lists.max_buckets)?,
        starts: lists.starts.checked("the buckets' starts", lists.max_buckets + 1)?,
        count: lists.count.checked("the number of buckets", 1)?,
        rows: optional(lists.rows, "the entries' rows", lists.entries)?,
        shape: w.shape()?,
        outputs: dimension("outputs", w.outputs)?,
    };
    let grid = [width as u32, blocks("buckets", lists.max_buckets)?, 1];
    Ok(Launch { kernel, grid, threads, shared, params })
}
