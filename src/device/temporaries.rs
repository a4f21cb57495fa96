//! Device memory for the activations of a pass.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use parking_lot::Mutex;

use super::Device;
use super::buffer::Buffer;
use crate::Result;

/// The activations of one sequence's passes. A [`Temporary`] returns to this pool on drop, and is taken again after
/// [`Temporaries::release`]. All launches go to one stream, so kernels of the next owner run after those of the last.
///
/// Nothing is freed while the pool lives: recordings refer to the addresses.
pub(crate) struct Temporaries {
    device: Arc<dyn Device>,
    pool: Mutex<Pool>,
}

#[derive(Default)]
struct Pool {
    free: HashMap<usize, Vec<Buffer<u8>>>, // by bytes, a power of two
    dropped: Vec<Buffer<u8>>,              // since the last release
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
        Arc::new(Self { device, pool: Mutex::default() })
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

    /// Lets what was dropped be taken again: a kernel starts that is not the one that reads it.
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
    use crate::device::{AnyLaunch, Memory, Recording};

    struct Addresses(Mutex<u64>);
    struct Nowhere(u64);

    impl Device for Addresses {
        fn name(&self) -> String {
            "addresses".into()
        }

        fn memory(&self) -> Result<(usize, usize)> {
            Ok((0, 0))
        }

        fn allocate(&self, _: usize) -> Result<Box<dyn Memory>> {
            let mut next = self.0.lock();
            *next += 1 << 20;
            Ok(Box::new(Nowhere(*next)))
        }

        unsafe fn launch(&self, _: &AnyLaunch) -> Result<()> {
            Ok(())
        }

        fn record(&self, _: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
            unreachable!("not called")
        }
    }

    impl Memory for Nowhere {
        fn address(&self) -> u64 {
            self.0
        }

        fn write(&self, _: usize, _: &[u8]) -> Result<()> {
            Ok(())
        }

        fn read(&self, _: usize, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn memory_is_taken_again_after_a_release() {
        let pool = Temporaries::new(Arc::new(Addresses(Mutex::new(0))));
        let address = || pool.take::<f32>(100).expect("memory").slice().address();
        let first = address();
        assert_ne!(address(), first, "a launch may still be merged with the one that reads it");
        pool.release();
        assert!([address(), address()].contains(&first));
    }
}
