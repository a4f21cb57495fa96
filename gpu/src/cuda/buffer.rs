//! Memory of a device.

use cudarc::driver::sys;

use super::device::Device;
use super::driver::check;
use super::error::CudaError;
use crate::launch::DeviceSlice;
use foretoken_kernels::Pod;

/// `len` elements on a device, freed when it is dropped. Concurrent copies may mix their bytes.
#[derive(Debug)]
pub struct Buffer<T> {
    device: Device,
    slice: DeviceSlice<T>,
}

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
    /// If the buffer ends before the last of them, or the driver fails.
    pub fn write(&self, at: usize, elements: &[T]) -> Result<(), CudaError> {
        let to = self.ready_address(at, elements.len())?;
        // From pageable memory the call may return when the bytes are staged; they arrive on the null stream, for which
        // streams of launches do not wait.
        // SAFETY: the source is read before the call returns, and the destination has as many bytes.
        unsafe {
            check("cuMemcpyHtoD", sys::cuMemcpyHtoD_v2(to, elements.as_ptr().cast(), size_of_val(elements)))?;
            check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut()))
        }
    }

    /// Reads the elements from `at` on, after waiting for all launches.
    ///
    /// # Errors
    /// If the buffer ends before the last of them, or the driver or an earlier kernel fails.
    pub fn read(&self, at: usize, elements: &mut [T]) -> Result<(), CudaError> {
        let from = self.ready_address(at, elements.len())?;
        // SAFETY: the destination has as many bytes, and any bytes are a valid `T: Pod`.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(elements.as_mut_ptr().cast(), from, size_of_val(elements))
        })
    }

    /// The address of `count` elements from `at` on, after waiting for all streams: they are not
    /// ordered with the copies.
    fn ready_address(&self, at: usize, count: usize) -> Result<u64, CudaError> {
        let requested = at.saturating_add(count);
        if requested > self.len() {
            return Err(CudaError::Length { requested, len: self.len() });
        }
        self.device.0.enter()?;
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        Ok(self.slice.address() + (at * size_of::<T>()) as u64)
    }
}

impl Device {
    /// Memory for `len` elements, all zero bytes.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if the device has less memory left; nothing stays allocated.
    pub fn zeroed<T: Pod>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        self.0.enter()?;
        let bytes = len.saturating_mul(size_of::<T>());
        let mut address = 0;
        // Zero bytes cannot be allocated: an empty buffer has one.
        // SAFETY: the context is current; the pointer is to an address.
        match unsafe { sys::cuMemAlloc_v2(&mut address, bytes.max(1)) } {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = self.memory()?;
                return Err(CudaError::OutOfMemory { call: "cuMemAlloc", requested: Some(bytes), free, total });
            }
            result => check("cuMemAlloc", result)?,
        }
        let buffer = Buffer { device: self.clone(), slice: DeviceSlice::new(address, len) };
        // SAFETY: the memory was just allocated; a null stream is the context's own.
        let zeroed = unsafe {
            check("cuMemsetD8Async", sys::cuMemsetD8Async(address, 0, bytes, std::ptr::null_mut()))
                .and_then(|()| check("cuStreamSynchronize", sys::cuStreamSynchronize(std::ptr::null_mut())))
        };
        zeroed.map(|()| buffer)
    }

    /// Memory that holds `elements`.
    ///
    /// # Errors
    /// As [`Device::zeroed`].
    pub fn upload<T: Pod>(&self, elements: &[T]) -> Result<Buffer<T>, CudaError> {
        let buffer = self.zeroed(elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.device.0.enter().is_ok() {
            // SAFETY: the memory is this buffer's. The call waits for running kernels.
            let _ = unsafe { sys::cuMemFree_v2(self.slice.address()) };
        }
    }
}
