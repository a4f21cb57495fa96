//! Norm, sum, gated activation, embedding lookup: `norm.cpp`, `embed.cpp`.

use super::matmul::{ActivationsParams, kernels_of};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};
use foretoken_kernels::ElementType;
pub use foretoken_kernels::activation::Gate;
use foretoken_kernels::quant::{PANEL_ROWS, WeightType};

/// Elements of a norm's row, at most: 256 per warp.
const MAX_NORM: usize = 32 * 256;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Norm {
    weight: u64,
    residual: u64,
    pub(super) y: u64,
    eps: f32,
    scale: f32,
    normalizes: i32,
}

/// Parameters of one norm or sum, or of two, the second of the first's result, and of the last result's quantization.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct NormParams {
    pub(super) x: u64,
    pub(super) norms: [Norm; 2],
    pub(super) out: ActivationsParams,
    pub(super) width: i32,
    pub(super) count: i32,
    pub(super) block: i32,
}

// SAFETY: the `NormParams` of norm.cpp.
unsafe impl Params for NormParams {}

/// `y = norm(x)`, or with a residual `(residual + norm(x)) * scale`: [`foretoken_kernels::norm::rms_norm`] of `(rows,
/// width)`.
///
/// # Errors
/// If a slice is too short, or a row has more than 8192 elements or not a multiple of 4.
pub fn rms_norm(
    x: DeviceSlice<f32>,
    (rows, width): (usize, usize),
    weight: Option<DeviceSlice<f32>>,
    eps: f32,
    add_to: Option<(DeviceSlice<f32>, f32)>,
    y: DeviceSlice<f32>,
) -> Result<Launch<NormParams>, LaunchError> {
    let norm = Norm {
        weight: optional(weight, "the norm's weight", width)?,
        residual: optional(add_to.map(|(residual, _)| residual), "the residual", rows * width)?,
        y: y.checked("y", rows * width)?,
        eps,
        scale: add_to.map_or(1.0, |(_, scale)| scale),
        normalizes: 1,
    };
    norm_of(x, (rows, width), norm)
}

/// `y = residual + x` of `(rows, width)`, a launch that merges with a norm of `y`.
///
/// # Errors
/// As [`rms_norm`].
pub fn add(
    residual: DeviceSlice<f32>,
    x: DeviceSlice<f32>,
    (rows, width): (usize, usize),
    y: DeviceSlice<f32>,
) -> Result<Launch<NormParams>, LaunchError> {
    let sum = Norm {
        weight: 0,
        residual: residual.checked("the residual", rows * width)?,
        y: y.checked("y", rows * width)?,
        eps: 0.0,
        scale: 1.0,
        normalizes: 0,
    };
    norm_of(x, (rows, width), sum)
}

fn norm_of(x: DeviceSlice<f32>, (rows, width): (usize, usize), norm: Norm) -> Result<Launch<NormParams>, LaunchError> {
    if width > MAX_NORM || !width.is_multiple_of(4) {
        return Err(LaunchError(format!("a norm of rows of {width}; supported are multiples of 4 up to {MAX_NORM}")));
    }
    let params = NormParams {
        x: x.checked("x", rows * width)?,
        norms: [norm; 2],
        out: ActivationsParams::NONE,
        width: dimension("width", width)?,
        count: 1,
        block: 0,
    };
    let threads = 32 * width.div_ceil(256).max(1) as u32;
    Ok(Launch { kernel: "rms_norm", grid: [dimension("rows", rows)? as u32, 1, 1], threads, shared: 0, params })
}

/// Parameters of the gated activation.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GateParams {
    pub(super) gate: u64,
    pub(super) up: u64,
    pub(super) y: u64,
    pub(super) out: ActivationsParams,
    pub(super) width: i32,
    pub(super) gate_stride: i32,
    pub(super) up_stride: i32,
    pub(super) block: i32,
    pub(super) weight: u64,
    pub(super) head: i32,
    pub(super) eps: f32,
}

// SAFETY: the `GateParams` of norm.cpp.
unsafe impl Params for GateParams {}

/// A `(rows, width)` matrix whose rows are `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    /// The elements, from the first row's first.
    pub slice: DeviceSlice<f32>,
    /// Elements from one row to the next, a multiple of 4.
    pub stride: usize,
}

