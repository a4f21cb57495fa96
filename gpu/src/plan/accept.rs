//! The end of a round on the device: `accept.cpp`.

use super::segments::Segments;
use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks, dimension};

/// The results of a pass that verified drafts.
#[derive(Clone, Copy, Debug)]
pub struct Verified {
    /// Of all rows of the pass: of each segment the newest token and the drafts after it.
    pub ids: DeviceSlice<u32>,
    /// `(rows)`, of the rows with outputs: the target's argmax.
    pub chosen: DeviceSlice<u32>,
    /// `(rows, width)`: hidden states of the rows with outputs.
    pub hidden: DeviceSlice<f32>,
    /// Width of a hidden state.
    pub width: usize,
}

/// The drafts that [`accept`] accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Accepting {
    /// Of every segment: those that equal the target's argmax, up to the first that does not.
    Argmax,
    /// The first `drafts` drafts of this segment, to simulate acceptance.
    Count {
        /// The segment's index.
        segment: usize,
        /// At most the drafts that the segment has.
        drafts: usize,
    },
}

/// Parameters of [`accept`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AcceptParams {
    segments: u64,
    ids: u64,
    chosen: u64,
    hidden: u64,
    results: u64,
    width: i32,
    segment: i32,
    accepted: i32,
}

// SAFETY: the `AcceptParams` of accept.cpp.
unsafe impl Params for AcceptParams {}

/// Accepts drafts, and advances the sequences' states past them: length, newest token and its hidden state. `results`
/// `(segments, 2)`: number of accepted drafts, and the token after them. Every segment has a row.
///
/// # Errors
/// If there is no such segment, no segment has so many drafts, or a slice is too short for a row of every segment.
pub fn accept(
    segments: &Segments,
    verified: &Verified,
    accepting: Accepting,
    results: DeviceSlice<u32>,
) -> Result<Launch<AcceptParams>, LaunchError> {
    let (first, count, accepted) = match accepting {
        Accepting::Argmax => (0, segments.count, -1),
        Accepting::Count { drafts, .. } if drafts >= segments.longest => {
            let rows = segments.longest;
            return Err(LaunchError(format!("{drafts} accepted drafts in segments of at most {rows} rows")));
        }
        Accepting::Count { segment, drafts } => (segments.index(segment)?, 1, dimension("accepted drafts", drafts)?),
    };
    let rows = segments.count;
    let params = AcceptParams {
        segments: segments.address()?,
        ids: verified.ids.checked_unaligned("the ids", rows)?,
        chosen: verified.chosen.checked_unaligned("the target's choices", rows)?,
        hidden: verified.hidden.checked("the hidden rows", rows * verified.width)?,
        results: results.checked_unaligned("the results", 2 * (first + count))?,
        width: dimension("width", verified.width)?,
        segment: dimension("the segment", first)?,
        accepted,
    };
    Ok(Launch { kernel: "accept", grid: [blocks("segments", count)?, 1, 1], threads: 256, shared: 0, params })
}

/// What a sequence continues with.
#[derive(Clone, Copy, Debug)]
pub struct State {
    /// Committed positions.
    pub length: usize,
    /// The token after them.
    pub newest: u32,
    /// `(width)`: the hidden state that predicted it; `None` to keep the last one.
    pub hidden: Option<DeviceSlice<f32>>,
}

/// Parameters of [`set_state`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SetParams {
    state: u64,
    hidden: u64,
    from: u64,
    length: i32,
    newest: u32,
    width: i32,
}

// SAFETY: the `SetParams` of accept.cpp.
unsafe impl Params for SetParams {}

/// Sets the state of a sequence: `state` `(2)` and `hidden` `(width)` are those of its
/// [`Segment`](super::segments::Segment).
///
/// # Errors
/// If a slice is too short.
pub fn set_state(
    state: DeviceSlice<u32>,
    hidden: DeviceSlice<f32>,
    to: &State,
) -> Result<Launch<SetParams>, LaunchError> {
    let width = hidden.len();
    let params = SetParams {
        state: state.checked("the state", 2)?,
        hidden: hidden.checked("the hidden state", width)?,
        from: to.hidden.map_or(Ok(0), |from| from.checked_unaligned("the new hidden state", width))?,
        length: dimension("the length", to.length)?,
        newest: to.newest,
        width: dimension("the width", width)?,
    };
    Ok(Launch { kernel: "set_state", grid: [1, 1, 1], threads: 256, shared: 0, params })
}
