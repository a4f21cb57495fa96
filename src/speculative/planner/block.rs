//! Block sizes, measured or fixed.

use std::str::FromStr;

use crate::{Error, Result};

/// How the number of rows is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockSize {
    /// By the planner, for every round.
    #[default]
    Measured,
    /// This many rows: `B - 1` tokens are drafted.
    Fixed(usize),
    /// A preset's.
    Preset(MtpPreset),
}

/// Named block sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MtpPreset {
    /// 2 rows for a model's draft, up to 6 for prompt lookup.
    Throughput,
    /// 3 and 8.
    Balanced,
    /// 4 and 16.
    Quality,
}

impl MtpPreset {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Throughput, Self::Balanced, Self::Quality];

    /// Its command line name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Throughput => "throughput",
            Self::Balanced => "balanced",
            Self::Quality => "quality",
        }
    }
}

impl FromStr for MtpPreset {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|preset| preset.name() == text);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            Error::argument("preset", format!("{text:?} is unknown; expected one of {names}"))
        })
    }
}

impl BlockSize {
    /// Rows for a model's draft and for prompt lookup; `None` if the planner chooses.
    pub(crate) fn rows(self) -> Option<(usize, usize)> {
        match self {
            Self::Measured => None,
            Self::Fixed(rows) => Some((rows, rows)),
            Self::Preset(MtpPreset::Throughput) => Some((2, 6)),
            Self::Preset(MtpPreset::Balanced) => Some((3, 8)),
            Self::Preset(MtpPreset::Quality) => Some((4, 16)),
        }
    }
}
