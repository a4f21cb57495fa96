//! The sequences of a pass: `segments.h`.

use crate::launch::{DeviceSlice, LaunchError, dimension};
use foretoken_kernels::Pod;

/// The rows of one sequence in a pass: consecutive rows, at consecutive positions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Address of the sequence's page tables: see [`super::pages::Pages`].
    pub tables: u64,
    /// Address of words: the number of committed positions, the token after them, and drafts after that.
    pub state: u64,
    /// Address of `(width)` f32: the hidden state that predicted that token.
    pub hidden: u64,
    /// Address of the sequence's [`Recurrent`], 0 without delta nets.
    pub recurrent: u64,
    /// First row.
    pub first: i32,
    /// Rows.
    pub rows: i32,
    /// First row before rows without outputs were dropped.
    pub source: i32,
    /// Dropped rows of this sequence, all before the others.
    pub skipped: i32,
}

// SAFETY: `repr(C)`, integers only: four of eight bytes and four of four leave no padding.
unsafe impl Pod for Segment {}

/// The recurrent state of a sequence: addresses of `f32`, and see [`super::delta_net::Shape`] for the
/// lengths. Of all delta nets, one after the other.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recurrent {
    /// `(layers, heads, key_dim, value_dim)`.
    pub matrices: u64,
    /// `(layers, taps - 1, channels)`: the convolution's last inputs, the oldest row first.
    pub window: u64,
    /// `(layers, log_rows, log row)`: the log of the round before.
    pub replayed: u64,
    /// The same, of this round.
    pub log: u64,
    /// As `matrices`, and it may be the same: gets them after all rows of the pass. 0: the rows, at
    /// most `log_rows`, are logged.
    pub whole: u64,
    /// A `u32`: rows of `replayed` that are committed and not yet in `matrices`.
    pub accepted: u64,
}

// SAFETY: `repr(C)`, six integers of one size leave no padding.
unsafe impl Pod for Recurrent {}

impl Segment {
    /// The same sequence without its first `skipped` rows; the others are moved to `first` on.
    pub fn kept(&self, skipped: usize, first: usize) -> Self {
        let skipped = skipped as i32;
        Self { first: first as i32, rows: self.rows - skipped, source: self.first + skipped, skipped, ..*self }
    }
}

/// All sequences of a pass, whose rows do not overlap. Their tables have the same layout.
#[derive(Clone, Copy, Debug)]
pub struct Segments {
    /// `(count)`.
    pub slice: DeviceSlice<Segment>,
    /// Number of sequences.
    pub count: usize,
    /// Rows of the longest segment, or an upper bound.
    pub longest: usize,
}

/// A row's position, the first position that it does not see, its segment, and zero.
pub type Place = [i32; 4];

/// In place of a token that the sequence's state has.
pub const ON_DEVICE: u32 = u32::MAX - 1;

impl Segments {
    pub(super) fn address(&self) -> Result<u64, LaunchError> {
        dimension("segments", self.count)?;
        self.slice.checked("the segments", self.count)
    }

    /// The index, if there is such a segment.
    pub(super) fn index(&self, segment: usize) -> Result<usize, LaunchError> {
        if segment < self.count {
            return Ok(segment);
        }
        Err(LaunchError(format!("there is no segment {segment} among {}", self.count)))
    }
}
