//! Positions of a call's rows, and their rotary angles: `positions.cpp`.

use super::rows::Rotary;
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension};

/// The positions of a call's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Consecutive, from the first position that is not committed; each row sees itself and all before it.
    Consecutive,
    /// All at that position, seeing committed positions only (for drafters).
    Constant,
}

/// Parameters of [`place`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlaceParams {
    length: u64,
    emitted: u64,
    at: u64,
    rows: i32,
    consecutive: i32,
}

// SAFETY: the `PlaceParams` of positions.cpp.
unsafe impl Params for PlaceParams {}

/// Adds `emitted` to `length`, if given, and writes the positions of the next `rows` rows.
///
/// * `length`: `(1)`, committed positions. `emitted`: `(1)`, see [`super::accept::AcceptOutput::counts`].
/// * `at`: `(rows)` of position and end, as [`super::attention::Queries`] has them.
///
/// # Errors
/// If a slice is too short.
pub fn place(
    length: DeviceSlice<i32>,
    emitted: Option<DeviceSlice<u32>>,
    (at, rows): (DeviceSlice<[i32; 2]>, usize),
    placement: Placement,
) -> Result<Launch<PlaceParams>, LaunchError> {
    let emitted = match emitted {
        // One word within `AcceptOutput::counts`, read alone: it need not be aligned to 16 bytes.
        Some(slice) if !slice.is_empty() => slice.address(),
        Some(_) => return Err(LaunchError("the emitted count has no element".into())),
        None => 0,
    };
    let params = PlaceParams {
        length: length.checked("the length", 1)?,
        emitted,
        at: at.checked("the positions", rows)?,
        rows: dimension("rows", rows)?,
        consecutive: (placement == Placement::Consecutive).into(),
    };
    Ok(Launch { kernel: "place", grid: [1, 1, 1], block: [32, 1, 1], params })
}

/// Parameters of [`angles`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AngleParams {
    at: u64,
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
    (at, rows): (DeviceSlice<[i32; 2]>, usize),
    frequencies: DeviceSlice<f32>,
    out: &Rotary,
) -> Result<Launch<AngleParams>, LaunchError> {
    let Rotary { cos, sin, pairs } = *out;
    let params = AngleParams {
        at: at.checked("the positions", rows)?,
        frequencies: frequencies.checked("the frequencies", pairs)?,
        cos: cos.checked("the cosines", rows * pairs)?,
        sin: sin.checked("the sines", rows * pairs)?,
        rows: dimension("rows", rows)?,
        pairs: dimension("pairs", pairs)?,
    };
    let grid = [blocks("pairs", pairs.div_ceil(128))?, blocks("rows", rows)?, 1];
    Ok(Launch { kernel: "angles", grid, block: [128, 1, 1], params })
}
