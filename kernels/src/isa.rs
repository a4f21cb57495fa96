//! The instruction sets, as values: holding one proves that this processor executes it.

#[cfg(target_arch = "aarch64")]
use crate::lanes::NeonLanes;
use crate::lanes::{Op, Scalar};

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Amx, Avx2, Avx512, AvxVnni, avx_vnni_panels, avx2_panels, avx512_panels};

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{Neon, NeonDot, NeonI8mm, neon_dot_panels, neon_i8mm_panels, neon_panels};

/// An instruction set that this processor has. The variants' fields cannot be made outside this file, so a value of
/// this type is the proof that its instructions exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, one lane: the reference.
    Scalar,
    /// AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// AVX2 and VNNI's dot products without AVX-512 (Alder Lake and later).
    #[cfg(target_arch = "x86_64")]
    AvxVnni(AvxVnni),
    /// AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and later).
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// AVX-512, and products of matrices of bytes or brain floats in tile registers (Sapphire Rapids and later, on Linux).
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// NEON with half-precision conversion, as on every aarch64.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    /// NEON with dot products of bytes (Cortex-A75, Neoverse N1, Apple A11 and later).
    #[cfg(target_arch = "aarch64")]
    NeonDot(NeonDot),
    /// That, with products of byte matrices (Neoverse V1, Cortex-A510 and X2, Apple M2 and later).
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(NeonI8mm),
}

impl Isa {
    /// The widest instruction set of this processor.
    pub fn best() -> Self {
        Self::available().next_back().unwrap_or(Isa::Scalar)
    }

    /// Every instruction set of this processor, the scalar reference first, the widest last.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        [
            Some(Isa::Scalar),
            #[cfg(target_arch = "x86_64")]
            Avx2::new().map(Isa::Avx2),
            #[cfg(target_arch = "x86_64")]
            AvxVnni::new().map(Isa::AvxVnni),
            #[cfg(target_arch = "x86_64")]
            Avx512::new().map(Isa::Avx512),
            #[cfg(target_arch = "x86_64")]
            Amx::new().map(Isa::Amx),
            #[cfg(target_arch = "aarch64")]
            Some(Isa::Neon(Neon::new())),
            #[cfg(target_arch = "aarch64")]
            NeonDot::new().map(Isa::NeonDot),
            #[cfg(target_arch = "aarch64")]
            NeonI8mm::new().map(Isa::NeonI8mm),
        ]
        .into_iter()
        .flatten()
    }

    /// The name that reports and benchmark records use.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(_) => "avx-vnni",
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(_) => "amx",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => "neon",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot(_) => "neon-dotprod",
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm(_) => "neon-i8mm",
        }
    }

    /// Evaluates a lane-generic operation with this instruction set's lanes.
    #[inline]
    pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
        match self {
            Isa::Scalar => op.eval(Scalar),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.run(op),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(isa) => isa.run(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(isa) => isa.run(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(isa) => isa.run(op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) | Isa::NeonDot(_) | Isa::NeonI8mm(_) => op.eval(NeonLanes),
        }
    }
}

