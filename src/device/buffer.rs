//! Memory with a type, and launches into it.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

use foretoken_kernels::gpu::{Launch, Params, Span, Unfit};

use super::{AnyLaunch, Device, Memory, Recording};
use crate::{Error, Result};

/// What buffers are made of.
///
/// # Safety
/// Any bytes are a value, and there is no padding.
pub(crate) unsafe trait Element: Copy + Default {}

macro_rules! elements {
    ($($name:ty)*) => {
        $(
            // SAFETY: a number, or two of them.
            unsafe impl Element for $name {}
        )*
    };
}

elements!(u8 i16 u32 i32 u64 f32 [i32; 2] [u32; 2] [f64; 2]);

/// `len` elements on a device, freed when it is dropped.
pub(crate) struct Buffer<T> {
    memory: Box<dyn Memory>,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T: Element> Buffer<T> {
    /// # Errors
    /// If the device has not that much memory left.
    pub fn new(device: &dyn Device, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
        let too_long = || Error::Device { device: device.name(), problem: format!("a buffer of {len} elements") };
        Ok(Self { memory: device.allocate(bytes.ok_or_else(too_long)?)?, len, elements: PhantomData })
    }

    /// # Errors
    /// As [`Buffer::new`], or if the driver fails.
    pub fn of(device: &dyn Device, elements: &[T]) -> Result<Self> {
        let buffer = Self::new(device, elements.len())?;
        buffer.write(0, elements)?;
        Ok(buffer)
    }

    pub fn span(&self) -> Span<T> {
        Span::new(self.memory.address(), self.len)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Overwrites the elements from `at` on, when everything that was launched before is done.
    pub fn write(&self, at: usize, elements: &[T]) -> Result<()> {
        // SAFETY: `Element`: they are bytes, all of them written.
        let bytes = unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) };
        self.memory.write(at * size_of::<T>(), bytes)
    }

    /// `len` elements from `at` on, when everything that was launched before is done.
    pub fn read(&self, at: usize, len: usize) -> Result<Vec<T>> {
        let mut elements = vec![T::default(); len];
        // SAFETY: `Element`: any bytes are values.
        let bytes = unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(&elements[..])) };
        self.memory.read(at * size_of::<T>(), bytes)?;
        Ok(elements)
    }
}

/// `len` elements of a span from `start` on: as many as there are, so that a plan notices what is missing.
pub(crate) fn part<T>(span: Span<T>, start: usize, len: usize) -> Span<T> {
    let start = start.min(span.len());
    Span::new(span.address() + (start * size_of::<T>()) as u64, len.min(span.len() - start))
}

/// Where plans are run, or kept to be run again and again.
pub(crate) struct Work {
    device: Arc<dyn Device>,
    kept: Option<RefCell<Vec<AnyLaunch>>>,
}

impl Work {
    /// Plans are run.
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, kept: None }
    }

    /// Plans are kept for [`Work::recording`].
    pub fn keeping(device: Arc<dyn Device>) -> Self {
        Self { device, kept: Some(RefCell::default()) }
    }

    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Runs a plan after those before it, or keeps it behind them.
    ///
    /// # Errors
    /// If it does not fit its buffers, or the driver fails.
    pub fn run<P: Params>(&self, plan: Result<Launch<P>, Unfit>) -> Result<()> {
        let launch = plan.map_err(|problem| super::unfit(self.device(), "a launch", &problem))?;
        let launch = AnyLaunch::new(&launch);
        if let Some(kept) = &self.kept {
            kept.borrow_mut().push(launch);
            return Ok(());
        }
        // SAFETY: the callers, all in this library, pass spans of buffers that their models and sequences own; those free
        // memory through the device only, which waits for kernels that are under way. Tables of pages are written before
        // the rows they are for.
        unsafe { self.device.launch(&launch) }
    }

    /// What was kept, as one.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn recording(self) -> Result<Box<dyn Recording>> {
        self.device.record(&self.kept.map(RefCell::into_inner).unwrap_or_default())
    }
}
