//! Device memory for the activations of a pass.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use parking_lot::Mutex;

use super::Device;
use super::buffer::Buffer;
use crate::Result;

/// The activations of one sequence's passes. A [`Temporary`] returns to this pool on drop. All launches go to one stream, so
/// kernels of the next owner run after those of the last.
///
/// Nothing is freed while the pool lives: recordings refer to the addresses.
pub(crate) struct Temporaries {
    device: Arc<dyn Device>,
    free: Mutex<HashMap<usize, Vec<Buffer<u8>>>>, // by bytes, a power of two
}

/// `len` elements whose values are undefined until a launch writes them.
pub(crate) struct Temporary<T> {
    memory: Option<Buffer<u8>>, // `None` only during `drop`
    len: usize,
    pool: Arc<Temporaries>,
    elements: PhantomData<fn() -> T>,
}

impl Temporaries {
    pub fn new(device: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { device, free: Mutex::default() })
    }

    /// # Errors
    /// If the device is out of memory.
    pub fn take<T>(self: &Arc<Self>, len: usize) -> Result<Temporary<T>> {
        // Powers of two, so that passes of different sizes share memory.
        let bytes = len.saturating_mul(size_of::<T>()).max(1).checked_next_power_of_two().unwrap_or(usize::MAX);
        let free = self.free.lock().get_mut(&bytes).and_then(Vec::pop);
        let memory = match free {
            Some(memory) => memory,
            None => Buffer::new(&*self.device, bytes)?,
        };
        Ok(Temporary { memory: Some(memory), len, pool: self.clone(), elements: PhantomData })
    }
}

impl<T> Temporary<T> {
    pub fn slice(&self) -> DeviceSlice<T> {
        DeviceSlice::new(self.memory.as_ref().map_or(0, |memory| memory.slice().address()), self.len)
    }
}

impl<T> Drop for Temporary<T> {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.free.lock().entry(memory.len()).or_default().push(memory);
        }
    }
}
