//! The gated delta net, except its products: `delta_net.cpp`. [`inputs`] and [`delta_rule`] in every layer, [`commit`]
//! after the pass, which ends a round for all layers.
//!
//! A round either logs its rows, of which any number from the first on can be committed, or writes the matrices after
//! all of them: see [`Recurrent`](super::segments::Recurrent).

use super::segments::{Place, Segments};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};
pub use foretoken_kernels::delta_net::HeadOrder;

/// Width of a key, at most.
pub const MAX_KEY_DIM: usize = 128;

/// Channels of a warp of [`inputs`], and warps of its blocks.
const WARP_CHANNELS: usize = 128;
const INPUT_WARPS: usize = 4;

/// Columns of a block of [`delta_rule`].
const COLUMNS: usize = 32;

/// The shape of a model's delta nets.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Heads of queries and of keys.
    pub key_heads: usize,
    /// Heads of values, a multiple.
    pub value_heads: usize,
    /// Width of a query and of a key: a multiple of 4, at most [`MAX_KEY_DIM`].
    pub key_dim: usize,
    /// Width of a value: a multiple of 4.
    pub value_dim: usize,
    /// The key head of each value head.
    pub order: HeadOrder,
    /// Rows that the convolution sees, the current one included.
    pub taps: usize,
    /// Rows of a log: at least `taps - 1`, and at least those of a round whose rows may be rejected.
    pub log_rows: usize,
}

impl Shape {
    /// Channels of the convolution.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Elements of a layer's matrices.
    pub const fn matrices_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Elements of a layer's window.
    pub const fn window_len(&self) -> usize {
        (self.taps - 1) * self.channels()
    }

    /// Elements of a row of inputs.
    pub const fn row_len(&self) -> usize {
        (self.channels() + 2 * self.value_heads).next_multiple_of(4)
    }

    /// Elements of a layer's log.
    pub const fn log_len(&self) -> usize {
        self.log_rows * (self.row_len() + self.channels())
    }

    /// # Errors
    /// If there are no kernels for the shape.
    pub fn check(&self) -> Result<(), LaunchError> {
        self.params().map(drop)
    }

    fn params(&self) -> Result<ShapeParams, LaunchError> {
        let Self { key_heads, value_heads, key_dim, value_dim, taps, log_rows, .. } = *self;
        if key_heads == 0 || value_heads == 0 || !value_heads.is_multiple_of(key_heads) {
            return Err(LaunchError(format!("a delta net of {value_heads} value heads with {key_heads} keys")));
        }
        let supported = |width: usize| width > 0 && width.is_multiple_of(4);
        if !supported(key_dim) || key_dim > MAX_KEY_DIM || !supported(value_dim) {
            return Err(LaunchError(format!(
                "a delta net with keys of {key_dim} and values of {value_dim}; supported are multiples of 4, and keys up to \
                 {MAX_KEY_DIM}"
            )));
        }
        if taps == 0 || log_rows + 1 < taps {
            return Err(LaunchError(format!("a convolution over {taps} rows with a log of {log_rows}")));
        }
        dimension("the taps' size", taps * self.channels())?;
        Ok(ShapeParams {
            key_heads: key_heads as i32,
            heads: value_heads as i32,
            key_dim: key_dim as i32,
            value_dim: value_dim as i32,
            values_per_key: match self.order {
                HeadOrder::Grouped => (value_heads / key_heads) as i32,
                HeadOrder::Tiled => 0,
            },
            taps: taps as i32,
            log_rows: dimension("rows of a log", log_rows)?,
            stride: self.row_len() as i32,
        })
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct ShapeParams {
    key_heads: i32,
    heads: i32,
    key_dim: i32,
    value_dim: i32,
    values_per_key: i32,
    taps: i32,
    log_rows: i32,
    stride: i32,
}

/// A layer of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// The shape.
    pub shape: Shape,
    /// Index among the delta nets.
    pub index: usize,
    /// Delta nets of the model, and so of every [`Recurrent`](super::segments::Recurrent).
    pub layers: usize,
    /// The sequences, each with a [`Recurrent`](super::segments::Recurrent).
    pub segments: Segments,
    /// Rows of the pass.
    pub rows: usize,
    /// `(rows, Shape::row_len)`: the inputs of rows that are not logged; `None` if all are.
    pub inputs: Option<DeviceSlice<f32>>,
}

impl Layer {
    /// The index, if there is such a delta net.
    fn index(&self) -> Result<i32, LaunchError> {
        if self.index < self.layers {
            return dimension("the layer", self.index);
        }
        Err(LaunchError(format!("there is no delta net {} among {}", self.index, self.layers)))
    }

