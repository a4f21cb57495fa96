//! Memory of a device.

use cudarc::driver::sys;

use super::driver::check;
use super::{CudaError, Device};
use crate::gpu::{Plain, Span};

/// `len` elements on a device, freed when it is dropped.
#[derive(Debug)]
pub struct Buffer<T> {
    device: Device,
    span: Span<T>,
}

// SAFETY: a buffer is an address and a device, which may be used from any thread.
unsafe impl<T: Send> Send for Buffer<T> {}
// SAFETY: no reference leads to the elements, which lie in the device's memory. Threads that share a buffer read and write them
// through the driver alone, whose calls may come from any thread: of copies at the same time, the result is some of each one's
// bytes, and any bytes are values of `T: Plain`.
unsafe impl<T: Sync> Sync for Buffer<T> {}

impl<T: Plain> Buffer<T> {
    pub(super) fn zeroed(device: &Device, len: usize) -> Result<Self, CudaError> {
        device.0.enter()?;
        let bytes = len.saturating_mul(size_of::<T>());
        let mut address = 0;
        // Nothing cannot be allocated: an empty buffer has a byte.
        // SAFETY: the context is current; the pointer is to an address.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = device.memory()?;
                return Err(CudaError::OutOfMemory { asked: bytes, free, total });
            }
            result => check("cuMemAlloc", result)?,
        }
        let buffer = Self { device: device.clone(), span: Span::new(address, len) };
        // SAFETY: the memory was just allocated; a null stream is the context's own.
        let zeroed = unsafe {
            check("cuMemsetD8Async", sys::cuMemsetD8Async(address, 0, bytes, std::ptr::null_mut()))
                .and_then(|()| check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut())))
        };
        zeroed.map(|()| buffer)
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
    /// If there are more than the buffer has, or the driver fails.
    pub fn write(&mut self, elements: &[T]) -> Result<(), CudaError> {
        self.write_at(0, elements)
    }

    /// Overwrites the elements from `at` on, when all that was launched before is done.
    ///
    /// # Errors
    /// As [`Buffer::write`].
    pub fn write_at(&self, at: usize, elements: &[T]) -> Result<(), CudaError> {
        let to = self.reach(at, elements.len())?;
        // SAFETY: the source is read before the call returns, and the destination has as many bytes.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(to, elements.as_ptr().cast(), size_of_val(elements)) })
    }

    /// Reads the first elements, when all that was launched before is done.
    ///
    /// # Errors
    /// If there are fewer in the buffer, or the driver fails: also for what went wrong in kernels before.
    pub fn read(&self, elements: &mut [T]) -> Result<(), CudaError> {
        self.read_at(0, elements)
    }

    /// Reads the elements from `at` on, when all that was launched before is done.
    ///
    /// # Errors
    /// As [`Buffer::read`].
    pub fn read_at(&self, at: usize, elements: &mut [T]) -> Result<(), CudaError> {
        let from = self.reach(at, elements.len())?;
        // SAFETY: the destination has as many bytes, and any are a value.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(elements.as_mut_ptr().cast(), from, size_of_val(elements))
        })
    }

    /// The address of `count` elements from `at` on, when all streams are done: they are not ordered with the copies.
    fn reach(&self, at: usize, count: usize) -> Result<u64, CudaError> {
        let asked = at.saturating_add(count);
        if asked > self.len() {
            return Err(CudaError::Length { asked, len: self.len() });
        }
        self.device.0.enter()?;
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        Ok(self.span.address() + (at * size_of::<T>()) as u64)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.device.0.enter().is_ok() {
            // SAFETY: the memory is this buffer's. The call waits for the kernels that are under way.
            let _ = unsafe { sys::cuMemFree_v2(self.span.address()) };
        }
    }
}
