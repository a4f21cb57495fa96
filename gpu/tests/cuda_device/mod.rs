//! The CUDA device of tests that need one.

use foretoken_gpu::cuda::{CudaError, Device};

use crate::skipped::skipped;

/// Whether the error says that this machine has no usable CUDA device. Other errors are failures.
pub fn is_absent(error: &CudaError) -> bool {
    match error {
        CudaError::NoDriver => true,
        CudaError::NoDevice { index, count } => index >= count,
        CudaError::DriverTooOld { found, needed } => found < needed,
        CudaError::Unsupported { capability, .. } => capability.0 < 8,
        _ => false,
    }
}

/// The first device; `None` without one: the test is skipped.
pub fn open() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(is_absent(&error), "{error}");
            skipped("cuda", error);
            None
        }
    }
}
