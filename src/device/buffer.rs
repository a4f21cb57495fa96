//! Typed device buffers, and the launcher of kernels on them.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use foretoken_gpu::plan::merge::Mergeable;
use foretoken_gpu::{DeviceSlice, Launch, LaunchError, Params, Pod};

use super::{AnyLaunch, Device, Memory, Recording};
use crate::{Error, Result};

/// `len` elements on a device, freed on drop.
pub(crate) struct Buffer<T> {
    memory: Box<dyn Memory>,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T: Pod + Default> Buffer<T> {
    /// # Errors
    /// If the device is out of memory.
    pub fn new(device: &dyn Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let too_long = || {
            let what = format!("a buffer of {len} elements on {}", device.name());
            Error::Memory { what, needed: None, available: None, fits: None, remedy: "use the CPU".into() }
        };
        Ok(Self { memory: device.allocate(bytes.ok_or_else(too_long)?)?, len, elements: PhantomData })
    }

    /// # Errors
    /// As [`Buffer::new`], or if the driver fails.
    pub fn of(device: &dyn Device, elements: &[T]) -> Result<Self> {
        let buffer = Self::new(device, elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }

    pub fn slice(&self) -> DeviceSlice<T> {
        DeviceSlice::new(self.memory.address(), self.len)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Overwrites the elements from `at` on, after all earlier launches.
    pub fn write(&self, at: usize, elements: &[T]) -> Result<()> {
        // SAFETY: `Pod`: no padding, so every byte is initialised.
        let bytes = unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) };
        self.memory.write(at * size_of::<T>(), bytes)
    }

    /// Reads `len` elements from `at` on, after all earlier launches.
    pub fn read(&self, at: usize, len: usize) -> Result<Vec<T>> {
        let mut elements = vec![T::default(); len];
        // SAFETY: `Pod`: any bytes are values.
        let bytes = unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(&elements[..])) };
        self.memory.read(at * size_of::<T>(), bytes)?;
        Ok(elements)
    }
}

/// `len` elements of `slice` from `start` on, clamped to the slice; plans check the length.
pub(crate) fn subslice<T>(slice: DeviceSlice<T>, start: usize, len: usize) -> DeviceSlice<T> {
    let start = start.min(slice.len());
    DeviceSlice::new(slice.address() + (start * size_of::<T>()) as u64, len.min(slice.len() - start))
}

/// Runs launches, or records them for replay.
pub(crate) struct Launcher {
    device: Arc<dyn Device>,
    recorded: Option<RefCell<Vec<Recorded>>>,
}

/// A recorded launch, and what the next one may be merged with.
struct Recorded {
    launch: AnyLaunch,
    mergeable: Option<Mergeable>,
}

impl Launcher {
    /// A launcher that runs every launch.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, recorded: None }
    }

    /// A launcher that records until [`Launcher::finish`].
    pub fn recorder(device: Arc<dyn Device>) -> Self {
        Self { device, recorded: Some(RefCell::default()) }
    }

    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Runs or records a launch, in order.
    ///
    /// # Errors
    /// If the plan was rejected, or the driver fails.
    pub fn run<P: Params>(&self, plan: Result<Launch<P>, LaunchError>) -> Result<()> {
        let launch = plan.map_err(|problem| super::launch_error(self.device(), "a launch", &problem))?;
        if let Some(recorded) = &self.recorded {
            record(&mut recorded.borrow_mut(), &launch);
            return Ok(());
        }
        // SAFETY: all callers are in this library and pass slices of buffers owned by their models and sequences. Buffers are
        // freed through the device, which waits for running kernels. Page tables are written before the rows that use them.
        unsafe { self.device.launch(&AnyLaunch::new(&launch)) }
    }

    /// The recorded launches.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn finish(self) -> Result<Box<dyn Recording>> {
        let recorded = self.recorded.map(RefCell::into_inner).unwrap_or_default();
        self.device.record(&recorded.iter().map(|recorded| recorded.launch).collect::<Vec<_>>())
    }
}

/// Appends a launch, or merges it with the last one. No launch of a pass writes what its predecessor reads.
fn record<P: Params>(recorded: &mut Vec<Recorded>, launch: &Launch<P>) {
    let mergeable = Mergeable::of(launch);
    let last = recorded.last().and_then(|last| last.mergeable);
    let Some(merged) = last.zip(mergeable).and_then(|(last, next)| last.merged(&next)) else {
        return recorded.push(Recorded { launch: AnyLaunch::new(launch), mergeable });
    };
    let launch = match &merged {
        Mergeable::Norm(launch) => AnyLaunch::new(launch),
        Mergeable::Gate(launch) => AnyLaunch::new(launch),
        Mergeable::Quantize(launch) => AnyLaunch::new(launch),
        Mergeable::Rows(launch) => AnyLaunch::new(launch),
        Mergeable::MatMul(launch) => AnyLaunch::new(launch),
        Mergeable::MatMulFloat(launch) => AnyLaunch::new(launch),
    };
    recorded.pop();
    recorded.push(Recorded { launch, mergeable: Some(merged) });
}
