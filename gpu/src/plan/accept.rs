//! Greedy acceptance on the device: `accept.cpp`.

use crate::launch::{DeviceSlice, Launch, LaunchError, Params, dimension};

/// The results of [`accept_greedy`].
#[derive(Clone, Copy, Debug)]
pub struct AcceptOutput {
    /// `(4)`: number of accepted drafts, the token after them, number of emitted tokens, the last emitted token.
    pub counts: DeviceSlice<u32>,
    /// `(drafts + 1)`: the emitted tokens; the rest is unspecified.
    pub tokens: DeviceSlice<u32>,
    /// `(width)`: the hidden row that predicted the last emitted token.
    pub hidden: DeviceSlice<f32>,
}

/// Parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AcceptParams {
    drafts: u64,
    chosen: u64,
    stops: u64,
    hidden: u64,
    counts: u64,
    tokens: u64,
    last_hidden: u64,
    count: i32,
    num_stops: i32,
    width: i32,
}

// SAFETY: the `Params` of accept.cpp.
unsafe impl Params for AcceptParams {}

/// Accepts drafts while they equal the target's argmax; emits them and the token after them, up to the first stop token.
///
/// * `drafts`: `(count)`; `chosen`: `(count + 1)`, the target's argmax after the last token and after every draft.
/// * `stops`: `(num_stops)` ids. `hidden`: `(count + 1, width)`.
///
/// # Errors
/// If a slice is too short.
pub fn accept_greedy(
    (drafts, count): (DeviceSlice<u32>, usize),
    chosen: DeviceSlice<u32>,
    (stops, num_stops): (DeviceSlice<u32>, usize),
    (hidden, width): (DeviceSlice<f32>, usize),
    out: &AcceptOutput,
) -> Result<Launch<AcceptParams>, LaunchError> {
    let params = AcceptParams {
        drafts: drafts.checked("the drafts", count)?,
        chosen: chosen.checked("the target's choices", count + 1)?,
        stops: stops.checked("the stop tokens", num_stops)?,
        hidden: hidden.checked("the hidden rows", (count + 1) * width)?,
        counts: out.counts.checked("the counts", 4)?,
        tokens: out.tokens.checked("the emitted tokens", count + 1)?,
        last_hidden: out.hidden.checked("the last hidden row", width)?,
        count: dimension("drafts", count)?,
        num_stops: dimension("stop tokens", num_stops)?,
        width: dimension("width", width)?,
    };
    Ok(Launch { kernel: "accept_greedy", grid: [1, 1, 1], block: [256, 1, 1], params })
}
