//! The CUDA driver API: loaded on demand, the result of every call checked.

use std::ffi::CStr;

use cudarc::driver::sys;

use super::error::CudaError;

/// The oldest driver that has all functions called here.
const MIN_VERSION: i32 = 12_000;

/// The oldest driver that is certain to load the images: that of the toolkit that compiles them, or [`MIN_VERSION`] for
/// committed PTX, whose version is older than any accepted driver.
pub(super) const MIN_IMAGE_VERSION: i32 = if cfg!(feature = "cuda") { 13_000 } else { MIN_VERSION };

/// The least major compute capability, and the oldest driver, with programmatic edges in graphs. Committed PTX is for
/// capability 8.0, where kernels do not wait for earlier ones themselves.
pub(super) const EARLY_STARTS: (i32, i32) = if cfg!(feature = "cuda") { (9, 12_030) } else { (i32::MAX, i32::MAX) };

/// An error unless `result` is success.
pub(super) fn check(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(failed(call, result, memory, || text(result))),
    }
}

/// The error of a call that returned `result`.
fn failed(
    call: &'static str,
    result: sys::CUresult,
    memory: impl FnOnce() -> (usize, usize),
    text: impl FnOnce() -> String,
) -> CudaError {
    match result {
        // Not only allocations: loading a module, instantiating a graph, and the first launch of a kernel take memory.
        sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
            let (free, total) = memory();
            CudaError::OutOfMemory { call, requested: None, free, total }
        }
        _ if is_sticky(result) => CudaError::Poisoned { call, problem: text() },
        _ => CudaError::Driver { call, problem: text() },
    }
}

/// Bytes free, and bytes of the current context's device; zeros if the driver does not say.
fn memory() -> (usize, usize) {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the driver is loaded, since it returned a result; the pointers are to integers.
    match unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) } {
        sys::CUresult::CUDA_SUCCESS => (free, total),
        _ => (0, 0),
    }
}

/// Whether all later calls in this process fail as well: a kernel was aborted, and the context is unusable.
fn is_sticky(result: sys::CUresult) -> bool {
    use sys::CUresult as R;
    matches!(
        result,
        R::CUDA_ERROR_ILLEGAL_ADDRESS
            | R::CUDA_ERROR_MISALIGNED_ADDRESS
            | R::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | R::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | R::CUDA_ERROR_INVALID_PC
            | R::CUDA_ERROR_HARDWARE_STACK_ERROR
            | R::CUDA_ERROR_LAUNCH_FAILED
            | R::CUDA_ERROR_LAUNCH_TIMEOUT
            | R::CUDA_ERROR_ASSERT
            | R::CUDA_ERROR_ECC_UNCORRECTABLE
    )
}

/// The driver's message for a result.
pub(super) fn text(result: sys::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, since it returned `result`; its messages are static strings.
    let text = unsafe {
        sys::cuGetErrorString(result, &mut text);
        if text.is_null() { None } else { CStr::from_ptr(text).to_str().ok() }
    };
    format!("{} ({result:?})", text.unwrap_or("an unknown error"))
}

/// Loads and initialises the driver, and returns its version.
pub(super) fn load() -> Result<i32, CudaError> {
    // SAFETY: opens the library, whose constructors are the driver's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut found = 0;
    // SAFETY: cuDriverGetVersion may be called before cuInit; the pointer is to an integer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut found) })?;
    if found < MIN_VERSION {
        return Err(CudaError::DriverTooOld { found, needed: MIN_VERSION });
    }
    // SAFETY: no arguments.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(CudaError::NoDevice { index: 0, count: 0 }),
        result => check("cuInit", result).map(|()| found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_aborts_a_kernel_is_told_from_what_fails_a_call() {
        use sys::CUresult as R;
        for result in [R::CUDA_ERROR_ILLEGAL_ADDRESS, R::CUDA_ERROR_LAUNCH_FAILED, R::CUDA_ERROR_MISALIGNED_ADDRESS] {
            assert!(is_sticky(result), "{result:?}");
        }
        for result in
            [R::CUDA_SUCCESS, R::CUDA_ERROR_OUT_OF_MEMORY, R::CUDA_ERROR_INVALID_VALUE, R::CUDA_ERROR_NOT_FOUND]
        {
            assert!(!is_sticky(result), "{result:?}");
        }
    }

    #[test]
    fn memory_that_the_driver_lacks_is_told_from_other_failures() {
        let error = |result| failed("cuGraphInstantiate", result, || (5, 80), || "a text".into());
        let no_memory = error(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let expected = CudaError::OutOfMemory { call: "cuGraphInstantiate", requested: None, free: 5, total: 80 };
        assert_eq!(no_memory, expected);
        assert_eq!(no_memory.to_string(), "CUDA: cuGraphInstantiate: out of memory: 5 of 80 bytes free");
        assert!(matches!(error(sys::CUresult::CUDA_ERROR_INVALID_VALUE), CudaError::Driver { .. }));
        assert!(matches!(error(sys::CUresult::CUDA_ERROR_LAUNCH_FAILED), CudaError::Poisoned { .. }));
    }
}
