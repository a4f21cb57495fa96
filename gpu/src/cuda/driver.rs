//! The driver's calls: loaded on demand, checked.

use std::ffi::CStr;

use cudarc::driver::sys;

use super::error::CudaError;

/// The oldest driver that has all functions called here.
const OLDEST: i32 = 12_000;

/// The driver version of the toolkit that compiles the images.
pub(super) const IMAGES: i32 = 13_000;

/// An error unless `result` is success.
pub(super) fn check(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(CudaError::Driver { call, problem: text(result) }),
    }
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
    if found < OLDEST {
        return Err(CudaError::DriverTooOld { found, needed: OLDEST });
    }
    // SAFETY: no arguments.
    match unsafe { sys::cuInit(0) } {
        sys::CUresult::CUDA_ERROR_NO_DEVICE => Err(CudaError::NoDevice { index: 0, count: 0 }),
        result => check("cuInit", result).map(|()| found),
    }
}
