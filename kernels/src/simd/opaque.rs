//! Optimization barriers for pointers.

/// Hides a pointer's target from the optimizer, which then neither keeps values loaded through other pointers in
/// registers nor precomputes addresses. Both would spill where registers are few.
#[inline(always)]
pub(crate) fn opaque<T>(pointer: *const T) -> *const T {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        let mut pointer = pointer;
        // SAFETY: the template has no instruction.
        #[allow(clippy::pointers_in_nomem_asm_block)]
        unsafe {
            std::arch::asm!("/* {} */", inout(reg) pointer, options(nomem, nostack, preserves_flags))
        };
        pointer
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    pointer
}
