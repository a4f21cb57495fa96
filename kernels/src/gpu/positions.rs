//! Where rows stand, and the angles they are rotated by: `positions.cpp`.

use super::rows::Rotary;
use super::{Launch, Params, Span, Unfit, blocks, dimension};

/// How the rows of a call stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stand {
    /// One behind the other from the first position that is not committed; each sees itself and what is before it.
    Following,
    /// All at that position, seeing committed ones only: a drafter's.
    Together,
}

/// Parameters of the placing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PlaceParams {
    length: u64,
    emitted: u64,
    at: u64,
    rows: i32,
    follow: i32,
}

// SAFETY: the `PlaceParams` of positions.cpp.
unsafe impl Params for PlaceParams {}

/// Adds `emitted` to `length`, if given, and says where the next `rows` rows stand.
///
/// * `length`: `(1)`, committed positions. `emitted`: `(1)`, see [`super::accept::Verdict`].
/// * `at`: `(rows)` of position and end, as [`super::attend::Queries`] has them.
///
/// # Errors
/// If a span is too short.
pub fn place(
    length: Span<i32>,
    emitted: Option<Span<u32>>,
    (at, rows): (Span<[i32; 2]>, usize),
    stand: Stand,
) -> Result<Launch<PlaceParams>, Unfit> {
    let emitted = match emitted {
        // One number out of a verdict: no wide loads, so it need not be aligned.
        Some(span) if !span.is_empty() => span.address(),
        Some(_) => return Err(Unfit("the emitted count holds nothing".into())),
        None => 0,
    };
    let params = PlaceParams {
        length: length.holding("the length", 1)?,
        emitted,
        at: at.holding("the positions", rows)?,
        rows: dimension("rows", rows)?,
        follow: (stand == Stand::Following).into(),
    };
    Ok(Launch { kernel: "place", grid: [1, 1, 1], block: [32, 1, 1], params })
}

/// Parameters of the angles.
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
/// If a span is too short.
pub fn angles(
    (at, rows): (Span<[i32; 2]>, usize),
    frequencies: Span<f32>,
    out: &Rotary,
) -> Result<Launch<AngleParams>, Unfit> {
    let Rotary { cos, sin, pairs } = *out;
    let params = AngleParams {
        at: at.holding("the positions", rows)?,
        frequencies: frequencies.holding("the frequencies", pairs)?,
        cos: cos.holding("the cosines", rows * pairs)?,
        sin: sin.holding("the sines", rows * pairs)?,
        rows: dimension("rows", rows)?,
        pairs: dimension("pairs", pairs)?,
    };
    let grid = [blocks("pairs", pairs.div_ceil(128))?, blocks("rows", rows)?, 1];
    Ok(Launch { kernel: "angles", grid, block: [128, 1, 1], params })
}
