//! Software prefetching.

/// Prefetches the cache line at an address, which need not be valid, into the L1 cache.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    prefetch_to::<1>(at);
}

/// As [`prefetch`], into the L1 or L2 cache (`LEVEL` 1 or 2).
#[inline(always)]
pub(crate) fn prefetch_to<const LEVEL: u8>(at: *const u8) {
    const { assert!(LEVEL == 1 || LEVEL == 2) };
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        // SAFETY: every x86-64 has SSE; prefetching reads nothing.
        unsafe {
            if LEVEL == 1 { _mm_prefetch::<_MM_HINT_T0>(at.cast()) } else { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: prefetching reads nothing.
    unsafe {
        std::arch::asm!("prfm pldl{level}keep, [{}]", in(reg) at, level = const LEVEL, options(readonly, nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}
