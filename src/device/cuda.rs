//! CUDA as a [`Device`].

use std::sync::{Mutex, PoisonError};

use foretoken_kernels::cuda::{self, Buffer, CudaError, Stream};

use super::{AnyLaunch, Device, Memory};
use crate::{Error, Result};

/// A CUDA device and one stream, which all sequences share.
pub(super) struct Cuda {
    device: cuda::Device,
    stream: Mutex<Stream>,
    name: String,
}

impl Cuda {
    /// # Errors
    /// If there is no such device, or it cannot be used.
    pub(super) fn open(index: usize) -> Result<Self> {
        let device = cuda::Device::open(index).map_err(failed)?;
        let stream = Mutex::new(device.stream().map_err(failed)?);
        let name = device.info().name.clone();
        tracing::info!(info = ?device.info(), "a CUDA device is used");
        Ok(Self { device, stream, name })
    }
}

/// What the driver said, which names itself.
fn failed(error: CudaError) -> Error {
    let text = error.to_string();
    let problem = text.strip_prefix("CUDA: ").unwrap_or(&text).into();
    Error::Device { device: "CUDA".into(), problem }
}

impl Device for Cuda {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.device.memory().map_err(failed)
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        Ok(Box::new(Piece(self.device.zeroed(bytes).map_err(failed)?)))
    }

    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()> {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller vouches for what the parameters point to; the driver reads as many as the kernel has.
        unsafe { stream.launch(&launch.launch) }.map_err(failed)
    }
}

struct Piece(Buffer<u8>);

impl Memory for Piece {
    fn address(&self) -> u64 {
        self.0.span().address()
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        self.0.write_at(at, bytes).map_err(failed)
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        self.0.read_at(at, bytes).map_err(failed)
    }
}
