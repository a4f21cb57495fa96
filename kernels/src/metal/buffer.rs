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

// SAFETY: a buffer is its memory's only owner, and its device may be used from any thread.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: what is shared can only be read.
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
        self.whole(elements.len())?;
        // SAFETY: the memory has as many bytes, and no kernel runs.
        unsafe { self.bytes.copy_from_nonoverlapping(elements.as_ptr().cast(), size_of_val(elements)) };
        Ok(())
    }

    /// Reads the first elements, when all that was launched before is done.
    ///
    /// # Errors
    /// If there are fewer in the buffer, or something went wrong in kernels before.
    pub fn read(&self, elements: &mut [T]) -> Result<(), MetalError> {
        self.whole(elements.len())?;
        // SAFETY: the memory has as many bytes, of which any are a value, and no kernel runs.
        unsafe { self.bytes.copy_to_nonoverlapping(elements.as_mut_ptr().cast(), size_of_val(elements)) };
        Ok(())
    }

    fn whole(&self, asked: usize) -> Result<(), MetalError> {
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
