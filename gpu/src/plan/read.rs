//! Reads memory, to measure bandwidth: `read.cpp`.

use crate::launch::{DeviceSlice, Launch, LaunchError, Params, blocks};

/// Parameters of the kernel.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReadParams {
    x: u64,
    y: u64,
    count: u64,
    blocks: i32,
}

// SAFETY: the `Params` of read.cpp.
unsafe impl Params for ReadParams {}

/// Reads the whole 16-byte words of `x` with `num_blocks` blocks of threads. `y` is `(num_blocks, 8)`: the exclusive or
/// of the words that each warp read.
///
/// # Errors
/// If `y` is too short.
pub fn read_all(
    x: DeviceSlice<u32>,
    num_blocks: usize,
    y: DeviceSlice<u32>,
) -> Result<Launch<ReadParams>, LaunchError> {
    let grid = [blocks("reading", num_blocks)?, 1, 1];
    let params = ReadParams {
        x: x.checked("x", 0)?,
        y: y.checked("y", num_blocks * 8)?,
        count: (x.len() / 4) as u64,
        blocks: num_blocks as i32,
    };
    Ok(Launch { kernel: "read_all", grid, threads: 256, shared: 0, params })
}
