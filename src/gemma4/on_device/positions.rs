//! Positions of the rows of a pass, and their rotary angles.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::positions::{Placement, angles, place};
use foretoken_gpu::plan::rows::Rotary;

use crate::Result;
use crate::device::{Buffer, Device, Launcher, RowPositions};
use crate::gemma4::AttentionType;
use crate::gemma4::rope::Rotations;

/// A model's inverse frequencies.
pub(super) struct Frequencies {
    sliding: Option<Buffer<f32>>,
    full: Option<Buffer<f32>>,
}

impl Frequencies {
    pub(super) fn upload(device: &dyn Device, rotations: &Rotations) -> Result<Self> {
        let of = |rotary: &Option<crate::nn::Rotary>| {
            rotary.as_ref().map(|rotary| Buffer::of(device, rotary.inverse_frequencies())).transpose()
        };
        Ok(Self { sliding: of(&rotations.sliding)?, full: of(&rotations.full)? })
    }
}

/// The host's copy of a position in device memory, and the upper bound of it in replays: see [`RowPositions`].
#[derive(Clone, Copy)]
pub(super) struct HostPosition {
    pub(super) position: usize,
    pub(super) horizon: Option<usize>,
}

/// Buffers for positions and angles of up to `rows` rows.
pub(super) struct PositionBuffers {
    at: Buffer<[i32; 2]>,
    sliding: Option<AngleBuffers>,
    full: Option<AngleBuffers>,
}

struct AngleBuffers {
    cos: Buffer<f32>, // (rows, pairs)
    sin: Buffer<f32>,
    pairs: usize,
}

/// Positions and angles of a pass.
#[derive(Clone, Copy)]
pub(super) struct PassPositions {
    pub(super) positions: RowPositions,
    sliding: Option<Rotary>,
    full: Option<Rotary>,
}

impl PositionBuffers {
    pub(super) fn new(device: &dyn Device, frequencies: &Frequencies, rows: usize) -> Result<Self> {
        let buffers = |frequencies: &Option<Buffer<f32>>| {
            let buffers = frequencies.as_ref().map(|frequencies| -> Result<_> {
                let (pairs, buffer) = (frequencies.len(), || Buffer::new(device, rows * frequencies.len()));
                Ok(AngleBuffers { cos: buffer()?, sin: buffer()?, pairs })
            });
            buffers.transpose()
        };
        let (sliding, full) = (buffers(&frequencies.sliding)?, buffers(&frequencies.full)?);
        Ok(Self { at: Buffer::new(device, rows)?, sliding, full })
    }

    /// Computes positions and angles of `rows` rows. On the device, `emitted` is added to `length`, which then is the
    /// first position; `first` is the host's copy of it.
    pub(super) fn place(
        &self,
        launcher: &Launcher,
        frequencies: &Frequencies,
        (length, emitted, first): (DeviceSlice<i32>, Option<DeviceSlice<u32>>, HostPosition),
        (rows, placement): (usize, Placement),
    ) -> Result<PassPositions> {
        let at = (self.at.slice(), rows);
        launcher.run(place(length, emitted, at, placement))?;
        let placed = self.placed(first, (rows, placement));
        for (rotary, frequencies) in [(placed.sliding, &frequencies.sliding), (placed.full, &frequencies.full)] {
            if let (Some(rotary), Some(frequencies)) = (rotary, frequencies) {
                launcher.run(angles(at, frequencies.slice(), &rotary))?;
            }
        }
        Ok(placed)
    }

    /// Positions and angles computed by an earlier [`PositionBuffers::place`].
    pub(super) fn placed(&self, first: HostPosition, (rows, placement): (usize, Placement)) -> PassPositions {
        // No rotary pairs (a partial rotary factor of 0): no rotation.
        let rotary = |buffers: &Option<AngleBuffers>| {
            let buffers = buffers.as_ref().filter(|buffers| buffers.pairs > 0);
            buffers.map(|buffers| Rotary { cos: buffers.cos.slice(), sin: buffers.sin.slice(), pairs: buffers.pairs })
        };
        let HostPosition { position: first, horizon } = first;
        let end = if placement == Placement::Consecutive { first + rows } else { first };
        let positions = RowPositions { at: self.at.slice(), rows, first, end, horizon };
        PassPositions { positions, sliding: rotary(&self.sliding), full: rotary(&self.full) }
    }
}

impl PassPositions {
    pub(super) fn rotary(&self, attention: AttentionType) -> Option<Rotary> {
        match attention {
            AttentionType::Sliding => self.sliding,
            AttentionType::Full => self.full,
        }
    }
}
