//! The words read by the host after a pass, in one contiguous range:
//!
//! ```text
//! faults of K and V ..., (accepted, next) of every segment ..., token of every row ...
//! ```

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::vocabulary::NO_ID;
use foretoken_gpu::plan::words::write_words;

use super::Device;
use super::buffer::{Buffer, subslice};
use super::kv::{NO_FAULT, check_faults};
use super::launcher::Launcher;
use crate::{Error, Result};

/// The words read by the host after a pass.
pub(super) struct Readback {
    words: Buffer<u32>,
    store_of_layer: Vec<usize>,
    faults: usize,
    segments: usize,
}

impl Readback {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(
        device: &dyn Device,
        store_of_layer: Vec<usize>,
        faults: usize,
        segments: usize,
        rows: usize,
    ) -> Result<Self> {
        let words = Buffer::new(device, faults + 2 * segments + rows)?;
        words.write(0, &vec![NO_FAULT; faults])?;
        Ok(Self { words, store_of_layer, faults, segments })
    }

    /// The same for more segments and rows.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn grow(&mut self, device: &dyn Device, segments: usize, rows: usize) -> Result<()> {
        *self = Self::new(device, self.store_of_layer.clone(), self.faults, segments, rows)?;
        Ok(())
    }

    pub fn faults(&self) -> DeviceSlice<u32> {
        subslice(self.words.slice(), 0, self.faults)
    }

    /// Launches a reset of the faults.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn clear_faults(&self, launcher: &Launcher) -> Result<()> {
        launcher.run(write_words(self.faults(), &vec![NO_FAULT; self.faults]))
    }

    /// `(segments, 2)`.
    pub fn results(&self) -> DeviceSlice<u32> {
        subslice(self.words.slice(), self.faults, 2 * self.segments)
    }

    /// The tokens of `rows` rows.
    pub fn ids(&self, rows: usize) -> DeviceSlice<u32> {
        subslice(self.words.slice(), self.faults + 2 * self.segments, rows)
    }

    /// Accepted drafts and the token after them, of every segment, and the tokens of `rows` rows.
    ///
    /// # Errors
    /// If K or V of an earlier pass were NaN or infinite, or the driver fails. If a draft's scores were not finite, which
    /// the host did not read, that is the error.
    pub fn read(&self, rows: usize) -> Result<(Vec<[u32; 2]>, Vec<u32>)> {
        let words = self.words.read(0, self.faults + 2 * self.segments + rows)?;
        let (faults, rest) = words.split_at(self.faults);
        let (results, ids) = rest.split_at(2 * self.segments);
        if let Err(error) = check_faults(&self.store_of_layer, faults) {
            // Reported once: the caller drops the rows.
            self.words.write(0, &vec![NO_FAULT; self.faults])?;
            return Err(if ids.contains(&NO_ID) { Error::logits(None).of_draft() } else { error });
        }
        Ok((results.as_chunks().0.to_vec(), ids.to_vec()))
    }
}
