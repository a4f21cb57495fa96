//! The engine on a device that computes nothing, and so needs no compiler: its launches, and the memory of activations.

#[path = "../cases/mod.rs"]
mod cases;
mod device_launches;
mod device_memory;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;
#[path = "../on_device/widened.rs"]
mod widened;

use std::sync::{Arc, Mutex};

use foretoken::Result;
use foretoken::device::{AnyLaunch, Device, Memory, Recording, out_of_memory};
use serde_json::{Value, json};

/// Bytes of the device. One of 16 is left for activations.
const TOTAL: usize = 1 << 30;

/// Sizes of allocations, and recorded launches.
#[derive(Default)]
struct Seen {
    next: u64,
    live: usize,
    peak: usize,
    largest: usize,
    limit: Option<usize>,
    recorded: Vec<Value>,
}

/// A device that counts bytes and lists recorded launches, and computes nothing.
#[derive(Default)]
struct Idle(Arc<Mutex<Seen>>);

/// Bytes as the host wrote them, else zero.
struct Bytes {
    address: u64,
    len: usize,
    written: Mutex<Vec<u8>>,
    seen: Arc<Mutex<Seen>>,
}

struct Nothing;

// SAFETY: no kernel runs, so no address is used.
unsafe impl Device for Idle {
    fn name(&self) -> String {
        "idle".into()
    }

    fn free_bytes(&self) -> Result<usize> {
        Ok(TOTAL - self.0.lock().expect("sizes").live)
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        let mut seen = self.0.lock().expect("sizes");
        let free = seen.limit.unwrap_or(TOTAL).saturating_sub(seen.live);
        if bytes > free {
            return Err(out_of_memory("idle", bytes, free));
        }
        let address = seen.next + 256;
        seen.next = address + bytes.next_multiple_of(256) as u64;
        seen.live += bytes;
        seen.peak = seen.peak.max(seen.live);
        seen.largest = seen.largest.max(bytes);
        Ok(Box::new(Bytes { address, len: bytes, written: Mutex::default(), seen: self.0.clone() }))
    }

    unsafe fn launch(&self, _: &AnyLaunch) -> Result<()> {
        Ok(())
    }

    fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
        let launches =
            launches.iter().map(|AnyLaunch { launch, .. }| json!([launch.kernel, launch.grid, launch.threads]));
        self.0.lock().expect("a list").recorded.push(launches.collect());
        Ok(Box::new(Nothing))
    }
}

impl Memory for Bytes {
    fn address(&self) -> u64 {
        self.address
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let mut written = self.written.lock().expect("memory");
        written.resize(self.len, 0);
        written[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let written = self.written.lock().expect("memory");
        match written.get(at..at + bytes.len()) {
            Some(written) => bytes.copy_from_slice(written),
            None => bytes.fill(0),
        }
        Ok(())
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.seen.lock().expect("sizes").live -= self.len;
    }
}

impl Recording for Nothing {
    unsafe fn replay(&self) -> Result<()> {
        Ok(())
    }
}
