//! Byte layout of packed weight blocks and quantized activations. AMX operands are in `amx/operands.rs`.
//!
//! # Packed weight blocks
//!
//! A *panel* is 16 consecutive rows (outputs) of a matrix. Block `b` of a panel is the 16 rows' GGUF blocks
//! `b`, field after field; within a field, units of the 16 rows are interleaved. A unit is 4 bytes for
//! weights, so that one 64-byte vector is the same four bytes of 16 rows, and 2 bytes for `f16` scales.
//! `Q4_K`, 144 bytes per row, 2304 per packed block:
//!
//! ```text
//! GGUF block of one row        packed block of 16 rows
//! byte                         byte
//!    0  d     f16                 0  d    of rows 0, 1, .. 15       2 bytes each
//!    2  dmin  f16                32  dmin of rows 0, 1, .. 15       2 bytes each
//!    4  12 bytes: 6-bit          64  bytes  4..8  of rows 0, 1, .. 15   4 bytes each
//!       scales and mins         128  bytes  8..12 of rows 0, 1, .. 15
//!                               192  bytes 12..16 of rows 0, 1, .. 15
//!   16  128 bytes: nibbles      256  bytes 16..20 of rows 0, 1, .. 15 = one vector
//!                               320  bytes 20..24 of rows 0, 1, .. 15
//!                               ...
//!  144  end                    2304  end
//! ```
//!
//! One vector of nibbles, as byte lanes load it; the low nibbles are a *quad* of inputs (four consecutive ones) of each
//! row, the high nibbles the quad 32 inputs later:
//!
//! ```text
//! lane (row)      0                   1                       15
//! byte      0   1   2   3       4   5   6   7          60  61  62  63
//! low      x0  x1  x2  x3      x0  x1  x2  x3   ...    x0  x1  x2  x3
//! high    x32 x33 x34 x35     x32 x33 x34 x35   ...   x32 x33 x34 x35
//! ```
//!
//! Fields are in file order, so that one at byte `o` of a GGUF block begins at byte `16 o` of a packed block. In
//! `Q3_K`, `Q6_K`, `TQ1_0` and `TQ2_0`, `d` and the scales precede the weights: a product reads them first, and
//! hardware prefetchers follow ascending addresses.
//!
//! Fields whose content or unit changes:
//!
//! | type | field | change | reason |
//! |---|---|---|---|
//! | `Q8_0` | weights | plus 128 | `vpdpbusd` takes one operand unsigned |
//! | `Q6_K` | 8-bit scales | units of 1 byte | 16 of them widen in one instruction |
//! | `IQ4_XS` | upper bits of scales | units of 1 byte | the same |
//! | `MXFP4` | exponents | units of 1 byte | the field is one byte long |
//! | `NVFP4` | scales | 0x7f (NaN, read as 0) to 0 | the seven bits are then finite |
//!
//! Q3_K, Q5, Q6_K, IQ1, IQ2, IQ3 and ternary blocks are first recoded (`recode.rs`). Blocks of grids and of TQ1_0
//! become longer; the others are as long as in the file, so that a range of panels occupies the same bytes before and
//! after.
//!
//! The rows after the last whole panel are not interleaved; kernels interleave those blocks on the stack.
//!
//! # Activations
//!
//! For vectors, rows are divided into row blocks of at most [`ROW_BLOCK`] rows, as equal as possible. A row block is a
//! run of activation blocks; in an activation block every array is `[index][row]`, in words of 4 bytes, so
//! that a kernel reads its rows from consecutive words:
//!
//! ```text
//! Q8_K, 256 inputs, R rows                              Q8_1, 32 inputs, R rows
//! word                                                  word
//!   0 R  quants: 4 x i8, 64 quads x R rows                0 R  quants: 4 x i8, 8 quads x R rows
//!  64 R  bsums of 32, pairs of i16 (PAIRS), 4 x R         8 R  offset: -128 * sum of 32 quants, R
//!  68 R  bsums of 16, pairs of i16 (PAIRS), 8 x R         9 R  d: f32 bits, R
//!  76 R  offsets: -32 * sums of 16 quants, 16 x R         10 R  d * sum of quants: f32 bits, R
//!  92 R  offsets of pairs, 16 x R                        11 R  offsets of 16: -16 * sums of 16 quants, 2 x R
//! 108 R  d: f32 bits, R                                  13 R  end
//! 109 R  end
//! ```
//!
//! The offsets are the initial values of accumulators if weights are stored unsigned, `w + 128` in blocks of 32 and
//! `w + 32` in blocks of 256; formats with a smaller zero point shift them right, except NVFP4, stored as `w + 16`, whose
//! four per block are those of 16. Those of pairs have the first two quants of every quad in the lower `i16`, the others
//! in the upper one. Where the sums of a scale in blocks of 256 cannot start from them
//! ([`ByteLanes::OFFSETS`](crate::simd::bytes::ByteLanes::OFFSETS)), the zero point times the products of scales and bsums
//! is subtracted at the end.
//!
//! For AMX's tile registers, rows are divided into *row tiles* of 16 and inputs into *spans* of 256; rows and blocks that
//! the last ones lack are zero. A *pass* is up to 16 row tiles; in a pass the order is `(spans, row tiles)`. The quants of
//! a row tile and a span are A operands of `amx/operands.rs`, one after the other:
//!
//! ```text
//! Q8_K                                                  Q8_1
//! word                                                  word
//!    0   quants: 4 x (16 rows, 64 x i8)                    0   quants: 8 blocks x (16 rows, 32 x i8)
//! 1024   d: f32 bits, 16 rows                           1024   8 blocks x
//! 1040   bsums of 32, pairs of i16 (PAIRS), 4 x 16               d: f32 bits, 16 rows
//! 1104   bsums of 16, pairs of i16 (PAIRS), 8 x 16               d * sum of quants: f32 bits, 16 rows
//! 1232   end                                            1280   end
//! ```

/// Rows per panel: the `i32` lanes of a 64-byte register.
pub const PANEL_ROWS: usize = 16;

/// The most panels that are read side by side.
pub const STREAMS: usize = 4;

/// Bytes of a packed quad: four inputs of 16 rows, one byte each.
pub(super) const QUAD_BYTES: usize = 4 * PANEL_ROWS;

/// The longest block of a row in bytes (Q6_K).
pub(super) const MAX_BLOCK_BYTES: usize = 210;

/// Maximum rows per row block: eight accumulators and eight sums take half of AVX-512's registers.
pub(super) const ROW_BLOCK: usize = 8;

/// The order of the bsums in their pairs, within 8 sums of 32 or within each 8 sums of 16: masking a word of four 8-bit
/// mins with `0x00ff00ff`, before and after a shift by 8, gives mins 0 and 2, and 1 and 3.
pub(super) const PAIRS: [(usize, usize); 4] = [(0, 2), (1, 3), (4, 6), (5, 7)];

/// Word offsets of the arrays in an activation block of 256, to be multiplied by its rows.
pub(super) mod q8k {
    pub const BSUMS_OF_32: usize = 64;
    pub const BSUMS_OF_16: usize = 68;
    pub const OFFSETS: usize = 76;
    pub const PAIR_OFFSETS: usize = 92;
    pub const SCALE: usize = 108;
    pub const WORDS: usize = 109;
}

/// Word offsets of the arrays in an activation block of 32, to be multiplied by its rows.
pub(super) mod q8_1 {
    pub const OFFSETS: usize = 8;
    pub const SCALE: usize = 9;
    pub const SUM: usize = 10;
    pub const OFFSETS_OF_16: usize = 11;
    pub const WORDS: usize = 13;
}
