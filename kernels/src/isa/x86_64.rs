//! Detection on x86-64.

use std::sync::LazyLock;

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    pub(super) fn new() -> Option<Self> {
        let has =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }
}

/// Proof of AVX-VNNI, and of what [`Avx2`] proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvxVnni(Avx2);

impl AvxVnni {
    pub(super) fn new() -> Option<Self> {
        Avx2::new().filter(|_| is_x86_feature_detected!("avxvnni")).map(Self)
    }

    /// The proof of AVX2 that this one contains.
    pub(crate) fn avx2(self) -> Avx2 {
        self.0
    }
}

/// Proof of AVX-512 F, BW, DQ, VL and VNNI (and of AVX2, FMA and F16C, for tails); of VBMI if [`Avx512::has_vbmi`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512 {
    vbmi: bool,
}

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        let has = Avx2::new().is_some()
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        has.then(|| Self { vbmi: is_x86_feature_detected!("avx512vbmi") })
    }

    /// Whether VBMI is supported as well.
    pub(crate) fn has_vbmi(self) -> bool {
        self.vbmi
    }
}

/// Proof of AMX-TILE, AMX-INT8 and AMX-BF16, with permission to use them, and of what [`Avx512`] with VBMI proves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amx(Avx512);

impl Amx {
    pub(super) fn new() -> Option<Self> {
        static HAS: LazyLock<bool> = LazyLock::new(|| has_amx() && request_tile_data());
        Avx512::new().filter(|isa| isa.vbmi && *HAS).map(Self)
    }

    /// The proof of AVX-512 that this one contains.
    pub(crate) fn avx512(self) -> Avx512 {
        self.0
    }
}

/// AMX-TILE, AMX-INT8 and AMX-BF16, which `is_x86_feature_detected!` does not support on stable Rust.
fn has_amx() -> bool {
    // CPUID leaf 7, EDX: bit 22 AMX-BF16, bit 24 AMX-TILE, bit 25 AMX-INT8.
    const BITS: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    let leaf = std::arch::x86_64::__cpuid(0).eax >= 7;
    leaf && std::arch::x86_64::__cpuid_count(7, 0).edx & BITS == BITS
}

/// Requests permission to use tile registers from Linux. It applies to every thread of the process.
#[cfg(target_os = "linux")]
fn request_tile_data() -> bool {
    const ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the system call takes two integers and touches no memory of this process; it clobbers rcx and r11. A
    // kernel that does not implement it, or does not grant permission, returns an error.
    unsafe {
        std::arch::asm!(
            "syscall",
            inout("rax") result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn request_tile_data() -> bool {
    false
}
