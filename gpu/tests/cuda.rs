//! The CUDA kernels on a device: the emulated suite's cases, and graphs. Skipped without a device;
//! the errors are tested anywhere.
//!
//! `compute-sanitizer --tool memcheck` (and `racecheck`) on this test's executable checks what the
//! emulated machine cannot.

#![cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]

mod cuda_device;
#[allow(dead_code)]
mod emulated;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;

use cuda_device::{is_absent, open};
use foretoken_gpu::cuda::CudaError;

emulated::gpu::on_a_gpu!(cuda);

#[test]
fn too_much_memory_is_an_error_with_the_numbers() {
    let Some(device) = open() else { return };
    let (_, total) = device.memory().expect("numbers");
    let error = device.zeroed::<u8>(2 * total).expect_err("more than there is");
    assert!(matches!(error, CudaError::OutOfMemory { requested, .. } if requested == Some(2 * total)), "{error}");
}

#[test]
fn without_a_device_there_is_an_error() {
    let installed = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
    // SAFETY: the driver's library, where there is one.
    let installed = installed.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok());
    match Device::open(0) {
        Ok(_) => assert!(installed, "a device without a driver"),
        Err(error) if !installed => {
            assert_eq!(error, CudaError::NoDriver);
            assert!(error.to_string().contains("install NVIDIA's driver, or use the CPU"), "{error}");
        }
        Err(error) => assert!(error != CudaError::NoDriver && is_absent(&error), "{error}"),
    }
    let index = usize::MAX;
    assert!(matches!(
        Device::open(index),
        Err(CudaError::NoDriver | CudaError::NoDevice { .. } | CudaError::DriverTooOld { .. })
    ));
}

#[test]
fn errors_name_the_numbers_and_the_remedy() {
    for (error, parts) in [
        (CudaError::DriverTooOld { found: 11_080, needed: 13_000 }, ["11.8", "13.0", "update the driver"]),
        (CudaError::NoDevice { index: 3, count: 1 }, ["device 3", "has 1", "CUDA"]),
        (CudaError::Unsupported { name: "T4".into(), capability: (7, 5) }, ["T4", "7.5", "8.0"]),
        (
            CudaError::Poisoned { call: "cuStreamSynchronize", problem: "x (y)".into() },
            ["x (y)", "aborted", "start it again"],
        ),
        (
            CudaError::OutOfMemory { call: "cuMemAlloc", requested: Some(70), free: 50, total: 80 },
            ["70", "50 of 80", "out of memory"],
        ),
    ] {
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
