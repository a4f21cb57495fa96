//! The interface to the device that a case runs on: the emulated machine, or a GPU.

use std::mem::MaybeUninit;

use foretoken_gpu::{DeviceSlice, Launch, LaunchError, Params};
use foretoken_kernels::Pod;

/// Memory and launches.
pub trait Device {
    /// Memory with these bytes, valid as long as the device.
    fn upload(&mut self, bytes: &[u8]) -> u64;
    /// Copies memory to `bytes`.
    fn download(&mut self, address: u64, bytes: &mut [u8]);
    /// Runs a kernel and waits for it. Padding bytes of `params` are uninitialised.
    fn launch(&mut self, launch: Launch<()>, params: &[MaybeUninit<u8>]) -> Result<(), String>;
}

impl dyn Device + '_ {
    /// Uploads `x`.
    pub fn of<T: Pod>(&mut self, x: &[T]) -> DeviceSlice<T> {
        // SAFETY: the bytes of `x`; `Pod` has no padding.
        let bytes = unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) };
        DeviceSlice::new(self.upload(bytes), x.len())
    }

    /// `len` elements of poison.
    pub fn poisoned<T: Pod>(&mut self, len: usize) -> DeviceSlice<T> {
        let poison = vec![0xcdu8; len * size_of::<T>()];
        DeviceSlice::new(self.upload(&poison), len)
    }

    /// Reads a slice's elements.
    pub fn read<T: Pod + Default>(&mut self, slice: DeviceSlice<T>) -> Vec<T> {
        let mut x = vec![T::default(); slice.len()];
        // SAFETY: `Pod`: any bytes are a value, and all of them are initialised.
        let bytes = unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(&x[..])) };
        self.download(slice.address(), bytes);
        x
    }

    /// Runs a plan.
    pub fn run<P: Params>(&mut self, plan: Result<Launch<P>, LaunchError>) -> Result<(), String> {
        let Launch { kernel, grid, threads, shared, params } = plan.map_err(|error| error.to_string())?;
        // SAFETY: the bytes of `params`, as `MaybeUninit`: padding is uninitialised.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const params).cast(), size_of::<P>()) };
        self.launch(Launch { kernel, grid, threads, shared, params: () }, bytes)
            .map_err(|error| format!("{kernel}: {error}"))
    }
}
