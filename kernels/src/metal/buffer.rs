//! Memory of a device, which is the processor's as well.

use super::device::lock;
use super::{Device, MetalError, Plain};
use crate::gpu::Span;

/// `len` elements on a device, freed when it is dropped.
#[derive(Debug)]
pub struct Buffer<T> {
    device: Device,
    span: Span<T>,
    bytes: *mut u8,
}

// SAFETY: nothing but the buffer leads to its memory, which the device keeps until the buffer is dropped, and a device may be
// used from any thread.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: no reference leads to the elements; threads that share a buffer copy them under its device's lock.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    pub(super) fn zeroed(device: &Device, len: usize) -> Result<Self, MetalError> {
        let (address, bytes) = device.allocate(len.saturating_mul(size_of::<T>()))?;
        Ok(Self { device: device.clone(), span: Span::new(address, len), bytes })
    }

    /// The elements, for plans. They are there as long as the buffer is.
    pub fn span(&self) -> Span<T> {
        self.span
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.span.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.span.is_empty()
    }

    /// Overwrites the first elements, when all that was launched before is done.
    ///
    /// # Errors
    /// If there are more than the buffer has, or something went wrong in kernels before.
    pub fn write(&mut self, elements: &[T]) -> Result<(), MetalError> {
        self.write_at(0, elements)
    }

    /// Overwrites the elements from `at` on, when all that was launched before is done.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    pub fn write_at(&self, at: usize, elements: &[T]) -> Result<(), MetalError> {
        self.reach(at, elements.len())?;
        let _alone = lock(&self.device.0.memories);
        // SAFETY: the memory has as many bytes from there on, and the lock keeps other threads' copies away. Kernels that were
        // launched before are done; whoever launches one meanwhile vouches that nobody else uses what it writes, or writes what
        // it reads.
        unsafe {
            self.bytes.cast::<T>().add(at).cast::<u8>().copy_from(elements.as_ptr().cast(), size_of_val(elements));
        }
        Ok(())
    }

    /// Reads the first elements, when all that was launched before is done.
    ///
    /// # Errors
    /// If there are fewer in the buffer, or something went wrong in kernels before.
    pub fn read(&self, elements: &mut [T]) -> Result<(), MetalError> {
        self.read_at(0, elements)
    }

    /// Reads the elements from `at` on, when all that was launched before is done.
    ///
    /// # Errors
    /// As [`Buffer::read`].
    pub fn read_at(&self, at: usize, elements: &mut [T]) -> Result<(), MetalError> {
        self.reach(at, elements.len())?;
        let _alone = lock(&self.device.0.memories);
        // SAFETY: as in `write_at`; any bytes are a value.
        unsafe {
            self.bytes.cast::<T>().add(at).cast::<u8>().copy_to(elements.as_mut_ptr().cast(), size_of_val(elements));
        }
        Ok(())
    }

    /// Waits for all streams, if the buffer has `count` elements from `at` on.
    fn reach(&self, at: usize, count: usize) -> Result<(), MetalError> {
        let asked = at.saturating_add(count);
        if asked > self.len() {
            return Err(MetalError::Length { asked, len: self.len() });
        }
        self.device.0.wait()
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // What went wrong before is the next reader's to hear, if there is one.
        let _ = self.device.0.wait();
        lock(&self.device.0.memories).live.remove(&self.span.address());
    }
}
