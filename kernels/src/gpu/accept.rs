//! The greedy verdict on the device: `accept.cpp`.

use super::{Launch, Params, Span, Unfit, dimension};

/// Where a verdict is written.
#[derive(Clone, Copy, Debug)]
pub struct Verdict {
    /// `(4)`: drafts that stand, the token after them, tokens emitted, the newest of them.
    pub verdict: Span<u32>,
    /// `(drafts + 1)`: what is emitted, at the front.
    pub tokens: Span<u32>,
    /// `(width)`: the hidden row that predicted the newest token.
    pub newest: Span<f32>,
}

/// Parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AcceptParams {
    drafts: u64,
    chosen: u64,
    stops: u64,
    hidden: u64,
    verdict: u64,
    tokens: u64,
    newest: u64,
    count: i32,
    num_stops: i32,
    width: i32,
}

// SAFETY: the `Params` of accept.cpp.
unsafe impl Params for AcceptParams {}

/// How many drafts are the target's own choices, what follows them, and what of it is emitted: up to the first stop token.
///
/// * `drafts`: `(count)`; `chosen`: `(count + 1)`, the target's argmax after the newest token and after every draft.
/// * `stops`: ids, and how many. `hidden`: `(count + 1, width)`.
///
/// # Errors
/// If a span is too short.
pub fn accept_greedy(
    (drafts, count): (Span<u32>, usize),
    chosen: Span<u32>,
    (stops, num_stops): (Span<u32>, usize),
    (hidden, width): (Span<f32>, usize),
    out: &Verdict,
) -> Result<Launch<AcceptParams>, Unfit> {
    let params = AcceptParams {
        drafts: drafts.holding("the drafts", count)?,
        chosen: chosen.holding("the target's tokens", count + 1)?,
        stops: stops.holding("the stop tokens", num_stops)?,
        hidden: hidden.holding("the hidden rows", (count + 1) * width)?,
        verdict: out.verdict.holding("the verdict", 4)?,
        tokens: out.tokens.holding("the emitted tokens", count + 1)?,
        newest: out.newest.holding("the newest hidden row", width)?,
        count: dimension("drafts", count)?,
        num_stops: dimension("stop tokens", num_stops)?,
        width: dimension("width", width)?,
    };
    Ok(Launch { kernel: "accept_greedy", grid: [1, 1, 1], block: [256, 1, 1], params })
}
