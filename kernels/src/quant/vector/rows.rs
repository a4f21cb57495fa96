//! Rows of a pass, and of a row block.

use crate::quant::layout::{PANEL_ROWS, ROW_BLOCK};
use crate::simd::bytes::ByteLanes;
use crate::simd::opaque::opaque;

/// Row blocks per pass over the weights: their sums take 4 KiB of stack, their quants of a block 24 KiB.
pub(super) const PASS_BLOCKS: usize = 8;

/// Evaluates `$run` with the number of rows as the constant `R`, at most as many as the registers hold. A condition in
/// `const` keeps the other instances from being compiled.
macro_rules! with_rows {
    ($lanes:ident, $rows:expr, |$R:ident| $run:expr) => {
        if const { $lanes::MAX_ROWS == $crate::quant::layout::ROW_BLOCK } {
            with_rows!(@match $rows, $R, $run, 1 2 3 4 5 6 7, 8)
        } else {
            with_rows!(@match $rows, $R, $run, 1 2 3, 4)
        }
    };
    (@match $rows:expr, $R:ident, $run:expr, $($r:literal)*, $last:literal) => {
        match $rows {
            $($r => {
                const $R: usize = $r;
                $run
            })*
            _ => {
                const $R: usize = $last;
                $run
            }
        }
    };
}

pub(super) use with_rows;

/// A panel's results for the row blocks of a pass.
pub(super) type Results = [[f32; PANEL_ROWS]; PASS_BLOCKS * ROW_BLOCK];

/// A vector in memory. Without one, the compiler does not align the frame, and spilled vectors straddle cache lines.
///
/// # Safety
/// The caller is inside a function with `L`'s features.
#[inline(always)]
pub(super) unsafe fn align_frame<L: ByteLanes>(l: L) {
    // SAFETY: the caller entered the features.
    let aligned = unsafe { l.zero() };
    opaque(&raw const aligned);
}
