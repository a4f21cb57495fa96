//! The `#[target_feature]` functions: each evaluates one operation with the lanes of its instruction set.
//!
//! One function per operation, because a single one with all register blocks inlined takes minutes to compile; one
//! module per function, because the compiler splits codegen units by module.

#[cfg(target_arch = "x86_64")]
use crate::simd::amx::AmxOp;
#[cfg(target_arch = "x86_64")]
use crate::simd::avx2::products::{Multiply, Vnni, Ymm, YmmPair};
#[cfg(target_arch = "x86_64")]
use crate::simd::avx512::float::Avx512Lanes;
use crate::simd::bytes::PanelOp;
use crate::simd::levels::LevelOp;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon::pair::{Dot, Matrix, NeonPair, Widen};

macro_rules! entries {
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

#[cfg(target_arch = "x86_64")]
entries! {
    avx2_panels, PanelOp, YmmPair(Multiply), "avx2,fma,f16c";
    avx_vnni_panels, PanelOp, YmmPair(Vnni), "avxvnni,avx2,fma,f16c";
    avx512_panels, PanelOp, Avx512Lanes, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c";
    avx2_levels, LevelOp, Ymm(Multiply), "avx2,fma,f16c";
    avx_vnni_levels, LevelOp, Ymm(Vnni), "avxvnni,avx2,fma,f16c";
    avx512_levels, LevelOp, Avx512Lanes, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c";
    amx, AmxOp, Avx512Lanes, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c";
}

#[cfg(target_arch = "aarch64")]
entries! {
    neon_panels, PanelOp, NeonPair(Widen), "neon";
    neon_dot_panels, PanelOp, NeonPair(Dot), "dotprod";
    neon_i8mm_panels, PanelOp, NeonPair(Matrix), "dotprod,i8mm";
    neon_levels, LevelOp, NeonPair(Widen), "neon";
    neon_dot_levels, LevelOp, NeonPair(Dot), "dotprod";
}
