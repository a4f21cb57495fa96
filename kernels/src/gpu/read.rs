//! Reading and nothing else, for measurements: `read.cpp`.

use super::{Launch, Params, Span, Unfit, blocks};

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

/// Reads `x`, but for what is no whole 16 bytes at its end, with `num_blocks` blocks. `y` is `(num_blocks, 8)`: the exclusive
/// or of the words that each warp read.
///
/// # Errors
/// If `y` is too short.
pub fn read_all(x: Span<u32>, num_blocks: usize, y: Span<u32>) -> Result<Launch<ReadParams>, Unfit> {
    let grid = [blocks("reading", num_blocks)?, 1, 1];
    let params = ReadParams {
        x: x.holding("what is read", 0)?,
        y: y.holding("what was read", num_blocks * 8)?,
        count: (x.len() / 4) as u64,
        blocks: num_blocks as i32,
    };
    Ok(Launch { kernel: "read_all", grid, block: [256, 1, 1], params })
}
