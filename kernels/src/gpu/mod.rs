//! What the GPU kernels are called with: names, grids and parameters, checked against the shapes, and nothing of a device.
//!
//! The sources are in `kernels/gpu`. A *plan* is a function here that checks shapes and lengths and returns a [`Launch`];
//! `cuda` (feature `cuda` or `cuda-prebuilt`) and `metal` (feature `metal`) run it on a device, and the tests run it on a
//! CPU that behaves like one.
//! So what is tested without a GPU is all but the driver's part.
//!
//! **Bits.** As on the CPU, the bits of a row do not depend on the rows that ride with it: how the inputs of a sum are
//! divided follows from the shape of the weight, or from places in the sequence.

pub mod accept;
pub mod attend;
pub mod codes;
pub mod experts;
pub mod matmul;
pub mod matmul_float;
pub mod pages;
mod plain;
pub mod pointwise;
pub mod positions;
pub mod read;
pub mod rows;
pub mod vocabulary;

pub use plain::Plain;

use std::marker::PhantomData;

/// A run of `len` elements in a device's memory. It owns nothing and proves nothing about its memory's life.
#[derive(Debug)]
pub struct Span<T> {
    address: u64,
    len: usize,
    elements: PhantomData<*const T>,
}

impl<T> Clone for Span<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Span<T> {}

impl<T> Span<T> {
    /// `len` elements from `address` on.
    pub const fn new(address: u64, len: usize) -> Self {
        Self { address, len, elements: PhantomData }
    }

    /// Where it begins on the device.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub const fn len(self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(self) -> bool {
        self.len == 0
    }

    /// As elements of another type, as many as fit.
    pub const fn cast<U>(self) -> Span<U> {
        Span::new(self.address, self.len * size_of::<T>() / size_of::<U>())
    }

    /// The address, if the span holds `len` elements and begins where 16-byte loads can.
    fn holding(self, name: &str, len: usize) -> Result<u64, Unfit> {
        self.holding_from(16, name, len)
    }

    /// The address, if the span holds `len` elements that are read one by one.
    fn holding_single(self, name: &str, len: usize) -> Result<u64, Unfit> {
        self.holding_from(size_of::<T>() as u64, name, len)
    }

    fn holding_from(self, multiple: u64, name: &str, len: usize) -> Result<u64, Unfit> {
        if self.len < len {
            return Err(Unfit(format!("{name} holds {} elements, and {len} are needed", self.len)));
        }
        if !self.address.is_multiple_of(multiple) {
            return Err(Unfit(format!("{name} does not begin at a multiple of {multiple} bytes")));
        }
        Ok(self.address)
    }
}

/// A launch that does not fit its buffers, or a shape that the kernels do not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit(pub(crate) String);

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "GPU kernel: {}", self.0)
    }
}

impl std::error::Error for Unfit {}

/// What a kernel is given: the structure of the same fields in its source.
///
/// # Safety
/// `repr(C)`, and field by field the kernel's `Params`.
pub unsafe trait Params: Copy {}

/// One launch of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Launch<P> {
    /// The kernel's name in its source.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block: whole warps.
    pub block: [u32; 3],
    /// Its parameters.
    pub params: P,
}

/// An address, or null.
fn optional<T>(span: Option<Span<T>>, name: &str, len: usize) -> Result<u64, Unfit> {
    span.map_or(Ok(0), |span| span.holding(name, len))
}

fn dimension(name: &str, value: usize) -> Result<i32, Unfit> {
    i32::try_from(value).map_err(|_| Unfit(format!("{name} is {value}; at most {} is possible", i32::MAX)))
}

fn blocks(name: &str, value: usize) -> Result<u32, Unfit> {
    // Of the grid's y and z; x could be larger, but is not needed to.
    match u32::try_from(value) {
        Ok(blocks) if (1..=65_535).contains(&blocks) => Ok(blocks),
        _ => Err(Unfit(format!("{name} takes {value} blocks of threads; 1 to 65535 are possible"))),
    }
}
