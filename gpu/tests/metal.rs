//! The Metal kernels on a device: the emulated suite's cases, and recordings. Skipped without a device; the errors are
//! tested anywhere.

#![cfg(feature = "metal")]

#[allow(dead_code)]
mod emulated;
#[path = "../../kernels/tests/skipped/mod.rs"]
mod skipped;

use foretoken_gpu::metal::MetalError;

emulated::gpu::on_a_gpu!(metal);

/// A device; `None` without one: the test is skipped. Other errors are failures.
fn open() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error @ (MetalError::NoMetal | MetalError::NoDevice { .. } | MetalError::Unsupported { .. })) => {
            skipped::skipped("metal", error);
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn too_much_memory_is_an_error_with_the_numbers() {
    let Some(device) = open() else { return };
    let (_, total) = device.memory().expect("numbers");
    let error = device.zeroed::<u8>(2 * total).expect_err("more than there is");
    assert!(matches!(error, MetalError::OutOfMemory { requested, .. } if requested == 2 * total), "{error}");
}

#[test]
fn without_metal_there_is_an_error_that_says_so() {
    let opened = Device::open(usize::MAX);
    if cfg!(target_os = "macos") {
        assert!(matches!(opened, Err(MetalError::NoDevice { index: usize::MAX, .. })), "{opened:?}");
    } else {
        let error = opened.expect_err("no Metal");
        assert_eq!(error, MetalError::NoMetal);
        assert!(error.to_string().contains("use the CPU"), "{error}");
    }
}
