//! AMD's processors whose hardware prefetchers need other streams and prefetches than those of other processors.

/// One of them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Zen {
    Four,
    Five,
}

/// Which of them this is.
#[cfg(target_arch = "x86_64")]
pub(crate) fn zen() -> Option<Zen> {
    // CPUID leaf 1, EAX: bits 20 to 27 are added to a family of 15; bits 16 to 19 are the upper half of the model.
    static SIGNATURE: std::sync::LazyLock<u32> = std::sync::LazyLock::new(|| std::arch::x86_64::__cpuid(1).eax);
    let (family, upper_model) = (15 + (*SIGNATURE >> 20 & 0xff), *SIGNATURE >> 16 & 0xf);
    // Only AMD's have SSE4a. Zen 3 has the other models of Zen 4's family.
    match (is_x86_feature_detected!("sse4a"), family, upper_model) {
        (true, 0x19, 1 | 6..=0xa) => Some(Zen::Four),
        (true, 0x1a, 0..=2 | 4 | 6 | 7) => Some(Zen::Five),
        _ => None,
    }
}

/// None of them.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn zen() -> Option<Zen> {
    None
}
