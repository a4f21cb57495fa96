//! Where a case runs: the emulated machine, or a GPU.

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
    /// Runs a kernel to its end.
    fn launch(&mut self, kernel: &'static str, grid: [u32; 3], block: [u32; 3], params: &[u8]) -> Result<(), String>;
}

/// Element types of buffers.
pub trait Plain: Copy + Default {}
impl Plain for u8 {}
impl Plain for u16 {}
impl Plain for i16 {}
impl Plain for u32 {}
impl Plain for i32 {}
impl Plain for u64 {}
impl Plain for f32 {}
impl Plain for f64 {}
impl<T: Plain> Plain for [T; 2] {}

/// Metal's `Wide`: the nearest float, and what is left.
pub fn two_floats(x: f64) -> u64 {
    let high = x as f32;
    let low = if high.is_finite() { (x - f64::from(high)) as f32 } else { 0.0 };
    u64::from(low.to_bits()) << 32 | u64::from(high.to_bits())
}

fn bytes_of<T: Copy>(x: &[T]) -> &[u8] {
    // SAFETY: the bytes of what `x` borrows; padding of parameter structures is never looked at.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), size_of_val(x)) }
}

impl dyn Device + '_ {
    /// A span that holds `x`.
    pub fn of<T: Plain>(&mut self, x: &[T]) -> Span<T> {
        Span::new(self.upload(bytes_of(x)), x.len())
    }

    /// `len` elements of nonsense.
    pub fn room<T: Plain>(&mut self, len: usize) -> Span<T> {
        let nonsense = vec![0xcdu8; len * size_of::<T>()];
        Span::new(self.upload(&nonsense), len)
    }

    /// The elements of a span.
    pub fn read<T: Plain>(&mut self, span: Span<T>) -> Vec<T> {
        let mut x = vec![T::default(); span.len()];
        // SAFETY: plain numbers: any bytes are a value.
        let bytes = unsafe { std::slice::from_raw_parts_mut(x.as_mut_ptr().cast(), size_of_val(&x[..])) };
        self.download(span.address(), bytes);
        x
    }

    /// Runs a plan.
    pub fn run<P: Params>(&mut self, plan: Result<Launch<P>, Unfit>) -> Result<(), String> {
        let Launch { kernel, grid, block, params } = plan.map_err(|error| error.to_string())?;
        self.launch(kernel, grid, block, bytes_of(&[params])).map_err(|error| format!("{kernel}: {error}"))
    }
}
