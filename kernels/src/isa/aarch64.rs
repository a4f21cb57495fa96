//! Detection on aarch64.

use std::arch::is_aarch64_feature_detected;

/// NEON, which every aarch64 processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Neon(());

impl Neon {
    pub(super) fn new() -> Self {
        Self(())
    }
}

/// Proof of `dotprod`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeonDot(());

impl NeonDot {
    pub(super) fn new() -> Option<Self> {
        is_aarch64_feature_detected!("dotprod").then_some(Self(()))
    }
}

/// Proof of `dotprod` and `i8mm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeonI8mm(());

impl NeonI8mm {
    pub(super) fn new() -> Option<Self> {
        (NeonDot::new().is_some() && is_aarch64_feature_detected!("i8mm")).then_some(Self(()))
    }
}
