//! Byte layout of a page.
//!
//! A page is 128 tokens of one KV head: codes, then scales, then (where [`CodeFormat::centred`]) a mean.
//!
//! ```text
//! byte 0                 codes: the upper plane, then the lower plane (multiples of 64 bytes each)
//! code_bytes()           scales: f16, (scale groups, 128 tokens)
//! + 2 * scales()         mean: f16, (head_dim)
//! bytes()                end
//! ```
//!
//! # Vectors
//!
//! Codes come in *vectors* of 64: 16 lanes by 4 of depth, the four of a lane side by side, as integer dot products read
//! them.
//!
//! ```text
//! element      0  1  2  3     4  5  6  7          60 61 62 63
//! lane              0              1        ...        15
//! depth        0  1  2  3     0  1  2  3          0  1  2  3
//!
//! Keys:          lane = token of a strip of 16, depth = channel      -> a dot product's result is one score per lane
//! Values, KEqV:  lane = channel of a strip of 16, depth = token      -> one output per lane
//! ```
//!
//! A *run* is the vectors of one strip of 16 lanes, in order of depth: those of one scale group for keys, of all 128
//! tokens for values. Runs lie in order of group, then strip, and are read in that order.
//!
//! # Planes
//!
//! Each run has 64-byte *lines* in one or two planes; byte `i` of a line has bits of element `i` of several vectors,
//! those of the earlier vectors lower. The upper plane has the upper bits of a code, so that it is a coarser code by
//! itself.
//!
//! | bits of a code | upper plane | lower plane | vectors per line |
//! |---|---|---|---|
//! | 2 | 2 | | 4 |
//! | 3 | 2 | 1 | 4; 8 |
//! | 4 | 4 | | 2 |
//! | 5 | 4 | 1 | 2; 8 |
//! | 6 | 4 | 2 | 2; 4 |
//! | 8 | 8 | | 1 |
//!
//! A byte of each plane at 3 bits, `v0` being the run's first vector in the line:
//!
//! ```text
//! bit          7   6 | 5   4 | 3   2 | 1   0           7    6    5    4    3    2    1    0
//! upper      v3 2..1 |v2 2..1|v1 2..1|v0 2..1    lower v7 0 v6 0 v5 0 v4 0 v3 0 v2 0 v1 0 v0 0
//! ```
//!
//! A page of keys at 3 bits with head_dim 128 (one scale group, 8 strips of 32 vectors):
//!
//! ```text
//! byte     0    upper plane: strip 0, 8 lines (tokens 0..16, channels 0..16, 16..32, ..)
//!        512                 strip 1, 8 lines (tokens 16..32)
//!        ...
//!       4096    lower plane: strip 0, 4 lines
//!       4352                 strip 1, 4 lines
//!        ...
//!       6144    128 scales
//!       6400    128 means (tqc3; turbo3 ends here)
//!       6656    end
//! ```

use std::ops::Range;

use super::codebook::CodeFormat;
use super::rotation::RotationGroups;
use super::side::{PAGE_TOKENS, Side};

/// Lanes of a vector.
pub(super) const LANES: usize = 16;
/// Bytes of a line, and codes of a vector.
pub(super) const LINE: usize = 64;

/// The shape of a page's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageLayout {
    format: CodeFormat,
    side: Side,
    groups: RotationGroups,
}

/// Channels that share a scale.
#[derive(Clone, Copy, Debug)]
pub(super) struct ScaleGroup {
    pub index: usize,
    pub first: usize,
    pub len: usize,
}

impl ScaleGroup {
    #[inline(always)]
    pub fn channels(self) -> Range<usize> {
        self.first..self.first + self.len
    }
}

/// Byte offsets of a run's lines in the two planes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub upper: usize,
    pub lower: usize,
}

impl PageLayout {
    /// A page of 128 tokens of rows in `groups`.
    pub const fn new(format: CodeFormat, side: Side, groups: RotationGroups) -> Self {
        Self { format, side, groups }
    }

    /// The format.
    pub const fn format(self) -> CodeFormat {
        self.format
    }

    /// The role of the page.
    pub const fn side(self) -> Side {
        self.side
    }

    /// The rotation groups of a row.
    pub const fn groups(self) -> RotationGroups {
        self.groups
    }

    /// Width of a row.
    pub const fn head_dim(self) -> usize {
        self.groups.head_dim()
    }

    /// Bytes of codes. They should begin at a multiple of 64.
    pub fn code_bytes(self) -> usize {
        let (upper, lower) = self.plane_bytes();
        upper + lower
    }

    /// Number of scales: `(scale groups, 128 tokens)`.
    pub fn scales(self) -> usize {
        PAGE_TOKENS * self.scale_groups().count()
    }

