//! Hidden states that a target passes to its NextN head.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::words::copy_words;

use super::Device;
use super::buffer::{Buffer, subslice};
use super::launcher::Launcher;
use crate::Result;

/// Hidden states of consecutive rows of a sequence, in the outputs of a pass: valid until the next pass.
pub struct DeviceStates {
    pub(super) rows: DeviceSlice<f32>,  // (rows, hidden)
    pub(super) state: Arc<Buffer<u32>>, // of the sequence: see `Segment::state`
}

/// The hidden states that a pass of up to `rows` rows reads beside the tokens.
pub(crate) struct StateInputs {
    pub(super) states: Buffer<f32>, // (rows, width)
    pub(super) order: Buffer<u32>,  // 0, 1, ... of all rows
    pub(super) width: usize,
}

impl StateInputs {
    /// # Errors
    /// If the device is out of memory.
    pub(super) fn new(device: &dyn Device, rows: usize, width: usize) -> Result<Self> {
        let order: Vec<_> = (0..rows as u32).collect();
        Ok(Self { states: Buffer::new(device, rows * width)?, order: Buffer::of(device, &order)?, width })
    }

    /// Copies the states of consecutive rows from `first` on.
    ///
    /// # Errors
    /// If the driver fails.
    pub(super) fn set(&self, launcher: &Launcher, first: usize, states: &[DeviceSlice<f32>]) -> Result<()> {
        let mut at = first * self.width;
        for from in states {
            copy(launcher, *from, subslice(self.states.slice(), at, from.len()))?;
            at += from.len();
        }
        Ok(())
    }
}

/// Copies `from` to `to`, which is as long.
///
/// # Errors
/// If the driver fails.
pub(super) fn copy(launcher: &Launcher, from: DeviceSlice<f32>, to: DeviceSlice<f32>) -> Result<()> {
    launcher.run(copy_words(to.cast(), Some(from.cast())))
}