/// `y = f(gate) * up` of `(rows, width)`.
///
/// # Errors
/// If width or strides are not multiples of 4, or a slice is too short.
pub fn gate(
    function: Gate,
    gate: Strided,
    up: Strided,
    (rows, width): (usize, usize),
    y: DeviceSlice<f32>,
) -> Result<Launch<GateParams>, LaunchError> {
    if [width, gate.stride, up.stride].into_iter().any(|n| !n.is_multiple_of(4)) {
        return Err(LaunchError(format!(
            "width {width} with strides {} and {}: not multiples of 4",
            gate.stride, up.stride
        )));
    }
    let reach = |stride: usize| rows.saturating_sub(1) * stride + width;
    let params = GateParams {
        gate: gate.slice.checked("the gate", reach(gate.stride))?,
        up: up.slice.checked("the up projection", reach(up.stride))?,
        y: y.checked("y", rows * width)?,
        out: ActivationsParams::NONE,
        width: dimension("width", width)?,
        gate_stride: dimension("the stride", gate.stride)?,
        up_stride: dimension("the stride", up.stride)?,
        block: 0,
        weight: 0,
        head: 0,
        eps: 0.0,
    };
    let kernel = match function {
        Gate::GeluTanh => "gelu_gate",
        Gate::Silu => "silu_gate",
        Gate::Sigmoid => "sigmoid_gate",
    };
    let grid = [blocks("width", width.div_ceil(1024))?, blocks("rows", rows)?, 1];
    Ok(Launch { kernel, grid, threads: 128, shared: 0, params })
}

/// The norm of every head of a [`normed_silu_gate`].
#[derive(Clone, Copy, Debug)]
pub struct GateNorm {
    /// `(head)`.
    pub weight: DeviceSlice<f32>,
    /// Width of a head: a power of two from 8 to 256.
    pub head: usize,
    /// Added to the mean square.
    pub eps: f32,
}

impl GateNorm {
    /// Whether there is a kernel for heads of this width.
    pub fn supports(head: usize) -> bool {
        head.is_power_of_two() && (8..=256).contains(&head)
    }
}

/// `y = silu(gate) * norm(up)` of `(rows, width)`, where the norm is of every head: [`rms_norm`],
/// then [`gate`], with their bits.
///
/// # Errors
/// As [`gate`]; or if there is no kernel for the head.
pub fn normed_silu_gate(
    norm: &GateNorm,
    gate_of: Strided,
    up: Strided,
    (rows, width): (usize, usize),
    y: DeviceSlice<f32>,
) -> Result<Launch<GateParams>, LaunchError> {
    let GateNorm { weight, head, eps } = *norm;
    if !GateNorm::supports(head) || !width.is_multiple_of(head) {
        let supported = "supported are powers of two from 8 to 256";
        return Err(LaunchError(format!("a gate over rows of {width} with norms of {head}; {supported}")));
    }
    let launch = gate(Gate::Silu, gate_of, up, (rows, width), y)?;
    let weight = weight.checked("the norm's weight", head)?;
    let params = GateParams { weight, head: head as i32, eps, ..launch.params };
    Ok(Launch { kernel: "normed_silu_gate", params, ..launch })
}

/// The storage of an embedding table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableType {
    /// Packed panels: see [`super::matmul::Matrix`].
    Quantized(WeightType),
    /// Rows of elements.
    Float(ElementType),
}

/// Parameters of the lookup.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct EmbedParams {
    table: u64,
    ids: u64,
    y: u64,
    inputs: i32,
    stride: i32,
    rows: u32,
    scale: f32,
}

// SAFETY: the `Params` of embed.cpp.
unsafe impl Params for EmbedParams {}

/// `y[i] = table[ids[i]] * scale`: `(count, inputs)`. Rows of ids outside the table are NaN.
///
/// * `table`: `(rows, inputs)`.
///
/// # Errors
/// If there is no kernel for the type, or a slice is too short.
pub fn embed(
    table_type: TableType,
    table: DeviceSlice<u8>,
    (rows, inputs): (usize, usize),
    (ids, count): (DeviceSlice<u32>, usize),
    scale: f32,
    y: Strided,
) -> Result<Launch<EmbedParams>, LaunchError> {
    let (kernel, bytes) = match table_type {
        TableType::Quantized(weight_type) => {
            let unsupported = || {
                let name = weight_type.name();
                let supported = "all but NVFP4, TQ and IQ1 to IQ3";
                LaunchError(format!("no embedding lookup in {name} tables; supported: {supported}"))
            };
            let kernel = kernels_of(weight_type).ok_or_else(unsupported)?.embed;
            (kernel, weight_type.packed_bytes_for(rows.next_multiple_of(PANEL_ROWS), inputs))
        }
        TableType::Float(element) => {
            let kernel = match element {
                ElementType::F32 => "embed_f32",
                ElementType::F16 => "embed_f16",
                ElementType::Bf16 => "embed_bf16",
            };
            (kernel, rows.checked_mul(inputs).and_then(|len| len.checked_mul(element.size())))
        }
    };
    let bytes = bytes.ok_or_else(|| LaunchError(format!("invalid shape: table of {rows} rows of {inputs}")))?;
    let params = EmbedParams {
        table: table.checked("the table", bytes)?,
        ids: ids.checked_unaligned("the ids", count)?,
        y: y.slice.checked("y", count.saturating_sub(1) * y.stride + inputs)?,
        inputs: dimension("inputs", inputs)?,
        stride: dimension("the stride", y.stride)?,
        rows: dimension("the table's rows", rows)? as u32,
        scale,
    };
    let grid = [blocks("inputs", inputs.div_ceil(256))?, blocks("ids", count)?, 1];
    Ok(Launch { kernel, grid, threads: 256, shared: 0, params })
}
