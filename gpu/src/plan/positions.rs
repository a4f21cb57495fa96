//! Positions and tokens of a pass's rows, and rotary angles: `positions.cpp`.

use super::rows::Rotary;
use super::segments::{Place, Segments};
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension, optional};

/// The tokens of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Tokens {
    /// `(rows)`: tokens, or [`ON_DEVICE`](super::segments::ON_DEVICE).
    pub given: DeviceSlice<u32>,
    /// `(rows)`: receives the tokens.
    pub ids: DeviceSlice<u32>,
}

/// Parameters of [`place`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlaceParams {
    segments: u64,
    places: u64,
    given: u64,
    ids: u64,
}

// SAFETY: the `PlaceParams` of positions.cpp.
unsafe impl Params for PlaceParams {}

/// Writes the places of `rows` rows: consecutive positions after the committed ones of each segment; every
/// row sees itself. And their tokens, unless `None`.
///
/// # Errors
/// If a slice is too short.
pub fn place(
    segments: &Segments,
    (places, rows): (DeviceSlice<Place>, usize),
    tokens: Option<&Tokens>,
) -> Result<Launch<PlaceParams>, LaunchError> {
    let params = PlaceParams {
        segments: segments.address()?,
        places: places.checked("the places", rows)?,
        given: tokens.map_or(Ok(0), |tokens| tokens.given.checked_unaligned("the given tokens", rows))?,
        ids: tokens.map_or(Ok(0), |tokens| tokens.ids.checked_unaligned("the ids", rows))?,
    };
    Ok(Launch { kernel: "place", grid: [blocks("segments", segments.count)?, 1, 1], threads: 32, shared: 0, params })
}

/// What a draft step begins with: of each segment one row.
#[derive(Clone, Copy, Debug)]
pub struct DraftInput {
    /// `(segments)`: tokens, or [`ON_DEVICE`](super::segments::ON_DEVICE).
    pub given: DeviceSlice<u32>,
    /// Index of the step.
    pub step: usize,
    /// `(segments, width)`: the hidden states of the step before; `None` in the first.
    pub hidden: Option<DeviceSlice<f32>>,
    /// `(segments)`: receives the tokens.
    pub ids: DeviceSlice<u32>,
    /// `(segments, 2 * width)`: the second half receives the hidden states.
    pub input: DeviceSlice<f32>,
    /// Width of a hidden state.
    pub width: usize,
}

/// Parameters of [`begin_step`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct StepParams {
    segments: u64,
    places: u64,
    given: u64,
    hidden: u64,
    ids: u64,
    input: u64,
    width: i32,
    step: i32,
}

// SAFETY: the `StepParams` of positions.cpp.
unsafe impl Params for StepParams {}

/// Begins a draft step: writes the places, all at the position after the committed ones and seeing
/// only those, the tokens, and the hidden states.
///
/// # Errors
/// If a slice is too short.
pub fn begin_step(
    segments: &Segments,
    places: DeviceSlice<Place>,
    step: &DraftInput,
) -> Result<Launch<StepParams>, LaunchError> {
    let count = segments.count;
    let params = StepParams {
        segments: segments.address()?,
        places: places.checked("the places", count)?,
        given: step.given.checked_unaligned("the given tokens", count)?,
        hidden: optional(step.hidden, "the hidden states", count * step.width)?,
        ids: step.ids.checked_unaligned("the ids", count)?,
        input: step.input.checked("the drafter's input", 2 * count * step.width)?,
        width: dimension("the width", step.width)?,
        step: dimension("the step", step.step)?,
    };
    Ok(Launch { kernel: "begin_step", grid: [blocks("segments", count)?, 1, 1], threads: 256, shared: 0, params })
}

/// Parameters of [`angles`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AngleParams {
    places: u64,
    frequencies: u64,
    cos: u64,
    sin: u64,
    rows: i32,
    pairs: i32,
}

// SAFETY: the `AngleParams` of positions.cpp.
unsafe impl Params for AngleParams {}

/// Cosines and sines of the rows' positions times the inverse frequencies `(pairs)`.
///
/// # Errors
/// If a slice is too short.
pub fn angles(
    (places, rows): (DeviceSlice<Place>, usize),
    frequencies: DeviceSlice<f32>,
    out: &Rotary,
) -> Result<Launch<AngleParams>, LaunchError> {
    let Rotary { cos, sin, pairs, .. } = *out;
    let params = AngleParams {
        places: places.checked("the places", rows)?,
        frequencies: frequencies.checked("the frequencies", pairs)?,
        cos: cos.checked("the cosines", rows * pairs)?,
        sin: sin.checked("the sines", rows * pairs)?,
        rows: dimension("rows", rows)?,
        pairs: dimension("pairs", pairs)?,
    };
    let grid = [blocks("pairs", pairs.div_ceil(128))?, blocks("rows", rows)?, 1];
    Ok(Launch { kernel: "angles", grid, threads: 128, shared: 0, params })
}

/// Parameters of [`keep_rows`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct KeepParams {
    segments: u64,
    x: u64,
    y: u64,
    width: i32,
}

// SAFETY: the `KeepParams` of positions.cpp.
unsafe impl Params for KeepParams {}

/// Copies the rows of the segments, from [`Segment::source`](super::segments::Segment::source) on in `x`
/// `(rows before, width)`, to `y` `(rows, width)`.
///
/// # Errors
/// If a slice is too short.
pub fn keep_rows(
    segments: &Segments,
    (x, before): (DeviceSlice<f32>, usize),
    (y, rows): (DeviceSlice<f32>, usize),
    width: usize,
) -> Result<Launch<KeepParams>, LaunchError> {
    let params = KeepParams {
        segments: segments.address()?,
        x: x.checked("x", before * width)?,
        y: y.checked("y", rows * width)?,
        width: dimension("the width", width)?,
    };
    let grid = [dimension("the width", width.div_ceil(256))? as u32, blocks("segments", segments.count)?, 1];
    Ok(Launch { kernel: "keep_rows", grid, threads: 256, shared: 0, params })
}
