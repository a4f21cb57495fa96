//! Device memory for the activations of a pass.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use parking_lot::Mutex;

use super::Device;
use super::buffer::Buffer;
use crate::Result;

/// 1 / `ACTIVATIONS` of the free memory is left for activations.
const ACTIVATIONS: usize = 16;

/// Bytes left for activations if `free` are free.
pub(super) fn activation_bytes(free: usize) -> usize {
    free / ACTIVATIONS
}

/// The activations of a model's passes. A [`Temporary`] returns to this pool on drop, and is taken again after
/// [`Temporaries::release`]. All launches go to one stream, so kernels of the next owner run after those of the last.
///
/// Nothing is freed while the pool lives, because recordings refer to the addresses, except by
/// [`Temporaries::free_large`].
pub(crate) struct Temporaries {
    device: Arc<dyn Device>,
    pool: Mutex<Pool>,
}

#[derive(Default)]
struct Pool {
    free: HashMap<usize, Vec<Buffer<u8>>>, // by bytes, a power of two
    dropped: Vec<Buffer<u8>>,              // since the last release
}

/// Bytes of a buffer that [`Temporaries::free_large`] frees, at least.
const LARGE: usize = 1 << 20;

/// `len` elements whose values are undefined until a launch writes them.
pub(crate) struct Temporary<T> {
    memory: Option<Buffer<u8>>, // `None` only during `drop`
    len: usize,
    pool: Arc<Temporaries>,
    elements: PhantomData<fn() -> T>,
}

impl Temporaries {
    pub fn new(device: Arc<dyn Device>) -> Arc<Self> {
        Arc::new(Self { device, pool: Mutex::default() })
    }

    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// # Errors
    /// If the device is out of memory.
    pub fn take<T>(self: &Arc<Self>, len: usize) -> Result<Temporary<T>> {
        // Powers of two, so that passes of different sizes share memory.
        let bytes = len.saturating_mul(size_of::<T>()).max(1).checked_next_power_of_two().unwrap_or(usize::MAX);
        let free = self.pool.lock().free.get_mut(&bytes).and_then(Vec::pop);
        let memory = match free {
            Some(memory) => memory,
            None => Buffer::new(&*self.device, bytes)?,
        };
        Ok(Temporary { memory: Some(memory), len, pool: self.clone(), elements: PhantomData })
    }

    /// Frees what is not taken and has at least [`LARGE`] bytes. No recording refers to it.
    pub fn free_large(&self) {
        let freed: Vec<_> = {
            let Pool { free, dropped } = &mut *self.pool.lock();
            let large = free.extract_if(|bytes, _| *bytes >= LARGE).flat_map(|(_, buffers)| buffers);
            large.chain(dropped.extract_if(.., |memory| memory.len() >= LARGE)).collect()
        };
        drop(freed); // waits for kernels
    }

    /// Makes dropped memory available again. To be called before a launch that is not merged with the last one: its
    /// kernels start after those that read the memory.
    ///
    /// Launches that are merged run at once: if the second wrote to memory that the first reads,
    /// blocks of other rows could read it too late.
    pub fn release(&self) {
        let Pool { free, dropped } = &mut *self.pool.lock();
        for memory in dropped.drain(..) {
            free.entry(memory.len()).or_default().push(memory);
        }
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
            self.pool.pool.lock().dropped.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::addresses::Addresses;

    #[test]
    fn memory_is_taken_again_after_a_release() {
        let pool = Temporaries::new(Arc::new(Addresses::default()));
        let address = || pool.take::<f32>(100).expect("memory").slice().address();
        let first = address();
        assert_ne!(address(), first, "a launch may still be merged with the one that reads it");
        pool.release();
        assert!([address(), address()].contains(&first));
    }

    #[test]
    fn large_memory_is_freed_unless_it_is_taken() {
        let device = Arc::new(Addresses::default());
        let pool = Temporaries::new(device.clone());
        let live = || device.live();
        let taken = pool.take::<u8>(4 << 20).expect("memory");
        drop(pool.take::<u8>(1000));
        for depth in [1, 2, 4, 8] {
            pool.release();
            drop(pool.take::<u8>(depth << 20));
        }
        assert_eq!(live(), ((4 + 1 + 2 + 4 + 8) << 20) + 1024);
        pool.free_large();
        assert_eq!(live(), (4 << 20) + 1024, "the last one was not released, but no launch is merged with its reader");
        drop(taken);
        pool.free_large();
        assert_eq!(live(), 1024);
    }
}
