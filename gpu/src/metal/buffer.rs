//! Buffers in memory that CPU and GPU share.

use super::device::Device;
use super::error::MetalError;
use super::memory::lock;
use crate::launch::DeviceSlice;
use foretoken_kernels::Pod;

/// `len` elements on a device, freed when it is dropped.
#[derive(Debug)]
pub struct Buffer<T> {
    device: Device,
    slice: DeviceSlice<T>,
    bytes: *mut u8,
}

// SAFETY: only the buffer has a pointer to its memory, which the device keeps until the buffer is dropped; a device may
// be used from any thread.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: no reference to the elements exists; threads that share a buffer copy them under its device's lock.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Pod> Buffer<T> {
    /// The elements, for plans: valid as long as the buffer.
    pub fn slice(&self) -> DeviceSlice<T> {
        self.slice
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// Overwrites the elements from `at` on, after waiting for all launches.
    ///
    /// # Errors
    /// If the buffer ends before the last of them, or an earlier launch failed.
    pub fn write(&self, at: usize, elements: &[T]) -> Result<(), MetalError> {
        self.ready(at, elements.len())?;
        let _exclusive = lock(&self.device.0.memories);
        // SAFETY: the memory has as many bytes from there on, and the lock excludes other threads' copies. Earlier
        // launches have finished; the contract of `Stream::launch` excludes concurrent launches that use these
        // elements.
        unsafe {
            self.bytes.cast::<T>().add(at).cast::<u8>().copy_from(elements.as_ptr().cast(), size_of_val(elements));
        }
        Ok(())
    }

    /// Reads the elements from `at` on, after waiting for all launches.
    ///
    /// # Errors
    /// If the buffer ends before the last of them, or an earlier launch failed.
    pub fn read(&self, at: usize, elements: &mut [T]) -> Result<(), MetalError> {
        self.ready(at, elements.len())?;
        let _exclusive = lock(&self.device.0.memories);
        // SAFETY: `ready` checked the length, and any bytes are a valid `T: Pod`. The lock excludes other threads'
        // copies, and the contract of `Stream::launch` launches that write these elements.
        unsafe {
            self.bytes.cast::<T>().add(at).cast::<u8>().copy_to(elements.as_mut_ptr().cast(), size_of_val(elements));
        }
        Ok(())
    }

    /// Waits for all streams; an error unless the buffer has `count` elements from `at` on.
    fn ready(&self, at: usize, count: usize) -> Result<(), MetalError> {
        let requested = at.saturating_add(count);
        if requested > self.len() {
            return Err(MetalError::Length { requested, len: self.len() });
        }
        self.device.0.wait()
    }
}

impl Device {
    /// Memory for `len` elements, all zero bytes.
    ///
    /// # Errors
    /// [`MetalError::OutOfMemory`] if the device has less memory left, [`MetalError::BufferTooLarge`] above its limit
    /// for a buffer; nothing stays allocated.
    pub fn zeroed<T: Pod>(&self, len: usize) -> Result<Buffer<T>, MetalError> {
        let (address, bytes) = self.allocate(len.saturating_mul(size_of::<T>()))?;
        Ok(Buffer { device: self.clone(), slice: DeviceSlice::new(address, len), bytes })
    }

    /// Memory that holds `elements`.
    ///
    /// # Errors
    /// As [`Device::zeroed`].
    pub fn upload<T: Pod>(&self, elements: &[T]) -> Result<Buffer<T>, MetalError> {
        let buffer = self.zeroed(elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // The device keeps a failure for all later calls.
        let _ = self.device.0.wait();
        lock(&self.device.0.memories).live.remove(&self.slice.address());
    }
}
