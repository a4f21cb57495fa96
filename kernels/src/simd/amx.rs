//! AMX: eight tile registers of at most 16 rows of 64 bytes, and matrix products of tiles.

use std::arch::asm;

use crate::simd::avx512::float::Avx512Lanes;

/// An operation that uses tile registers and vectors; `dispatch.rs` evaluates it inside the instruction set's features.
pub(crate) trait AmxOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval(self, lanes: Avx512Lanes);
}

/// The configured shape of a tile register: rows, and bytes per row.
#[derive(Clone, Copy)]
pub(crate) struct TileShape {
    pub rows: usize,
    pub bytes: usize,
}

/// The tile registers, configured until this is dropped.
///
/// Every `asm!` declares the tile registers that it writes as clobbered. On stable Rust they cannot be inputs or
/// outputs, so a tile that one `asm!` loads for a later one relies on this: the compiler allocates this register class
/// only for AMX types and intrinsics, which no function here uses, and inserts no call to code that does.
pub(crate) struct TileRegisters(());

impl TileRegisters {
    /// Configures the eight registers; all are zero.
    ///
    /// # Safety
    /// The processor has tile registers, the process may use them, and no other `TileRegisters` exists on this thread.
    ///
    /// # Panics
    /// If a shape is empty, or larger than 16 rows of 64 bytes.
    #[inline(always)]
    pub unsafe fn new(shapes: [TileShape; 8]) -> Self {
        #[repr(C, align(64))]
        struct Config {
            palette: u8,
            start_row: u8,
            reserved: [u8; 14],
            row_bytes: [u16; 16],
            rows: [u8; 16],
        }
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (tile, TileShape { rows, bytes }) in shapes.into_iter().enumerate() {
            assert!(
                (1..=16).contains(&rows) && (1..=64).contains(&bytes),
                "tiles: a shape is empty or larger than 16 rows of 64 bytes"
            );
            config.rows[tile] = rows as u8;
            config.row_bytes[tile] = bytes as u16;
        }
        #[cfg(test)]
        if !has_tiles() {
            return Self(());
        }
        // SAFETY: the caller has the registers; the configuration is the 64 bytes of palette 1. All registers are
        // zeroed and declared as clobbered.
        unsafe {
            asm!(
                "ldtilecfg [{}]",
                in(reg) &raw const config,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags),
            );
        }
        Self(())
    }
}

impl Drop for TileRegisters {
    #[inline(always)]
    fn drop(&mut self) {
        #[cfg(test)]
        if !has_tiles() {
            return;
        }
        // SAFETY: `new` required the registers; all are declared as clobbered. Released registers are not saved at
        // context switches.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nomem, nostack, preserves_flags),
            );
        }
    }
}

/// Whether this processor has tile registers. Without them, unit tests compute tile products in scalar code, so that
/// the code around them is tested on every processor with AVX-512.
#[cfg(test)]
pub(crate) fn has_tiles() -> bool {
    crate::isa::Isa::available().any(|isa| matches!(isa, crate::isa::Isa::Amx(_)))
}
