//! The formats: bits of a code, levels, boundaries, and the meaning of a scale.

use super::side::Side;

/// The format of a page of rotated rows.
///
/// A value is `mean + scale * unit * level[code]`: levels are 8-bit integers, so that dot products are integer
/// products; the scale is an `f16` per token and scale group, the unit a constant of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CodeFormat {
    /// 2 bits per value, one scale per rotation group, keys relative to the page's mean.
    Tqc2,
    /// As [`CodeFormat::Tqc2`] with 3 bits.
    Tqc3,
    /// As [`CodeFormat::Tqc2`] with 4 bits.
    Tqc4,
    /// As [`CodeFormat::Tqc2`] with 5 bits.
    Tqc5,
    /// As [`CodeFormat::Tqc2`] with 6 bits.
    Tqc6,
    /// The codes and norms of llama.cpp forks' `turbo2`, without a mean.
    Turbo2,
    /// Their `turbo3`.
    Turbo3,
    /// Their `turbo4` of 66 bytes, also known as `tbq4`.
    Turbo4,
    /// 4-bit integers, one scale per 32 values, as ggml's `q4_0` of a rotated row.
    Q4_0,
    /// 8-bit integers, one scale per 32 values, as ggml's `q8_0` of a rotated row.
    Q8_0,
}

/// A symmetric table from its positive half, ascending.
const fn mirrored<const H: usize, const N: usize>(upper: [i8; H]) -> [i8; N] {
    let mut all = [0; N];
    let mut i = 0;
    while i < H {
        all[H + i] = upper[i];
        all[H - 1 - i] = -upper[i];
        i += 1;
    }
    all
}

/// As [`mirrored`], of floats; a table of odd length has zero in the middle.
const fn mirrored_f32<const H: usize, const N: usize>(upper: [f32; H]) -> [f32; N] {
    let mut all = [0.0; N];
    let mut i = 0;
    while i < H {
        all[N - H + i] = upper[i];
        all[H - 1 - i] = -upper[i];
        i += 1;
    }
    all
}

/// The boundaries halfway between levels.
const fn midpoints<const L: usize, const N: usize>(levels: [i8; L]) -> [f32; N] {
    let mut all = [0.0; N];
    let mut i = 0;
    while i < N {
        all[i] = (levels[i] as f32 + levels[i + 1] as f32) / 2.0;
        i += 1;
    }
    all
}

/// The optimal levels for a Gaussian (Lloyd-Max), rounded to integers: within 1 % of the optimum's error.
const LEVELS_2: [i8; 4] = mirrored([35, 117]);
const LEVELS_3: [i8; 8] = mirrored([11, 34, 60, 96]);
const LEVELS_4: [i8; 16] = mirrored([5, 15, 25, 36, 48, 62, 79, 104]);
const LEVELS_5: [i8; 32] = mirrored([2, 6, 10, 14, 18, 22, 26, 31, 36, 41, 47, 53, 60, 69, 80, 97]);
const LEVELS_6: [i8; 64] = mirrored([
    1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 28, 30, 33, 35, 38, 41, 44, 47, 50, 54, 58, 62, 66, 71, 77, 84, 92,
    103, 120,
]);
/// The forks' centroids rounded to 8 bits: relative to unit variance that adds 1.5e-7 (2 bits), 2.2e-6 (3) and 1.0e-5
/// (4) to their squared errors of .117, .0346 and .0095. `turbo4` uses [`LEVELS_4`].
const LEVELS_TURBO2: [i8; 4] = mirrored([24, 80]);
const LEVELS_TURBO3: [i8; 8] = mirrored([14, 43, 77, 125]);
const LEVELS_Q4_0: [i8; 16] = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7];

/// The forks' centroids and boundaries, for unit vectors of 128.
const CENTROIDS_TURBO2: [f32; 4] = mirrored_f32([0.039_994, 0.133_462]);
const CENTROIDS_TURBO3: [f32; 8] = mirrored_f32([0.021_460, 0.065_717, 0.117_832, 0.190_685]);
const CENTROIDS_TURBO4: [f32; 16] =
    mirrored_f32([0.011_353, 0.034_311, 0.058_069, 0.083_317, 0.111_065, 0.143_047, 0.182_907, 0.241_556]);
const BOUNDARIES_TURBO2: [f32; 3] = mirrored_f32([0.086_728]);
const BOUNDARIES_TURBO3: [f32; 7] = mirrored_f32([0.043_589, 0.091_775, 0.154_259]);
const BOUNDARIES_TURBO4: [f32; 15] =
    mirrored_f32([0.022_832, 0.046_190, 0.070_693, 0.097_191, 0.127_056, 0.162_977, 0.212_232]);

/// The quantizer of a Gaussian group.
#[derive(Clone, Copy, Debug)]
pub struct Codebook {
    /// One standard deviation, in the units of `boundaries`.
    pub spread: f32,
    /// Ascending. A value's code is the number of boundaries at or below it.
    pub boundaries: &'static [f32],
    /// The level of each code, in the units of `boundaries`.
    pub levels: Levels,
}

