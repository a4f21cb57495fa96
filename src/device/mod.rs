//! GPUs: the device interface, the model operations on it, and sequences whose passes and rounds stay on it.
//!
//! A [`Device`] allocates memory, launches kernels, and records and replays launches. Kernels and launch plans are
//! [`foretoken_gpu`]'s. CUDA (features `cuda` and `cuda-prebuilt`), Metal (feature `metal`) and the tests' emulated
//! device implement it, so that the whole engine is tested against the CPU without a GPU.
//!
//! Weights have the CPU's packed layout. K and V are in pages whose addresses are in tables on the device.

#[cfg(test)]
pub(crate) mod addresses;
#[cfg(any(feature = "cuda", feature = "cuda-prebuilt", feature = "metal"))]
mod backend;
mod bandwidth;
mod buffer;
mod choice;
mod device_model;
mod device_pass;
mod draft_steps;
mod drafters;
mod experts;
mod kv;
mod launcher;
mod list;
mod loaded;
mod matrix;
mod models;
mod nextn;
mod ops;
mod outputs;
mod pages;
mod passes;
mod positions;
mod queue;
mod readback;
mod recordings;
mod recurrent;
mod recurrent_rounds;
mod sequence;
mod states;
mod step_scores;
mod temporaries;
mod weights;
mod workspace;

use std::mem::MaybeUninit;

use foretoken_gpu::{Launch, LaunchError, Params};

use crate::{Error, Result};

pub use choice::{DeviceChoice, open};
pub use states::DeviceStates;

pub(crate) use bandwidth::read_bandwidth;
pub(crate) use device_model::{DeviceModel, DeviceModels};
pub(crate) use device_pass::{AcceptRule, DeviceOutput, DevicePass, PassPart};
pub(crate) use drafters::{DeviceDraftModel, DeviceMtp, draft_greedily};
pub(crate) use loaded::{DeviceDestination, check_head_dims};
pub(crate) use models::Models;
pub(crate) use nextn::{DeviceNextN, DeviceNextnHead};
pub(crate) use ops::DeviceOps;
pub(crate) use positions::PassKv;
pub(crate) use recurrent::DeltaNets;
pub(crate) use sequence::{DRAFTED, Sequence};
pub(crate) use weights::DeviceEmbedding;

/// A GPU.
///
/// # Safety
/// Kernels rely on it: from [`Memory::address`] on, an allocation has as many bytes of this device as were requested,
/// which no other allocation has until it is dropped; its drop waits for the launches that use it. Launches and
/// recordings run the kernels that they were given, with their parameters, or none.
pub unsafe trait Device: Send + Sync {
    /// Name in errors and measured costs.
    fn name(&self) -> String;

    /// Free bytes.
    ///
    /// # Errors
    /// If the driver fails.
    fn free_bytes(&self) -> Result<usize>;

    /// `bytes` bytes aligned to 256, freed with the value. Their values are undefined: no result depends on bytes that
    /// were not written. But session files have whole pages: where new memory may have other programs' data, it should
    /// be zeroed, as it is for CUDA and Metal.
    ///
    /// # Errors
    /// [`Error::Memory`] if fewer are free; nothing is allocated then.
    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>>;

    /// Launches a kernel, ordered after all earlier launches. It may return before the kernel is done.
    ///
    /// # Errors
    /// If there is no such kernel, or the driver fails.
    ///
    /// # Safety
    /// The memory that the parameters point to stays allocated on this device until the kernel is done.
    /// Until then nothing else writes what it reads, or reads or writes what it writes. Tables and lists in
    /// that memory satisfy the plan's documentation.
    unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()>;

    /// Records launches and their parameters, to be replayed in this order any number of times.
    ///
    /// # Errors
    /// If there is no such kernel, or the driver fails.
    fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>>;
}

/// Recorded launches (a CUDA graph, for example).
pub trait Recording: Send {
    /// Runs them in order, after all earlier launches. It may return before they are done.
    ///
    /// # Errors
    /// If the driver fails. None of them runs then, or all later calls of the device fail.
    ///
    /// # Safety
    /// As for [`Device::launch`], for each of them, at every replay.
    unsafe fn replay(&self) -> Result<()>;
}

/// An allocation on a device.
pub trait Memory: Send + Sync {
    /// Device address of the first byte.
    fn address(&self) -> u64;

    /// Overwrites the bytes from `at` on, after all earlier launches.
    ///
    /// # Errors
    /// If they exceed the allocation, or the driver fails.
    fn write(&self, at: usize, bytes: &[u8]) -> Result<()>;

    /// Reads the bytes from `at` on, after all earlier launches.
    ///
    /// # Errors
    /// If they exceed the allocation, or the driver or an earlier kernel fails.
    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()>;
}

/// Bytes of the largest parameter structure, rounded up.
const MAX_PARAMS: usize = 1024;

/// Parameters of any kernel. Padding bytes are uninitialised.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
pub struct AnyParams([MaybeUninit<u8>; MAX_PARAMS]);

// SAFETY: `AnyLaunch::new`, the only constructor, writes the kernel's own structure at the beginning. The bytes after
// it may be uninitialised: drivers at most copy them, and no kernel reads beyond its structure.
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
        const { assert!(size_of::<P>() <= MAX_PARAMS && align_of::<P>() <= 16) };
        let mut params = AnyParams([MaybeUninit::uninit(); MAX_PARAMS]);
        // SAFETY: by the assertion above the structure fits, and `AnyParams` is aligned for it. Padding stays
        // uninitialised, which `MaybeUninit` allows.
        unsafe { params.0.as_mut_ptr().cast::<P>().write(launch.params) };
        let Launch { kernel, grid, threads, shared, .. } = *launch;
        Self { launch: Launch { kernel, grid, threads, shared, params }, len: size_of::<P>() }
    }

    /// The parameters: [`AnyLaunch::len`] bytes, whose padding is uninitialised.
    pub fn params(&self) -> *const u8 {
        self.launch.params.0.as_ptr().cast()
    }
}

/// The error for an allocation of `needed` bytes where `available` are free. `None`: the driver's own memory.
pub fn out_of_memory(device: &str, needed: impl Into<Option<usize>>, available: usize) -> Error {
    let needed = needed.into();
    Error::Memory {
        what: format!("{} on {device}", if needed.is_some() { "a buffer" } else { "kernels" }),
        needed: needed.map(|needed| needed as u64),
        available: Some(available as u64),
        fits: None,
        remedy: "free device memory, or use the CPU".into(),
    }
}

/// The error for a launch rejected by its plan.
pub(crate) fn launch_error(device: &dyn Device, what: &str, problem: &LaunchError) -> Error {
    Error::Device { device: device.name(), problem: format!("{what}: {problem}") }
}
