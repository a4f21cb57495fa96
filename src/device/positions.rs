//! Positions of the rows of a pass, and their rotary angles.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::positions::{Placement, angles, place};
use foretoken_gpu::plan::rows;
use parking_lot::Mutex;

use super::Device;
use super::buffer::Buffer;
use super::kv::{DeviceKv, RowPositions};
use super::queue::Queue;
use super::temporaries::Temporary;
use crate::Result;

/// The host's copy of a position in device memory, and its upper bound in replays: see [`RowPositions`].
#[derive(Clone, Copy)]
pub(super) struct HostPosition {
    pub position: usize,
    pub horizon: Option<usize>,
}

/// Start of a pass, in device memory.
#[derive(Clone, Copy)]
pub(super) struct PassStart {
    /// Committed positions.
    pub length: DeviceSlice<i32>,
    /// Position of the first output row, if not all rows are output rows.
    pub newest: DeviceSlice<i32>,
    /// Tokens emitted by the last round, to be added to `length` first.
    pub emitted: Option<DeviceSlice<u32>>,
    /// The host's copy of the position after that.
    pub at: HostPosition,
}

/// Angles of the rows that have queries; no rotary pairs (a partial rotary factor of 0), no rotation.
#[derive(Clone)]
pub(crate) struct DeviceAngles {
    cos: Arc<Temporary<f32>>, // (rows, pairs)
    sin: Arc<Temporary<f32>>,
    pairs: usize,
}

impl DeviceAngles {
    pub(super) fn rotary(&self) -> Option<rows::Rotary> {
        let Self { cos, sin, pairs } = self;
        (*pairs > 0).then(|| rows::Rotary { cos: cos.slice(), sin: sin.slice(), pairs: *pairs })
    }
}

/// Position and angles of a draft chain: computed by the first step, read by all.
pub(super) struct ChainPositions {
    at: Buffer<[i32; 2]>,
    angles: Mutex<Vec<(u64, DeviceAngles)>>, // by the address of the frequencies
}

impl ChainPositions {
    pub fn new(device: &dyn Device) -> Result<Self> {
        Ok(Self { at: Buffer::new(device, 1)?, angles: Mutex::default() })
    }
}

/// K and V of a pass, and the positions of its rows that have queries.
pub(crate) struct PassKv<'a> {
    pub(super) kv: &'a DeviceKv,
    pub(super) positions: RowPositions,
    source: Source<'a>,
}

/// Source of positions and angles.
enum Source<'a> {
    /// Consecutive rows.
    Pass { start: PassStart, _memory: Temporary<[i32; 2]> },
    /// A drafter, whose layer `i` reads the target's layer `donors[i]`.
    Chain { chain: &'a ChainPositions, donors: &'a [usize], link: usize },
}

impl<'a> PassKv<'a> {
    /// `rows` consecutive positions from `start` on.
    ///
    /// # Errors
    /// If the device is out of memory, or the driver fails.
    pub(super) fn consecutive(queue: &Queue, kv: &'a DeviceKv, start: PassStart, rows: usize) -> Result<Self> {
        let memory = queue.temporaries.take(rows)?;
        let at = (memory.slice(), rows);
        queue.launcher.run(place(start.length, start.emitted, at, Placement::Consecutive))?;
        let HostPosition { position: first, horizon } = start.at;
        let positions = RowPositions { at: memory.slice(), rows, first, end: first + rows, horizon };
        Ok(Self { kv, positions, source: Source::Pass { start, _memory: memory } })
    }

    /// The position after the committed ones, for step `link` of a draft chain; the first step's `start` is given.
    ///
    /// # Errors
    /// If the driver fails.
    pub(super) fn chain(
        queue: &Queue,
        kv: &'a DeviceKv,
        (chain, donors): (&'a ChainPositions, &'a [usize]),
        (link, start, at): (usize, Option<&PassStart>, HostPosition),
    ) -> Result<Self> {
        if let Some(start) = start {
            let at = (chain.at.slice(), 1);
            queue.launcher.run(place(start.length, start.emitted, at, Placement::Constant))?;
        }
        let HostPosition { position: first, horizon } = at;
        let positions = RowPositions { at: chain.at.slice(), rows: 1, first, end: first, horizon };
        Ok(Self { kv, positions, source: Source::Chain { chain, donors, link } })
    }

    /// Keeps only the last `rows` rows.
    pub(super) fn narrow(&mut self, queue: &Queue, rows: usize) -> Result<()> {
        let Source::Pass { start, .. } = self.source else { return Ok(()) };
        let position = start.at.position + self.positions.rows - rows;
        let at = HostPosition { position, ..start.at };
        *self =
            Self::consecutive(queue, self.kv, PassStart { length: start.newest, emitted: None, at, ..start }, rows)?;
        Ok(())
    }

    /// The target's layer whose K and V layer `layer` reads.
    pub(super) fn donor(&self, layer: usize) -> usize {
        match self.source {
            Source::Pass { .. } => layer,
            Source::Chain { donors, .. } => donors[layer],
        }
    }

    /// The angles of the positions at the inverse `frequencies`.
    pub(super) fn angles(&self, queue: &Queue, frequencies: DeviceSlice<f32>) -> Result<DeviceAngles> {
        match &self.source {
            Source::Pass { .. } => {
                let angles = self.allocate(queue, frequencies)?;
                self.compute(queue, frequencies, &angles)?;
                Ok(angles)
            }
            Source::Chain { chain, link, .. } => {
                let mut held = chain.angles.lock();
                let found = held.iter().find(|(address, _)| *address == frequencies.address());
                let angles = match found {
                    Some((_, angles)) => angles.clone(),
                    None => {
                        let angles = self.allocate(queue, frequencies)?;
                        held.push((frequencies.address(), angles.clone()));
                        angles
                    }
                };
                if *link == 0 {
                    self.compute(queue, frequencies, &angles)?;
                }
                Ok(angles)
            }
        }
    }

    fn allocate(&self, queue: &Queue, frequencies: DeviceSlice<f32>) -> Result<DeviceAngles> {
        let pairs = frequencies.len();
        let new = || queue.temporaries.take(self.positions.rows * pairs).map(Arc::new);
        Ok(DeviceAngles { cos: new()?, sin: new()?, pairs })
    }

    fn compute(&self, queue: &Queue, frequencies: DeviceSlice<f32>, to: &DeviceAngles) -> Result<()> {
        let at = (self.positions.at, self.positions.rows);
        to.rotary().map_or(Ok(()), |rotary| queue.launcher.run(angles(at, frequencies, &rotary)))
    }
}
