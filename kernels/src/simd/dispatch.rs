//! Dispatch from an [`Isa`] to its lanes. Nothing else selects lanes.

use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::{Amx, Avx2, Avx512};
#[cfg(target_arch = "x86_64")]
use crate::simd::amx::AmxOp;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2::products::{Multiply, Ymm};
#[cfg(target_arch = "x86_64")]
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::bytes::PanelOp;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd::entry;
use crate::simd::float::Op;
use crate::simd::levels::LevelOp;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon::float::NeonLanes;
use crate::simd::scalar::Scalar;

impl Isa {
    /// Evaluates an operation over `f32` lanes.
    #[inline]
    pub(crate) fn run<O: Op>(self, op: O) -> O::Output {
        match self {
            Isa::Scalar => op.eval(Scalar),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2(isa) => isa.run(op),
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni(isa) => isa.avx2().run(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512(isa) => isa.run(op),
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(isa) => isa.avx512().run(op),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon(_) | Isa::NeonDot(_) | Isa::NeonI8mm(_) => op.eval(NeonLanes),
        }
    }

    /// The same instruction set if it has integer vectors; `None` for [`Isa::Scalar`].
    #[inline]
    pub(crate) fn vectors(self) -> Option<VectorIsa> {
        (self != Isa::Scalar).then_some(VectorIsa(self))
    }
}

/// An instruction set with integer vectors: any but [`Isa::Scalar`].
#[derive(Clone, Copy)]
pub(crate) struct VectorIsa(Isa);

#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_unsafe, unused_variables))]
impl VectorIsa {
    /// Evaluates an operation over byte lanes.
    #[inline]
    pub(crate) fn run_panels<O: PanelOp>(self, op: O) {
        // Integration tests cover them. For unit tests alone, compiling them again would take ten minutes of CPU time.
        if const { cfg!(test) } {
            unreachable!("unit tests multiply in scalar code and in tiles");
        }
        // SAFETY: an `Isa` is only constructed if its features were detected; each entry function requires those of its
        // arm.
        unsafe {
            match self.0 {
                Isa::Scalar => unreachable!("Isa::vectors() excludes it"),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(_) => entry::avx2_panels::eval(op),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni(_) => entry::avx_vnni_panels::eval(op),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512(_) | Isa::Amx(_) => entry::avx512_panels::eval(op),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon(_) => entry::neon_panels::eval(op),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonDot(_) => entry::neon_dot_panels::eval(op),
                #[cfg(target_arch = "aarch64")]
                Isa::NeonI8mm(_) => entry::neon_i8mm_panels::eval(op),
            }
        }
    }

    /// Evaluates an operation over level lanes.
    #[inline]
    pub(crate) fn run_levels<O: LevelOp>(self, op: O) {
        if const { cfg!(test) } {
            unreachable!("unit tests attend in scalar code");
        }
        // SAFETY: an `Isa` is only constructed if its arm's features were detected; an `Avx512` also proves AVX2's.
        unsafe {
            match self.0 {
                Isa::Scalar => unreachable!("Isa::vectors() excludes it"),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2(_) => entry::avx2_levels::eval(op),
                #[cfg(target_arch = "x86_64")]
                Isa::AvxVnni(_) => entry::avx_vnni_levels::eval(op),
                // AVX2, half as wide, because the 64-byte table lookup needs VBMI.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512(isa) if !isa.has_vbmi() => entry::avx2_levels::eval(op),
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512(_) | Isa::Amx(_) => entry::avx512_levels::eval(op),
                #[cfg(target_arch = "aarch64")]
                Isa::Neon(_) => entry::neon_levels::eval(op),
                // Not `usmmla` with i8mm: table lookups cost so much more than products that arranging queries as
                // matrices does not pay off.
                #[cfg(target_arch = "aarch64")]
                Isa::NeonDot(_) | Isa::NeonI8mm(_) => entry::neon_dot_levels::eval(op),
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    #[inline]
    fn run<O: Op>(self, op: O) -> O::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn with_features<O: Op>(op: O) -> O::Output {
            op.eval(Ymm(Multiply))
        }
        // SAFETY: an `Avx2` is only constructed if the features were detected.
        unsafe { with_features(op) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Avx512 {
    #[inline]
    fn run<O: Op>(self, op: O) -> O::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
        fn with_features<O: Op>(op: O) -> O::Output {
            op.eval(Avx512Lanes)
        }
        // SAFETY: an `Avx512` is only constructed if the features were detected.
        unsafe { with_features(op) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Amx {
    /// Evaluates an operation that uses tile registers.
    #[inline]
    pub(crate) fn run_tiles<O: AmxOp>(self, op: O) {
        // SAFETY: an `Amx` is only constructed if the features were detected and the process may use tile registers.
        unsafe { entry::amx::eval(op) }
    }
}