    /// Entries of the mean: `head_dim`, or none.
    pub const fn mean(self) -> usize {
        if self.format.centred(self.side) { self.head_dim() } else { 0 }
    }

    /// All bytes of a page: codes, then scales and mean of two bytes each.
    pub fn bytes(self) -> usize {
        self.code_bytes() + 2 * (self.scales() + self.mean())
    }

    /// The scale groups in order of channel.
    #[inline(always)]
    pub(super) fn scale_groups(self) -> ScaleGroups {
        ScaleGroups { layout: self, index: 0, first: 0 }
    }

    /// Bits in the upper and in the lower plane.
    #[inline(always)]
    pub const fn plane_bits(self) -> (usize, usize) {
        match self.format.bits() {
            bits @ (2 | 4 | 8) => (bits, 0),
            3 => (2, 1),
            bits => (4, bits - 4),
        }
    }

    /// Vectors of a run: of the scale group for keys, of the page for values.
    #[inline(always)]
    const fn run_vectors(self, group: usize) -> usize {
        match self.side {
            Side::Keys => group / 4,
            Side::Values | Side::KEqV => PAGE_TOKENS / 4,
        }
    }

    /// Bytes of a run in the upper and in the lower plane: whole lines.
    #[inline(always)]
    fn run_bytes(self, group: usize) -> (usize, usize) {
        let (upper, lower) = self.plane_bits();
        let vectors = self.run_vectors(group);
        (LINE * (vectors * upper).div_ceil(8), LINE * (vectors * lower).div_ceil(8))
    }

    fn plane_bytes(self) -> (usize, usize) {
        match self.side {
            Side::Keys => self.bytes_of(self.scale_groups()),
            Side::Values | Side::KEqV => {
                let ((upper, lower), strips) = (self.run_bytes(0), self.head_dim() / LANES);
                (strips * upper, strips * lower)
            }
        }
    }

    /// Bytes of groups of keys.
    fn bytes_of(self, groups: impl Iterator<Item = ScaleGroup>) -> (usize, usize) {
        let mut bytes = (0, 0);
        for group in groups {
            let (upper, lower) = self.run_bytes(group.len);
            bytes = (bytes.0 + PAGE_TOKENS / LANES * upper, bytes.1 + PAGE_TOKENS / LANES * lower);
        }
        bytes
    }

    /// The first run of `group`, and the bytes from one strip's run to the next.
    #[inline(always)]
    pub(super) fn runs(self, group: ScaleGroup) -> (Run, (usize, usize)) {
        let strip = self.run_bytes(group.len);
        let (upper, lower) = match self.side {
            Side::Keys => self.bytes_of(self.scale_groups().take(group.index)),
            Side::Values | Side::KEqV => (group.first / LANES * strip.0, group.first / LANES * strip.1),
        };
        (Run { upper, lower: self.plane_bytes().0 + lower }, strip)
    }

    /// The run of `group` in `strip`. Strips count 16 tokens of the page for keys, 16 channels of the row for values.
    #[inline(always)]
    pub(super) fn run(self, strip: usize, group: ScaleGroup) -> Run {
        let (first, bytes) = self.runs(group);
        let strip = match self.side {
            Side::Keys => strip,
            Side::Values | Side::KEqV => strip - group.first / LANES,
        };
        Run { upper: first.upper + strip * bytes.0, lower: first.lower + strip * bytes.1 }
    }

    /// The place of a token's channel: strip, vector of the run, element of the vector.
    #[inline(always)]
    pub(super) fn place(self, token: usize, channel: usize, group: ScaleGroup) -> (usize, usize, usize) {
        let (lane, depth) = match self.side {
            Side::Keys => (token, channel - group.first),
            Side::Values | Side::KEqV => (channel, token),
        };
        (lane / LANES, depth / 4, 4 * (lane % LANES) + depth % 4)
    }
}

/// Iterates over a row's scale groups: the next one's index and first channel.
pub(super) struct ScaleGroups {
    layout: PageLayout,
    index: usize,
    first: usize,
}

impl Iterator for ScaleGroups {
    type Item = ScaleGroup;

    #[inline(always)]
    fn next(&mut self) -> Option<ScaleGroup> {
        let Self { layout: PageLayout { format, groups, .. }, index, first } = *self;
        if first == groups.head_dim() {
            return None;
        }
        // Rotation groups are powers of two in descending order, so they divide evenly into scale groups.
        let len = format.scale_group(groups.len_at(first));
        (self.index, self.first) = (index + 1, first + len);
        Some(ScaleGroup { index, first, len })
    }
}
