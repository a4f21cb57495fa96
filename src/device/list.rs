//! Lists in device memory that the host changes between passes.

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::words::{MAX_WORDS, write_words};
use foretoken_kernels::Pod;

use super::Device;
use super::buffer::{Buffer, subslice, words};
use super::launcher::Launcher;
use crate::Result;

/// A list at a constant address, for recordings. It is written by launches, without host synchronisation, and only when
/// it changes.
pub(super) struct List<T> {
    buffer: Buffer<T>,
    known: Vec<T>, // the device's leading elements
}

impl<T: Pod + Default + PartialEq> List<T> {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &dyn Device, len: usize) -> Result<Self> {
        Ok(Self { buffer: Buffer::new(device, len)?, known: Vec::new() })
    }

    pub fn slice(&self) -> DeviceSlice<T> {
        self.buffer.slice()
    }

    /// Replaces the leading elements.
    ///
    /// # Errors
    /// If there are more than fit, or the driver fails.
    pub fn set(&mut self, launcher: &Launcher, elements: &[T]) -> Result<()> {
        if self.known.starts_with(elements) {
            return Ok(());
        }
        self.known.clear();
        let per_launch = MAX_WORDS * size_of::<u32>() / size_of::<T>();
        for (i, part) in elements.chunks(per_launch).enumerate() {
            let to = subslice(self.buffer.slice(), i * per_launch, part.len());
            launcher.run(write_words(to.cast(), &words(part)))?;
        }
        self.known.extend(elements);
        Ok(())
    }
}
