//! Unpacking in registers: each format's weights as unsigned bytes, and its scales as vectors.
//!
//! Offsets are into one row's bytes in the order of [`super::layout`], a sixteenth of those in the packed block. `lane`
//! is the first of the panel's rows that the vectors hold: 0 with 16 lanes, 0 or 8 with 8.

mod blocks_256;
mod blocks_32;
mod format;
mod levels;
mod ternary;

pub(super) use blocks_32::{Q40, Q41, Q50, Q51, Q80};
pub(super) use blocks_256::{Q2K, Q3K, Q4K, Q5K, Q6K};
pub(super) use format::{BlockScales, Format};
pub(super) use levels::{Iq1M, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, Iq4Nl, Iq4Xs, Mxfp4, Nvfp4};
pub(super) use ternary::{Iq1S, Tq};

/// Evaluates `$run` with `$F` as the [`Format`] of a weight type.
macro_rules! with_format {
    ($weight_type:expr, |$F:ident| $run:expr) => {
        with_format!(@each $weight_type, $F, $run, Q4_0 Q40, Q4_1 Q41, Q5_0 Q50, Q5_1 Q51, Q8_0 Q80, Q2_K Q2K, Q3_K Q3K,
            Q4_K Q4K, Q5_K Q5K, Q6_K Q6K, IQ4_NL Iq4Nl, IQ4_XS Iq4Xs, MXFP4 Mxfp4, NVFP4 Nvfp4, TQ1_0 Tq, TQ2_0 Tq,
            IQ1_S Iq1S, IQ1_M Iq1M, IQ2_XXS Iq2Xxs, IQ2_XS Iq2Xs, IQ2_S Iq2Xs, IQ3_XXS Iq3Xxs, IQ3_S Iq3S)
    };
    (@each $weight_type:expr, $F:ident, $run:expr, $($type:ident $format:ident),*) => {
        match $weight_type {
            $($crate::quant::weight_type::WeightType::$type => {
                type $F = $crate::quant::unpack::$format;
                $run
            })*
        }
    };
}
pub(super) use with_format;