    fn inputs_address(&self) -> Result<u64, LaunchError> {
        optional(self.inputs, "the rows' inputs", self.rows * self.shape.row_len())
    }
}

/// A layer's weights.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// `(taps, channels)`: the convolution's, the oldest row's first.
    pub conv: DeviceSlice<f32>,
    /// `(value_heads)`.
    pub dt_bias: DeviceSlice<f32>,
    /// `(value_heads)`: `-exp(A_log)`.
    pub rate: DeviceSlice<f32>,
}

/// Results of the projections.
#[derive(Clone, Copy, Debug)]
pub struct Projected {
    /// `(rows, channels)`: queries, keys, values.
    pub qkv: DeviceSlice<f32>,
    /// `(rows, value_heads)`: the decays' inputs.
    pub a: DeviceSlice<f32>,
    /// `(rows, value_heads)`: the betas' inputs.
    pub b: DeviceSlice<f32>,
}

/// Parameters of [`inputs`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct InputParams {
    segments: u64,
    places: u64,
    qkv: u64,
    a: u64,
    b: u64,
    weight: u64,
    dt_bias: u64,
    rate: u64,
    inputs: u64,
    shape: ShapeParams,
    layer: i32,
    query_scale: f32,
}

// SAFETY: the `InputParams` of delta_net.cpp.
unsafe impl Params for InputParams {}

/// The recurrence's inputs: the convolution over the sequence's last rows with SiLU, normalized queries and keys
/// ([`foretoken_kernels::delta_net::convolve`],
/// [`l2_normalize`](foretoken_kernels::delta_net::l2_normalize)), and the gates `decay = exp(rate
/// softplus(a + dt_bias))` and `beta = sigmoid(b)`. They are logged, or written to [`Layer::inputs`].
///
/// * `places`: `(rows)`.
///
/// # Errors
/// If there is no kernel for the shape, no such layer, or a slice is too short.
pub fn inputs(
    layer: &Layer,
    places: DeviceSlice<Place>,
    weights: &Weights,
    from: &Projected,
) -> Result<Launch<InputParams>, LaunchError> {
    let (shape, rows) = (&layer.shape, layer.rows);
    let (shape_params, channels, heads) = (shape.params()?, shape.channels(), shape.value_heads);
    dimension("the gates' size", rows * heads)?;
    let params = InputParams {
        segments: layer.segments.address()?,
        places: places.checked("the places", rows)?,
        qkv: from.qkv.checked("queries, keys and values", rows * channels)?,
        a: from.a.checked("the decays' inputs", rows * heads)?,
        b: from.b.checked("the betas' inputs", rows * heads)?,
        weight: weights.conv.checked("the convolution's weight", shape.taps * channels)?,
        dt_bias: weights.dt_bias.checked("the bias", heads)?,
        rate: weights.rate.checked("the rates", heads)?,
        inputs: layer.inputs_address()?,
        shape: shape_params,
        layer: layer.index()?,
        query_scale: (shape.key_dim as f32).powf(-0.5),
    };
    let warps = 2 * shape.key_heads + (heads * shape.value_dim).div_ceil(WARP_CHANNELS) + 1;
    let grid = [blocks("channels", warps.div_ceil(INPUT_WARPS))?, blocks("rows", rows)?, 1];
    Ok(Launch { kernel: "delta_inputs", grid, threads: 32 * INPUT_WARPS as u32, shared: 0, params })
}

