//! The instruction sets, as values: holding one proves that this processor executes it.

use crate::lanes::{Op, Scalar};

#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Avx2, Avx512, avx2_panels, avx512_panels};

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::Neon;

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
    /// AVX-512 F, BW, DQ, VL and VNNI (Ice Lake, Zen 4 and later).
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// NEON with half-precision conversion, as on every aarch64.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
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
            Avx512::new().map(Isa::Avx512),
            #[cfg(target_arch = "aarch64")]
            Some(Isa::Neon(Neon::new())),
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
            Isa::Avx512(_) => "avx512",
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) => "neon",
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
            Isa::Avx512(isa) => isa.run(op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(isa) => isa.run(op),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use crate::lanes::{Avx2Lanes, Avx512Lanes, Op};
    use crate::quant::PanelOp;
    use crate::turbo::CodeOp;

    /// A function of its own per operation: kernels divide their work into several, because a single one with all tile
    /// shapes inlined takes the compiler minutes.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    pub(crate) fn avx2_panels<O: PanelOp>(op: O) {
        op.eval(Avx2Lanes);
    }

    /// As [`avx2_panels`].
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(crate) fn avx512_panels<O: PanelOp>(op: O) {
        op.eval(Avx512Lanes);
    }

    /// As [`avx2_panels`].
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2_codes<O: CodeOp>(op: O) {
        op.eval(Avx2Lanes);
    }

    /// As [`avx2_panels`].
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
    fn avx512_codes<O: CodeOp>(op: O) {
        op.eval(Avx512Lanes);
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
                op.eval(Avx2Lanes)
            }
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { with_features(op) }
        }

        /// Evaluates an operation over byte lanes.
        #[inline]
        pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx2_panels(op) }
        }

        /// Evaluates an operation over codes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features.
            unsafe { avx2_codes(op) }
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
            unsafe { avx512_panels(op) }
        }

        /// Evaluates an operation over codes, without VBMI in the narrower lanes.
        #[inline]
        pub(crate) fn run_codes<O: CodeOp>(self, op: O) {
            // SAFETY: `self` is only made by `new`, which found the features of either.
            unsafe { if self.vbmi { avx512_codes(op) } else { avx2_codes(op) } }
        }
    }
}

#[cfg(target_arch = "aarch64")]
mod aarch64 {
    use crate::lanes::{NeonLanes, Op};

    /// NEON, which every aarch64 processor has.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Neon(());

    impl Neon {
        pub(crate) fn new() -> Self {
            Self(())
        }

        #[inline]
        pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
            op.eval(NeonLanes)
        }
    }
}
