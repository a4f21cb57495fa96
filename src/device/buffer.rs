//! Typed device buffers.

use std::marker::PhantomData;

use foretoken_gpu::DeviceSlice;
use foretoken_kernels::Pod;

use super::{Device, Memory};
use crate::{Error, Result};

/// `len` elements on a device, freed on drop.
pub(crate) struct Buffer<T> {
    memory: Box<dyn Memory>,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T: Pod + Default> Buffer<T> {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &dyn Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let too_long = || {
            let what = format!("a buffer of {len} elements on {}", device.name());
            Error::Memory { what, needed: None, available: None, fits: None, remedy: "use the CPU".into() }
        };
        Ok(Self { memory: device.allocate(bytes.ok_or_else(too_long)?)?, len, elements: PhantomData })
    }

    /// # Errors
    /// As [`Buffer::new`], or if the driver fails.
    pub fn of(device: &dyn Device, elements: &[T]) -> Result<Self> {
        let buffer = Self::new(device, elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }

    pub fn slice(&self) -> DeviceSlice<T> {
        DeviceSlice::new(self.memory.address(), self.len)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Overwrites the elements from `at` on, after all earlier launches.
    pub fn write(&self, at: usize, elements: &[T]) -> Result<()> {
        self.memory.write(at * size_of::<T>(), bytes(elements))
    }

    /// Reads `len` elements from `at` on, after all earlier launches.
    pub fn read(&self, at: usize, len: usize) -> Result<Vec<T>> {
        let mut elements = vec![T::default(); len];
        // SAFETY: `Pod`: any bytes are values.
        let bytes = unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(&elements[..])) };
        self.memory.read(at * size_of::<T>(), bytes)?;
        Ok(elements)
    }
}

/// The words of `elements`, whose size is a multiple of four bytes.
pub(super) fn words<T: Pod>(elements: &[T]) -> Vec<u32> {
    let bytes = bytes(elements);
    bytes.as_chunks().0.iter().map(|word| u32::from_ne_bytes(*word)).collect()
}

fn bytes<T: Pod>(elements: &[T]) -> &[u8] {
    // SAFETY: `Pod`: no padding, so every byte is initialised.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// `len` elements of `slice` from `start` on, clamped to the slice; plans check the length.
pub(crate) fn subslice<T>(slice: DeviceSlice<T>, start: usize, len: usize) -> DeviceSlice<T> {
    let start = start.min(slice.len());
    DeviceSlice::new(slice.address() + (start * size_of::<T>()) as u64, len.min(slice.len() - start))
}