/// The levels that a scale is fitted to.
#[derive(Clone, Copy, Debug)]
pub enum Levels {
    /// [`CodeFormat::levels`].
    Integers(&'static [i8]),
    /// The forks' centroids, for unit vectors of 128.
    Centroids(&'static [f32]),
}

/// 1 / sqrt(128).
const SPREAD_TURBO: f32 = 0.088_388_35;

impl CodeFormat {
    /// Every format.
    pub const ALL: [Self; 10] = [
        Self::Tqc2,
        Self::Tqc3,
        Self::Tqc4,
        Self::Tqc5,
        Self::Tqc6,
        Self::Turbo2,
        Self::Turbo3,
        Self::Turbo4,
        Self::Q4_0,
        Self::Q8_0,
    ];

    /// The name used in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tqc2 => "tqc2",
            Self::Tqc3 => "tqc3",
            Self::Tqc4 => "tqc4",
            Self::Tqc5 => "tqc5",
            Self::Tqc6 => "tqc6",
            Self::Turbo2 => "turbo2",
            Self::Turbo3 => "turbo3",
            Self::Turbo4 => "turbo4",
            Self::Q4_0 => "q4_0",
            Self::Q8_0 => "q8_0",
        }
    }

    /// Bits of a code.
    pub const fn bits(self) -> usize {
        match self {
            Self::Tqc2 | Self::Turbo2 => 2,
            Self::Tqc3 | Self::Turbo3 => 3,
            Self::Tqc4 | Self::Turbo4 | Self::Q4_0 => 4,
            Self::Tqc5 => 5,
            Self::Tqc6 => 6,
            Self::Q8_0 => 8,
        }
    }

    /// Whether codes are relative to the page's mean. A component common to all keys would waste the range of the
    /// codes; values of a normalized model have nearly none, and storing their mean would cost an eighth of a bit per
    /// value.
    pub const fn centred(self, side: Side) -> bool {
        let tqc = matches!(self, Self::Tqc2 | Self::Tqc3 | Self::Tqc4 | Self::Tqc5 | Self::Tqc6);
        tqc && !matches!(side, Side::Values)
    }

    /// The value of level 1 at scale 1.
    #[inline(always)]
    pub const fn unit(self) -> f32 {
        match self {
            // The scale is then near the values' magnitude, in the middle of f16's range.
            Self::Tqc2 | Self::Tqc3 | Self::Tqc4 | Self::Tqc5 | Self::Tqc6 => 1.0 / 32.0,
            Self::Turbo2 => 0.001_667_984,
            Self::Turbo3 => 0.001_528_096,
            Self::Turbo4 => 0.002_313_519_7,
            Self::Q4_0 | Self::Q8_0 => 1.0,
        }
    }

    /// Values that share a scale, in a rotation group of `group`.
    #[inline(always)]
    pub(super) const fn scale_group(self, group: usize) -> usize {
        match self {
            Self::Q4_0 | Self::Q8_0 if group > 32 => 32,
            _ => group,
        }
    }

    /// The level of every code, ascending; `None` for 8 bits, where the code is the level.
    #[inline(always)]
    pub const fn levels(self) -> Option<&'static [i8]> {
        match self {
            Self::Tqc2 => Some(&LEVELS_2),
            Self::Tqc3 => Some(&LEVELS_3),
            Self::Tqc4 | Self::Turbo4 => Some(&LEVELS_4),
            Self::Tqc5 => Some(&LEVELS_5),
            Self::Tqc6 => Some(&LEVELS_6),
            Self::Turbo2 => Some(&LEVELS_TURBO2),
            Self::Turbo3 => Some(&LEVELS_TURBO3),
            Self::Q4_0 => Some(&LEVELS_Q4_0),
            Self::Q8_0 => None,
        }
    }

    /// The level of a code.
    #[inline(always)]
    pub(super) fn level(self, code: u8) -> i8 {
        self.levels().map_or(code as i8, |levels| levels[usize::from(code)])
    }

    /// The quantizer; `None` for `q4_0` and `q8_0`, which round to integers.
    #[inline(always)]
    pub const fn codebook(self) -> Option<Codebook> {
        const fn integers(spread: f32, boundaries: &'static [f32], levels: &'static [i8]) -> Option<Codebook> {
            Some(Codebook { spread, boundaries, levels: Levels::Integers(levels) })
        }
        const fn forks(boundaries: &'static [f32], centroids: &'static [f32]) -> Option<Codebook> {
            Some(Codebook { spread: SPREAD_TURBO, boundaries, levels: Levels::Centroids(centroids) })
        }
        // Spreads that minimize the squared error for a Gaussian.
        match self {
            Self::Tqc2 => integers(77.45, const { &midpoints::<4, 3>(LEVELS_2) }, &LEVELS_2),
            Self::Tqc3 => integers(44.64, const { &midpoints::<8, 7>(LEVELS_3) }, &LEVELS_3),
            Self::Tqc4 => integers(38.14, const { &midpoints::<16, 15>(LEVELS_4) }, &LEVELS_4),
            Self::Tqc5 => integers(29.73, const { &midpoints::<32, 31>(LEVELS_5) }, &LEVELS_5),
            Self::Tqc6 => integers(31.19, const { &midpoints::<64, 63>(LEVELS_6) }, &LEVELS_6),
            Self::Turbo2 => forks(&BOUNDARIES_TURBO2, &CENTROIDS_TURBO2),
            Self::Turbo3 => forks(&BOUNDARIES_TURBO3, &CENTROIDS_TURBO3),
            Self::Turbo4 => forks(&BOUNDARIES_TURBO4, &CENTROIDS_TURBO4),
            Self::Q4_0 | Self::Q8_0 => None,
        }
    }
}
