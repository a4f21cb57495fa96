//! Instruction sets as values: holding one proves that this processor supports it.
//!
//! Detection only. The code for each instruction set is in [`crate::simd`], called through `simd/dispatch.rs`.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;
mod zen;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::{Neon, NeonDot, NeonI8mm};
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::{Amx, Avx2, Avx512, AvxVnni};
pub(crate) use zen::{Zen, zen};

use crate::UnknownName;

/// An instruction set that this processor supports. The variants' fields can only be constructed in this module, so a
/// value of this type proves that the instructions exist.
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
    /// AVX-512, and AMX: matrix products of int8 or bf16 in tile registers (Sapphire Rapids and later, on Linux).
    #[cfg(target_arch = "x86_64")]
    Amx(Amx),
    /// NEON with half-precision conversion, as on every aarch64.
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    /// NEON with int8 dot products (Cortex-A75, Neoverse N1, Apple A11 and later).
    #[cfg(target_arch = "aarch64")]
    NeonDot(NeonDot),
    /// [`Isa::NeonDot`] with int8 matrix products (Neoverse V1, Cortex-A510 and X2, Apple M2 and later).
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

    /// The name used in reports and benchmark records.
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

    /// Whether it has tile registers.
    pub(crate) fn has_tiles(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx(_) => true,
            _ => false,
        }
    }
}

/// Parses an [`Isa::name`] that this processor supports.
impl std::str::FromStr for Isa {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = Self::available().find(|isa| isa.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let names = Self::available().map(Self::name).collect::<Vec<_>>().join(", ");
            let problem = format!("{name:?} is unknown, or not supported by this processor; expected one of {names}");
            UnknownName { what: "instruction set", problem }
        })
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
            let message = name.parse::<Isa>().expect_err(name).to_string();
            let lists_all = Isa::available().all(|isa| message.contains(isa.name()));
            assert!(message.contains(&format!("{name:?}")) && lists_all && !message.contains('\n'), "{message}");
        }
    }
}
