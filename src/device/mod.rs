//! Computing on a GPU: what this library needs of one, and what it keeps there.
//!
//! A [`Device`] is memory and launches, and launches that were recorded to be replayed, no more. The kernels and the plans of their launches are [`foretoken_kernels::gpu`]'s;
//! CUDA (features `cuda` and `cuda-prebuilt`) and Metal (feature `metal`) are implementations, the tests' emulated machine
//! another, so that the whole engine runs on each and no GPU is needed to know that it computes what the CPU does.
//!
//! On top of it: weights in the CPU's own bytes, and K and V in pages that tables on the device name.

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt", feature = "metal"))]
mod backend;
mod buffer;
mod kv;
mod matrix;
mod pages;

use std::mem::MaybeUninit;
use std::sync::Arc;

use foretoken_kernels::gpu::{Launch, Params, Unfit};

use crate::options::DeviceChoice;
use crate::{Error, Result};

pub(crate) use buffer::{Buffer, Work, part};
pub(crate) use kv::{DeviceKv, NO_FAULT, Room, Shaped, Standing};
pub(crate) use matrix::{Input, Matrices, Quants};

/// A GPU.
pub trait Device: Send + Sync {
    /// What errors and measured costs call it.
    fn name(&self) -> String;

    /// Bytes free, and bytes in all.
    ///
    /// # Errors
    /// If the driver fails.
    fn memory(&self) -> Result<(usize, usize)>;

    /// `bytes` bytes that begin at a multiple of 256 and are freed with the value.
    ///
    /// # Errors
    /// If there are not that many left; nothing is allocated then.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>>;

    /// Runs a kernel after everything that was launched before. It may return before the kernel is done.
    ///
    /// # Errors
    /// If there is no such kernel, or the driver fails.
    ///
    /// # Safety
    /// What the parameters point to is allocated on this device until the kernel is done. Until then, nobody else writes what
    /// it reads, and nobody else reads or writes what it writes. Tables and lists there say what the plan's documentation
    /// asks for.
    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()>;

    /// Keeps launches with their parameters, to be run in this order as often as is wanted.
    ///
    /// # Errors
    /// If there is no such kernel, or the driver fails.
    fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>>;
}

/// Launches that were recorded once.
pub trait Recording: Send {
    /// Runs them, each after the one before, after everything that was launched before. It may return before they are done.
    ///
    /// # Errors
    /// If the driver fails.
    ///
    /// # Safety
    /// As for [`Device::launch`], for each of them, now as when they were recorded.
    unsafe fn replay(&self) -> Result<()>;
}

/// A run of a device's memory.
pub trait Memory: Send + Sync {
    /// Where it begins.
    fn address(&self) -> u64;

    /// Overwrites the bytes from `at` on, when everything that was launched before is done.
    ///
    /// # Errors
    /// If there are more than it has, or the driver fails.
    fn write(&self, at: usize, bytes: &[u8]) -> Result<()>;

    /// Reads the bytes from `at` on, when everything that was launched before is done.
    ///
    /// # Errors
    /// If there are fewer, or the driver fails: also for what went wrong in kernels before.
    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()>;
}

/// Bytes of the largest parameter structure, rounded up.
const MOST_PARAMS: usize = 1024;

/// Parameters of any kernel. Not all bytes are written: structures have padding.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct AnyParams([MaybeUninit<u8>; MOST_PARAMS]);

// SAFETY: it begins with a kernel's own structure, which `AnyLaunch::new`, the only maker, wrote. The bytes that follow need not
// be initialised; interfaces copy them at most, and no kernel reads beyond its structure.
unsafe impl Params for AnyParams {}

/// A launch of any kernel.
#[derive(Clone, Copy)]
pub struct AnyLaunch {
    /// Kernel, grid and parameters.
    pub launch: Launch<AnyParams>,
    /// Bytes of the parameters.
    pub len: usize,
}

impl AnyLaunch {
    fn new<P: Params>(launch: &Launch<P>) -> Self {
        const { assert!(size_of::<P>() <= MOST_PARAMS && align_of::<P>() <= 16) };
        let mut params = AnyParams([MaybeUninit::uninit(); MOST_PARAMS]);
        // SAFETY: the assertion above: the structure fits, and `AnyParams` is aligned for it. Bytes of padding stay
        // uninitialised, as the type allows.
        unsafe { params.0.as_mut_ptr().cast::<P>().write(launch.params) };
        let Launch { kernel, grid, block, .. } = *launch;
        Self { launch: Launch { kernel, grid, block, params }, len: size_of::<P>() }
    }

    /// Where the parameters begin: [`AnyLaunch::len`] bytes, of which padding was not written.
    pub fn params(&self) -> *const u8 {
        self.launch.params.0.as_ptr().cast()
    }
}

/// The device that was chosen; `None` is the CPU.
pub(crate) fn open(choice: &DeviceChoice) -> Result<Option<Arc<dyn Device>>> {
    match choice {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Given(device) => Ok(Some(device.clone())),
        DeviceChoice::Cuda(index) => open_cuda(*index).map(Some),
        DeviceChoice::Metal(index) => open_metal(*index).map(Some),
        DeviceChoice::Auto => {
            for opened in [open_cuda(0), open_metal(0)] {
                match opened {
                    Ok(device) => return Ok(Some(device)),
                    Err(error) => tracing::info!(%error, "this device is not used"),
                }
            }
            Ok(None)
        }
    }
}

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
use backend::cuda::open as open_cuda;
#[cfg(feature = "metal")]
use backend::metal::open as open_metal;

#[cfg(not(any(feature = "cuda", feature = "cuda-prebuilt")))]
fn open_cuda(_: usize) -> Result<Arc<dyn Device>> {
    Err(not_built("CUDA", "the feature cuda or cuda-prebuilt"))
}

#[cfg(not(feature = "metal"))]
fn open_metal(_: usize) -> Result<Arc<dyn Device>> {
    Err(not_built("Metal", "the feature metal"))
}

#[cfg(not(all(any(feature = "cuda", feature = "cuda-prebuilt"), feature = "metal")))]
fn not_built(device: &str, with: &str) -> Error {
    let problem = format!("this program was built without it; build with {with}, or use the CPU");
    Error::Device { device: device.into(), problem }
}

/// An error about something that the device's kernels do not have.
pub(crate) fn unfit(device: &dyn Device, what: &str, problem: &Unfit) -> Error {
    Error::Device { device: device.name(), problem: format!("{what}: {problem}") }
}
