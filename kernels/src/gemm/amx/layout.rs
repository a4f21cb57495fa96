//! Operands of `tdpbf16ps`, `C[m][n] += A[m][2p] * B[p][2n] + A[m][2p + 1] * B[p][2n + 1]` for `p` in 0..16.
//!
//! A holds weights in their stored order: 16 outputs by 32 inputs, rows `2 * inputs` bytes apart.
//!
//! ```text
//!              byte 0      2            62
//! output 0      |  i 0  |  i 1  | ... |  i 31  |   bf16
//! output 1      |  i 0  |  i 1  | ... |  i 31  |
//!   ...
//! output 15     |  i 0  |  i 1  | ... |  i 31  |
//! ```
//!
//! B holds one part of the activations: 16 pairs of inputs by `width` rows, `width` at most 16.
//!
//! ```text
//!                byte 0              4                     4 * (width - 1)
//! i  0, i  1     | row 0: i 0, i 1 | row 1: i 0, i 1 | ... | row width-1: i 0, i 1 |   a u32 each: lower half i 0
//! i  2, i  3     | row 0: i 2, i 3 | ...
//!   ...
//! i 30, i 31     | row 0: i 30, 31 | ...
//! ```
//!
//! C holds sums: 16 outputs by `width` rows, `f32`.
//!
//! The words of a row block (at most 16 rows) are `(inputs / 32, PARTS, 16 pairs, width)`: the B tiles in the order in
//! which they are used. Row blocks are consecutive; missing rows of the last one and missing inputs of the last step
//! are zeros.

/// Inputs of a tile product.
pub(super) const DEPTH: usize = 32;
/// Outputs of a tile product, and its maximum number of rows.
pub(super) const SIDE: usize = 16;
/// bf16 parts of an `f32`.
pub(super) const PARTS: usize = 3;

/// Rows of a B tile: 16, or all if there are fewer.
pub(super) fn width(rows: usize) -> usize {
    rows.min(SIDE)
}

/// Words of a row block: `(inputs / 32, PARTS, 16, width)`.
pub(super) fn block_words(width: usize, inputs: usize) -> usize {
    inputs.div_ceil(DEPTH) * PARTS * DEPTH / 2 * width
}

/// Words of all row blocks.
pub(in crate::gemm) fn words(rows: usize, inputs: usize) -> usize {
    rows.div_ceil(SIDE) * block_words(width(rows), inputs)
}
