//! K/V cache formats: floating point, or TurboQuant, which attention reads without dequantizing.

use std::fmt;
use std::str::FromStr;

use foretoken_kernels::ElementType;
use foretoken_kernels::attention::turboquant::CodeFormat;

use crate::{Error, Result};

/// Storage format of K, or of V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvFormat {
    /// Floating point.
    Exact(ElementType),
    /// Quantized in whole pages, once they are older than the exact tail.
    Quantized(CodeFormat),
}

impl From<ElementType> for KvFormat {
    fn from(element: ElementType) -> Self {
        KvFormat::Exact(element)
    }
}

impl From<CodeFormat> for KvFormat {
    fn from(format: CodeFormat) -> Self {
        KvFormat::Quantized(format)
    }
}

impl KvFormat {
    /// Every format: the exact ones, then the quantized ones.
    pub fn all() -> impl Iterator<Item = Self> {
        let exact = [ElementType::F32, ElementType::F16, ElementType::Bf16].map(KvFormat::Exact);
        exact.into_iter().chain(CodeFormat::ALL.map(KvFormat::Quantized))
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            KvFormat::Exact(ElementType::F32) => "f32",
            KvFormat::Exact(ElementType::F16) => "f16",
            KvFormat::Exact(ElementType::Bf16) => "bf16",
            KvFormat::Quantized(format) => format.name(),
        })
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    /// The names of llama.cpp and its forks, in any case: `turbo3` is also `turbo3_0`, `turbo4` also `tbq4` and
    /// `tbq4_0`.
    fn from_str(name: &str) -> Result<Self> {
        let lower = name.to_ascii_lowercase();
        let canonical = match lower.as_str() {
            "turbo2_0" => "turbo2",
            "turbo3_0" => "turbo3",
            "turbo4_0" | "tbq4" | "tbq4_0" => "turbo4",
            "tbq3" | "tbq3_0" => {
                let problem = "tbq3 has no single meaning: its writers disagree on signs and lose bits; use turbo3";
                return Err(Error::argument("K/V format", problem));
            }
            "turbo4-legacy" => {
                let problem = "turbo4-legacy is not supported: its levels are 1.5 times too narrow; use turbo4";
                return Err(Error::argument("K/V format", problem));
            }
            other => other,
        };
        Self::all().find(|format| format.to_string() == canonical).ok_or_else(|| {
            let names: Vec<_> = Self::all().map(|format| format.to_string()).collect();
            Error::argument("K/V format", format!("{name:?} is unknown; expected one of {}", names.join(", ")))
        })
    }
}

/// Rows of a quantized store that stay exact: attention weights are largest on the first and the last
/// positions, and so is the error of quantizing them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExactZones {
    /// The first positions, at most 128. Default: 64.
    pub head: usize,
    /// The last positions, besides a query's own. A page is quantized once all of it is older. Default: 512.
    pub tail: usize,
    /// Type of the exact rows. Default: f16.
    pub element: ElementType,
}

impl Default for ExactZones {
    fn default() -> Self {
        Self { head: 64, tail: 512, element: ElementType::F16 }
    }
}

/// Key and value formats chosen together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvPreset {
    /// f16 everywhere.
    Exact,
    /// 6-bit keys, 5-bit values, wide exact zones.
    Quality,
    /// 5-bit keys, 4-bit values.
    Balanced,
    /// 4 bits each.
    Compact,
}

impl KvPreset {
    /// Every preset, the largest first.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Quality, Self::Balanced, Self::Compact];

    /// Its command line name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Quality => "quality",
            Self::Balanced => "balanced",
            Self::Compact => "compact",
        }
    }

    /// Key format, value format, and exact zones.
    pub(super) fn formats(self) -> (KvFormat, KvFormat, ExactZones) {
        let zones = ExactZones::default();
        match self {
            Self::Exact => (ElementType::F16.into(), ElementType::F16.into(), zones),
            Self::Quality => {
                (CodeFormat::Tqc6.into(), CodeFormat::Tqc5.into(), ExactZones { head: 128, tail: 1024, ..zones })
            }
            Self::Balanced => (CodeFormat::Tqc5.into(), CodeFormat::Tqc4.into(), zones),
            Self::Compact => (CodeFormat::Tqc4.into(), CodeFormat::Tqc4.into(), zones),
        }
    }
}

impl FromStr for KvPreset {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|preset| preset.name() == name);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::argument("K/V preset", format!("{name:?} is unknown; expected one of {names}"))
        })
    }
}