/// By [`Isa::name`], among those that this processor has.
impl std::str::FromStr for Isa {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::available().find(|isa| isa.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let names = Self::available().map(Self::name).collect::<Vec<_>>().join(", ");
            format!("{name:?} is no instruction set of this processor; available: {names}")
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use crate::lanes::{Avx512Lanes, Multiply, Op, Vnni, Ymm};
    use crate::quant::PanelOp;
    use crate::tile_registers::TileOp;
    use crate::turbo::CodeOp;
    use std::sync::LazyLock;

    /// Defines a module with one function: that evaluates an operation with the features of an instruction set. A function of
    /// its own per operation, because a single one with all tile shapes inlined takes the compiler minutes; a module of its own,
    /// because the compiler's threads share the work by modules.
    macro_rules! evaluators {
        ($($name:ident, $op:ident, $lanes:expr, $features:literal;)*) => {$(
            pub(crate) mod $name {
                use super::*;

                #[inline(never)]
                #[target_feature(enable = $features)]
                pub(crate) fn eval<O: $op>(op: O) {
                    op.eval($lanes);
                }
            }
        )*};
    }

    evaluators! {
        avx2_panels, PanelOp, Ymm(Multiply), "avx2,fma,f16c";
        avx_vnni_panels, PanelOp, Ymm(Vnni), "avxvnni,avx2,fma,f16c";
        avx512_panels, PanelOp, Avx512Lanes, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c";
        avx2_codes, CodeOp, Ymm(Multiply), "avx2,fma,f16c";
        avx_vnni_codes, CodeOp, Ymm(Vnni), "avxvnni,avx2,fma,f16c";
        avx512_codes, CodeOp, Avx512Lanes, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c";
        tiles, TileOp, Avx512Lanes, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c";
    }

    /// Proof of AVX2, FMA and F16C.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Avx2(());

    impl Avx2 {
        pub(crate) fn new() -> Option<Self> {
            let has =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            has.then_some(Self(()))
        }

        #[inline]
        pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
            #[target_feature(enable = "avx2,fma,f16c")]
            fn with_features<O: Op>(op: O) -> O::Output {
                op.eval(Ymm(Multiply))
            }
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { with_features(op) }
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx2_panels::eval(op) }
        }

