//! The CUDA kernels on a device: the emulated suite's cases, and graphs. Where there is no device, the errors that say so.
//!
//! `compute-sanitizer --tool memcheck` (and `racecheck`) on this test's executable checks what the emulated machine cannot.

#![cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]

#[allow(dead_code)]
mod emulated;

use emulated::{cases, device};
use foretoken_kernels::cuda::{Buffer, CudaError, Device, Stream};
use foretoken_kernels::gpu::{Launch, Params};
use foretoken_kernels::{Isa, activation};

/// A device, or why there is none: the tests then pass, and say so.
fn open() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error) => {
            eprintln!("not run: {error}");
            None
        }
    }
}

struct Cuda<'a> {
    device: &'a Device,
    stream: &'a Stream,
    buffers: Vec<Buffer<u8>>,
}

/// Any kernel's parameters.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct AnyParams([u8; 1024]);

// SAFETY: the driver reads as many bytes as the kernel's structure has, which the plan wrote.
unsafe impl Params for AnyParams {}

impl device::Device for Cuda<'_> {
    fn upload(&mut self, bytes: &[u8]) -> u64 {
        let buffer = self.device.upload(bytes).expect("memory");
        let address = buffer.span().address();
        self.buffers.push(buffer);
        address
    }

    fn download(&mut self, address: u64, bytes: &mut [u8]) {
        let of = |buffer: &&Buffer<u8>| {
            let start = buffer.span().address();
            (start..=start + buffer.len() as u64).contains(&address)
                && start + buffer.len() as u64 - address >= bytes.len() as u64
        };
        let buffer = self.buffers.iter().find(of).expect("a buffer of this address");
        let mut all = vec![0; buffer.len()];
        buffer.read(&mut all).expect("a device that works");
        let start = (address - buffer.span().address()) as usize;
        bytes.copy_from_slice(&all[start..start + bytes.len()]);
    }

    fn launch(&mut self, kernel: &'static str, grid: [u32; 3], block: [u32; 3], params: &[u8]) -> Result<(), String> {
        let mut bytes = AnyParams([0; 1024]);
        bytes.0[..params.len()].copy_from_slice(params);
        let launch = Launch { kernel, grid, block, params: bytes };
        // SAFETY: the session's buffers live until it is dropped, after the stream was waited for.
        let launched = unsafe { self.stream.launch(&launch) }.and_then(|()| self.stream.synchronize());
        launched.map_err(|error| error.to_string())
    }
}

#[test]
fn kernels_agree_with_the_cpu_on_a_device() {
    let Some(device) = open() else { return };
    eprintln!("{:?}", device.info());
    let stream = device.stream().expect("a stream");
    let failed: Vec<_> = (cases::all().iter())
        .filter_map(|case| {
            let mut session = Cuda { device: &device, stream: &stream, buffers: Vec::new() };
            (case.run)(&mut session).err().map(|error| format!("{}: {error}", case.name))
        })
        .collect();
    assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn a_recorded_graph_does_what_its_launches_do() {
    use foretoken_kernels::gpu::pointwise::rms_norm;
    let Some(device) = open() else { return };
    let stream = device.stream().expect("a stream");
    let (mut x, y) = (device.upload(&[1.0f32; 256]).expect("memory"), device.zeroed::<f32>(256).expect("memory"));
    let plan = rms_norm(x.span(), (1, 256), None, 0.0, None, y.span()).expect("a plan");
    // SAFETY: the buffers outlive the graph.
    let graph = stream.record(|stream| unsafe { stream.launch(&plan) }).expect("a graph");
    let mut got = [0.0f32; 256];
    for sign in [1.0f32, -1.0] {
        x.write(&[2.0 * sign; 256]).expect("memory");
        // SAFETY: as above.
        unsafe { stream.replay(&graph) }.expect("a replay");
        y.read(&mut got).expect("a result");
        assert_eq!(got, [sign; 256]);
    }
}

#[test]
fn too_much_memory_is_an_error_with_the_numbers() {
    let Some(device) = open() else { return };
    let (free, total) = device.memory().expect("numbers");
    let error = device.zeroed::<u8>(2 * total).expect_err("more than there is");
    assert!(matches!(error, CudaError::OutOfMemory { asked, .. } if asked == 2 * total), "{error}");
    assert_eq!(device.memory().expect("numbers").0, free, "nothing stays allocated");
}

#[test]
fn without_a_device_there_is_an_error_and_the_cpu_works() {
    let installed = ["libcuda.so.1", "libcuda.so", "nvcuda.dll"];
    // SAFETY: the driver's library, where there is one.
    let installed = installed.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok());
    match Device::open(0) {
        Ok(_) => assert!(installed, "a device without a driver"),
        Err(error) if !installed => {
            assert_eq!(error, CudaError::NoDriver);
            assert!(error.to_string().contains("install NVIDIA's driver, or use the CPU"), "{error}");
        }
        Err(error) => {
            let known = ["NoDevice", "DriverTooOld", "Unsupported"];
            assert!(known.iter().any(|name| format!("{error:?}").starts_with(name)), "{error}");
        }
    }
    let index = usize::MAX;
    assert!(matches!(
        Device::open(index),
        Err(CudaError::NoDriver | CudaError::NoDevice { .. } | CudaError::DriverTooOld { .. })
    ));
    let mut x = [30.0f32];
    activation::soft_cap(Isa::best(), &mut x, 30.0);
    assert!((x[0] - 30.0 * 1.0f32.tanh()).abs() < 1e-4);
}

#[test]
fn errors_name_the_numbers_and_the_remedy() {
    for (error, parts) in [
        (CudaError::DriverTooOld { found: 11_080, needed: 13_000 }, ["11.8", "13.0", "update the driver"]),
        (CudaError::NoDevice { index: 3, count: 1 }, ["device 3", "has 1", "CUDA"]),
        (CudaError::Unsupported { name: "T4".into(), capability: (7, 5) }, ["T4", "7.5", "8.0"]),
        (CudaError::OutOfMemory { asked: 70, free: 50, total: 80 }, ["70", "50 of 80", "out of memory"]),
    ] {
        let text = error.to_string();
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
