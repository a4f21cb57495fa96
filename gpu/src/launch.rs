//! A launch: kernel, grid and parameters; and checked slices of device memory.

use std::marker::PhantomData;

/// `len` consecutive elements in a device's memory: an address and a length, without ownership or lifetime.
#[derive(Debug)]
pub struct DeviceSlice<T> {
    address: u64,
    len: usize,
    elements: PhantomData<fn() -> T>,
}

impl<T> Clone for DeviceSlice<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<T> {}

impl<T> DeviceSlice<T> {
    /// `len` elements from `address` on.
    pub const fn new(address: u64, len: usize) -> Self {
        Self { address, len, elements: PhantomData }
    }

    /// The first element's address on the device.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether the length is zero.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The same memory as elements of another type, as many as fit.
    pub const fn cast<U>(self) -> DeviceSlice<U> {
        DeviceSlice::new(self.address, self.len * size_of::<T>() / size_of::<U>())
    }

    /// The address, if the slice has `len` elements and begins at a multiple of 16 bytes, as vector loads need.
    pub(crate) fn checked(self, name: &str, len: usize) -> Result<u64, LaunchError> {
        self.checked_at(16, name, len)
    }

    /// The address, if the slice has `len` elements that are read one by one.
    pub(crate) fn checked_unaligned(self, name: &str, len: usize) -> Result<u64, LaunchError> {
        self.checked_at(size_of::<T>() as u64, name, len)
    }

    fn checked_at(self, multiple: u64, name: &str, len: usize) -> Result<u64, LaunchError> {
        if self.len < len {
            return Err(LaunchError(format!("{name}: {len} elements are required, but the slice has {}", self.len)));
        }
        if !self.address.is_multiple_of(multiple) {
            return Err(LaunchError(format!("{name}: the address is not a multiple of {multiple} bytes")));
        }
        Ok(self.address)
    }
}

/// A slice that is too short or not aligned, or a shape or type without a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaunchError(pub(crate) String);

impl std::fmt::Display for LaunchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU kernel: {}", self.0)
    }
}

impl std::error::Error for LaunchError {}

/// A kernel's parameters: the structure with the same fields in its source.
///
/// # Safety
/// The type is `repr(C)` and equal, field by field, to the parameter structure of the kernel of its [`Launch`].
pub unsafe trait Params: Copy + 'static {}

/// One launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<P> {
    /// The kernel's name in its source.
    pub kernel: &'static str,
    /// Blocks of threads, in x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block: a multiple of 32.
    pub threads: u32,
    /// Bytes of dynamic shared memory; a multiple of 16. Metal ignores it: its kernels declare as much as any launch
    /// needs.
    pub shared: u32,
    /// The kernel's parameters.
    pub params: P,
}

/// The checked address, or null.
pub(crate) fn optional<T>(slice: Option<DeviceSlice<T>>, name: &str, len: usize) -> Result<u64, LaunchError> {
    slice.map_or(Ok(0), |slice| slice.checked(name, len))
}

/// A dimension as a kernel parameter.
pub(crate) fn dimension(name: &str, value: usize) -> Result<i32, LaunchError> {
    i32::try_from(value).map_err(|_| LaunchError(format!("{name} is {value}; at most {} is supported", i32::MAX)))
}

/// Blocks in y or z of a grid, at most.
pub const MAX_BLOCKS: usize = 65_535;

/// A number of blocks in y or z of a grid.
pub(crate) fn blocks(name: &str, value: usize) -> Result<u32, LaunchError> {
    match u32::try_from(value) {
        Ok(blocks) if (1..=MAX_BLOCKS).contains(&value) => Ok(blocks),
        _ => Err(LaunchError(format!("{name} takes {value} thread blocks; 1 to {MAX_BLOCKS} are supported"))),
    }
}