        /// Evaluates an operation over codes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx2_codes::eval(op) }
        }
    }

    /// Proof of AVX-VNNI, and of what [`Avx2`] proves.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct AvxVnni(Avx2);

    impl AvxVnni {
        pub(crate) fn new() -> Option<Self> {
            Avx2::new().filter(|_| is_x86_feature_detected!("avxvnni")).map(Self)
        }

        /// Floats gain nothing.
        #[inline]
        pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
            self.0.run(op)
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx_vnni_panels::eval(op) }
        }

        /// Evaluates an operation over codes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx_vnni_codes::eval(op) }
        }
    }

    /// Proof of AVX-512 F, BW, DQ, VL and VNNI (and of AVX2, FMA and F16C, for tails); of VBMI where it says so.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Avx512 {
        vbmi: bool,
    }

    impl Avx512 {
        pub(crate) fn new() -> Option<Self> {
            let has = Avx2::new().is_some()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            has.then(|| Self { vbmi: is_x86_feature_detected!("avx512vbmi") })
        }

        #[inline]
        pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            fn with_features<O: Op>(op: O) -> O::Output {
                op.eval(Avx512Lanes)
            }
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { with_features(op) }
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx512_panels::eval(op) }
        }

        /// Evaluates an operation over codes, without VBMI in the narrower lanes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features of either.
            unsafe { if self.vbmi { avx512_codes::eval(op) } else { avx2_codes::eval(op) } }
        }
    }

    /// Proof of tile registers with products of bytes and of brain floats, which this process may use, and of what [`Avx512`]
    /// with VBMI proves.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Amx(Avx512);

    impl Amx {
        pub(crate) fn new() -> Option<Self> {
            static HAS: LazyLock<bool> = LazyLock::new(|| has_tiles() && may_use_tiles());
            Avx512::new().filter(|isa| isa.vbmi && *HAS).map(Self)
        }

        /// Evaluates an operation over floats in vectors.
        #[inline]
        pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
            self.0.run(op)
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            self.0.run_panels(op);
        }

        /// Evaluates an operation over codes in vectors.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            self.0.run_codes(op);
        }

        /// Evaluates an operation that uses tile registers.
        #[inline]
        pub(crate) fn run_tiles<O: TileOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features and has the tiles.
            unsafe { tiles::eval(op) }
        }
    }

    /// AMX-TILE, AMX-INT8 and AMX-BF16, which the standard library's detection does not know on stable Rust.
    fn has_tiles() -> bool {
        const BITS: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        let leaf = std::arch::x86_64::__cpuid(0).eax >= 7;
        leaf && std::arch::x86_64::__cpuid_count(7, 0).edx & BITS == BITS
    }

    /// Linux gives tile registers to a process that asks for them; threads that start later have them too.
    #[cfg(target_os = "linux")]
    fn may_use_tiles() -> bool {
        const ARCH_PRCTL: usize = 158;
        const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
        const TILE_DATA: usize = 18;
        let mut result = ARCH_PRCTL;
        // SAFETY: the system call takes two numbers and touches no memory of ours; it clobbers rcx and r11. A kernel that
        // does not know it, or does not grant it, answers with an error.
        unsafe {
            std::arch::asm!(
                "syscall",
                inout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") TILE_DATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    }

    #[cfg(not(target_os = "linux"))]
    fn may_use_tiles() -> bool {
        false
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use crate::lanes::neon_pair::{Dot, Matrix, NeonPair, Widen};
    use crate::quant::PanelOp;
    use crate::turbo::CodeOp;
    use std::arch::is_aarch64_feature_detected;

    /// A function of its own per operation, as on x86-64.
    #[inline(never)]
    pub(crate) fn neon_panels<O: PanelOp>(op: O) {
        op.eval(NeonPair(Widen));
    }

    /// As [`neon_panels`].
    #[inline(never)]
    #[target_feature(enable = "dotprod")]
    pub(crate) fn neon_dot_panels<O: PanelOp>(op: O) {
        op.eval(NeonPair(Dot));
    }

    /// As [`neon_panels`].
    #[inline(never)]
    #[target_feature(enable = "dotprod,i8mm")]
    pub(crate) fn neon_i8mm_panels<O: PanelOp>(op: O) {
        op.eval(NeonPair(Matrix));
    }

    /// As [`neon_panels`].
    #[inline(never)]
    fn neon_codes<O: CodeOp>(op: O) {
        op.eval(NeonPair(Widen));
    }

    /// As [`neon_panels`].
    #[inline(never)]
    #[target_feature(enable = "dotprod")]
    fn neon_dot_codes<O: CodeOp>(op: O) {
        op.eval(NeonPair(Dot));
    }

    /// NEON, which every aarch64 processor has.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Neon(());

    impl Neon {
        pub(crate) fn new() -> Self {
            Self(())
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            neon_panels(op);
        }

        /// Evaluates an operation over codes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            neon_codes(op);
        }
    }

    /// Proof of `dotprod`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct NeonDot(());

    impl NeonDot {
        pub(crate) fn new() -> Option<Self> {
            is_aarch64_feature_detected!("dotprod").then_some(Self(()))
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the feature.
            unsafe { neon_dot_panels(op) }
        }

        /// Evaluates an operation over codes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the feature.
            unsafe { neon_dot_codes(op) }
        }
    }

    /// Proof of `dotprod` and `i8mm`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct NeonI8mm(NeonDot);

    impl NeonI8mm {
        pub(crate) fn new() -> Option<Self> {
            NeonDot::new().filter(|_| is_aarch64_feature_detected!("i8mm")).map(Self)
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { neon_i8mm_panels(op) }
        }

        /// Evaluates an operation over codes: looking levels up costs so much more than multiplying them that arranging
        /// queries for matrix products does not pay.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            self.0.run_codes(op);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Isa;

    #[test]
    fn names_parse() {
        for isa in Isa::available() {
            assert_eq!(isa.name().parse(), Ok(isa));
            assert_eq!(isa.name().to_uppercase().parse(), Ok(isa));
        }
        for name in ["", "avx", "neon,scalar"] {
            let message = name.parse::<Isa>().expect_err(name);
            let lists_all = Isa::available().all(|isa| message.contains(isa.name()));
            assert!(message.contains(&format!("{name:?}")) && lists_all && !message.contains('\n'), "{message}");
        }
    }
}
