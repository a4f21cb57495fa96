//! Tile products in scalar code, for unit tests on processors without tile registers.

use std::mem::MaybeUninit;

use super::operands::CTile;
use crate::quant::activations::TILE_ROWS;
use crate::quant::layout::{PANEL_ROWS, QUAD_BYTES};

/// The bytes of B.
#[derive(Clone, Copy)]
pub(super) enum B {
    Signed,
    Unsigned,
}

/// `c += a * b` over `depth` inputs.
///
/// # Safety
/// `a` and `b` are tiles of this depth, and `c` is initialised.
pub(super) unsafe fn multiply(a: *const u8, b: *const MaybeUninit<u8>, bytes: B, depth: usize, c: &mut CTile) {
    for m in 0..TILE_ROWS {
        for n in 0..PANEL_ROWS {
            let dot = (0..depth).map(|k| {
                // SAFETY: `a` is `(TILE_ROWS, depth)`, `b` is `(depth / 4, PANEL_ROWS, 4)`, both initialised.
                let (x, w) = unsafe {
                    let w = (*b.add(k / 4 * QUAD_BYTES + 4 * n + k % 4)).assume_init();
                    (*a.add(m * depth + k) as i8, w)
                };
                i32::from(x)
                    * match bytes {
                        B::Signed => i32::from(w as i8),
                        B::Unsigned => i32::from(w),
                    }
            });
            let c = &mut c.0[m * PANEL_ROWS + n];
            // SAFETY: the caller initialised `c`.
            c.write(unsafe { c.assume_init() } + dot.sum::<i32>());
        }
    }
}
