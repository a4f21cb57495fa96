//! Software prefetching.

/// Prefetches the cache line at an address, which need not be valid, into the first-level cache.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 has SSE; prefetching reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: prefetching reads nothing.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{}]", in(reg) at, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

/// As [`prefetch`], into the second-level cache.
#[inline(always)]
pub(crate) fn prefetch_to_level_2(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 has SSE; prefetching reads nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: prefetching reads nothing.
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) at, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
