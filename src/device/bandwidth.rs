//! The read bandwidth of a device.

use std::sync::Arc;
use std::time::Instant;

use foretoken_gpu::plan::read::read_all;

use super::Device;
use super::buffer::Buffer;
use super::launcher::Launcher;
use super::temporaries::Temporaries;
use crate::Result;

/// Bytes read per launch, more than any cache holds; less if the device has less than four times that free.
const MAX_BYTES: usize = 1 << 30;

/// Thread blocks per launch.
const BLOCKS: usize = 4096;

/// Launches per host synchronisation.
const LAUNCHES: usize = 8;

/// Peak read bandwidth of a device in GB/s: the best of four runs.
///
/// # Errors
/// If it is out of memory.
pub(crate) fn read_bandwidth(device: &Arc<dyn Device>) -> Result<f64> {
    let words = MAX_BYTES.min(device.free_bytes()? / 4) / 4;
    let (x, y) = (Buffer::<u32>::new(&**device, words)?, Buffer::<u32>::new(&**device, BLOCKS * 8)?);
    let launcher = Launcher::new(Temporaries::new(device.clone()));
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = Instant::now();
        for _ in 0..LAUNCHES {
            launcher.run(read_all(x.slice(), BLOCKS, y.slice()))?;
        }
        y.read(0, 1)?;
        best = best.min(start.elapsed().as_secs_f64());
    }
    Ok((LAUNCHES * 4 * words) as f64 / 1e9 / best)
}
