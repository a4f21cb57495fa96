//! AMX: eight registers of sixteen rows of 64 bytes, and the product of two such matrices of bytes in one instruction.

use std::arch::asm;

use crate::lanes::Avx512Lanes;

/// An operation that uses tile registers beside vectors; [`crate::Isa`]'s token evaluates it inside its features.
pub(crate) trait TileOp {
    /// Must be `#[inline(always)]`, so that the intrinsics are compiled with the features.
    fn eval(self, lanes: Avx512Lanes);
}

/// Rows and bytes of a row of one register.
#[derive(Clone, Copy)]
pub(crate) struct TileShape {
    pub rows: usize,
    pub bytes: usize,
}

/// The tile registers, configured until this is dropped.
///
/// Every `asm!` declares the registers that it writes as clobbered. Inputs and outputs they cannot be on stable Rust, so what
/// one `asm!` loads for the next rests on more: the compiler gives registers of this class to nothing but AMX's own types and
/// intrinsics, which no function here enables or uses, and calls nothing between that does.
pub(crate) struct TileRegisters(());

impl TileRegisters {
    /// # Safety
    /// This processor has tile registers, this process may use them, and there is no other value on this thread.
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
            assert!((1..=16).contains(&rows) && (1..=64).contains(&bytes), "tiles: not a register's shape");
            config.rows[tile] = rows as u8;
            config.row_bytes[tile] = bytes as u16;
        }
        // SAFETY: the caller has the registers; the configuration is the 64 bytes that palette 1 defines. All registers become
        // zero, and are declared.
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
        // SAFETY: whoever made `self` has the registers, all of which are declared. Released, they cost nothing when threads
        // are switched.
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
