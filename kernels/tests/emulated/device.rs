//! Where a case runs: the emulated machine, or a GPU.

use std::mem::MaybeUninit;

use foretoken_kernels::gpu::{Launch, Params, Span, Unfit};

/// Memory and launches.
pub trait Device {
    /// Memory that holds `bytes`; it lives as long as the device.
    fn upload(&mut self, bytes: &[u8]) -> u64;
    /// What is there now.
    fn download(&mut self, address: u64, bytes: &mut [u8]);
    /// A number as the kernels' `Wide`.
    fn wide(&self, x: f64) -> u64 {
        x.to_bits()
    }
    /// Runs a kernel to its end. Padding bytes of `params` are uninitialised.
    fn launch(
        &mut self,
        kernel: &'static str,
        grid: [u32; 3],
        block: [u32; 3],
        params: &[MaybeUninit<u8>],
    ) -> Result<(), String>;
}

/// Element types of buffers.
///
/// # Safety
/// Any bytes are a value, and there is no padding.
pub unsafe trait Plain: Copy + Default {}

macro_rules! plain {
    ($($name:ty)*) => {
        $(
            // SAFETY: a number, or two of them.
            unsafe impl Plain for $name {}
        )*
    };
}

plain!(u8 u16 i16 u32 i32 u64 f32 f64 [i32; 2] [u32; 2] [u64; 2] [f64; 2]);

/// Metal's `Wide`: the nearest float, and what is left.
pub fn two_floats(x: f64) -> u64 {
    let high = x as f32;
    let low = if high.is_finite() { (x - f64::from(high)) as f32 } else { 0.0 };
    u64::from(low.to_bits()) << 32 | u64::from(high.to_bits())
}

impl dyn Device + '_ {
    /// A span that holds `x`.
    pub fn of<T: Plain>(&mut self, x: &[T]) -> Span<T> {
        // SAFETY: the bytes of what `x` borrows; `Plain` has no padding.
        let bytes = unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) };
        Span::new(self.upload(bytes), x.len())
    }

    /// `len` elements of nonsense.
    pub fn room<T: Plain>(&mut self, len: usize) -> Span<T> {
        let nonsense = vec![0xcdu8; len * size_of::<T>()];
        Span::new(self.upload(&nonsense), len)
    }

    /// The elements of a span.
    pub fn read<T: Plain>(&mut self, span: Span<T>) -> Vec<T> {
        let mut x = vec![T::default(); span.len()];
        // SAFETY: `Plain`: any bytes are a value, and all of them are initialised.
        let bytes = unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(&x[..])) };
        self.download(span.address(), bytes);
        x
    }

    /// Runs a plan.
    pub fn run<P: Params>(&mut self, plan: Result<Launch<P>, Unfit>) -> Result<(), String> {
        let Launch { kernel, grid, block, params } = plan.map_err(|error| error.to_string())?;
        // SAFETY: the bytes of `params`, which may be uninitialised as padding.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const params).cast(), size_of::<P>()) };
        self.launch(kernel, grid, block, bytes).map_err(|error| format!("{kernel}: {error}"))
    }
}
