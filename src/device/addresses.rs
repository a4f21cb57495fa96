//! A device of tests that counts its memory and runs nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::{AnyLaunch, Device, Memory, Recording};
use crate::Result;

/// Allocations have addresses of their own, and no bytes.
#[derive(Default)]
pub(crate) struct Addresses {
    allocations: AtomicU64,
    live: Arc<AtomicUsize>, // bytes
}

struct Nowhere {
    address: u64,
    bytes: usize,
    live: Arc<AtomicUsize>,
}

impl Addresses {
    /// Allocations so far.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Bytes allocated.
    pub fn live(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }
}

// SAFETY: no kernel runs, so no address is used.
unsafe impl Device for Addresses {
    fn name(&self) -> String {
        "addresses".into()
    }

    fn free_bytes(&self) -> Result<usize> {
        Ok(0)
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        let address = (self.allocations.fetch_add(1, Ordering::Relaxed) + 1) << 20;
        self.live.fetch_add(bytes, Ordering::Relaxed);
        Ok(Box::new(Nowhere { address, bytes, live: self.live.clone() }))
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
        self.address
    }

    fn write(&self, _: usize, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read(&self, _: usize, _: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

impl Drop for Nowhere {
    fn drop(&mut self) {
        self.live.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