/// Parameters of [`delta_rule`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RuleParams {
    segments: u64,
    inputs: u64,
    y: u64,
    shape: ShapeParams,
    layer: i32,
}

// SAFETY: the `RuleParams` of delta_net.cpp.
unsafe impl Params for RuleParams {}

/// Applies the accepted rows of the round before to the matrices, in place; then `y` `(rows, value_heads,
/// value_dim)` are the outputs of the segments' rows, which change the matrices of
/// [`whole`](super::segments::Recurrent::whole) segments only:
/// [`foretoken_kernels::delta_net::replay`] and [`advance`](foretoken_kernels::delta_net::advance). A
/// segment without rows gets its accepted rows applied.
///
/// # Errors
/// If there is no kernel for the shape, no such layer, or a slice is too short.
pub fn delta_rule(layer: &Layer, y: DeviceSlice<f32>) -> Result<Launch<RuleParams>, LaunchError> {
    let Shape { value_heads, value_dim, .. } = layer.shape;
    let params = RuleParams {
        segments: layer.segments.address()?,
        inputs: layer.inputs_address()?,
        y: y.checked("y", layer.rows * value_heads * value_dim)?,
        shape: layer.shape.params()?,
        layer: layer.index()?,
    };
    let columns = dimension("columns", value_dim.div_ceil(COLUMNS))? as u32;
    let grid = [columns, blocks("heads", value_heads)?, blocks("segments", layer.segments.count)?];
    Ok(Launch { kernel: "delta_rule", grid, threads: 128, shared: 0, params })
}

/// The rows that [`commit`] commits.
#[derive(Clone, Copy, Debug)]
pub enum Committed {
    /// Of every segment: its [`skipped`](super::segments::Segment::skipped) rows, the first one after them, and as many
    /// drafts as the results `(segments, 2)` of [`accept`](super::accept::accept) say.
    Accepted(DeviceSlice<u32>),
    /// The first `rows` rows of this segment; all if it is [`whole`](super::segments::Recurrent::whole).
    Rows {
        /// The segment's index.
        segment: usize,
        /// Rows.
        rows: usize,
    },
}

/// Parameters of [`commit`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CommitParams {
    segments: u64,
    results: u64,
    shape: ShapeParams,
    segment: i32,
    rows: i32,
}

// SAFETY: the `CommitParams` of delta_net.cpp.
unsafe impl Params for CommitParams {}

/// Ends a round in all `layers`: the convolution's window becomes the last rows of the window and the committed rows,
/// and the next [`delta_rule`] applies the logged rows if its `replayed` is this round's `log`. A round whose logged
/// rows are all dropped is committed with zero rows, because the accepted rows of the round before are in the matrices
/// now; a `whole` round is then not committed at all.
///
/// # Errors
/// If there is no kernel for the shape, or no such segment, or a slice is too short.
pub fn commit(
    shape: &Shape,
    layers: usize,
    segments: &Segments,
    committed: &Committed,
) -> Result<Launch<CommitParams>, LaunchError> {
    let (first, count, results, rows) = match *committed {
        Committed::Accepted(results) => {
            (0, segments.count, results.checked_unaligned("the results", 2 * segments.count)?, 0)
        }
        Committed::Rows { segment, rows } => (segments.index(segment)?, 1, 0, rows),
    };
    let params = CommitParams {
        segments: segments.address()?,
        results,
        shape: shape.params()?,
        segment: dimension("the segment", first)?,
        rows: dimension("rows", rows)?,
    };
    let columns = dimension("channels", shape.channels().div_ceil(256))? as u32;
    let grid = [columns, blocks("layers", layers)?, blocks("segments", count)?];
    Ok(Launch { kernel: "delta_commit", grid, threads: 256, shared: 0, params })
}
