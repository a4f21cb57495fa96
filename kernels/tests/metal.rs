//! The Metal kernels on a device: the emulated suite's cases, and recordings. Where there is no device, the errors that say
//! so.

#![cfg(feature = "metal")]

#[allow(dead_code)]
mod emulated;

use emulated::{cases, device};
use foretoken_kernels::gpu::{Launch, Params};
use foretoken_kernels::metal::{Buffer, Device, MetalError, Stream};

/// A device, or why there is none: the tests then pass, and say so.
fn open() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error @ (MetalError::NoMetal | MetalError::NoDevice { .. } | MetalError::Unsupported { .. })) => {
            eprintln!("not run: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

struct Metal<'a> {
    device: &'a Device,
    stream: &'a Stream,
    buffers: Vec<Buffer<u8>>,
}

/// Any kernel's parameters.
#[repr(C, align(16))]
#[derive(Clone, Copy)]
struct AnyParams([u8; 1024]);

// SAFETY: the kernel reads as many bytes as its structure has, which the plan wrote.
unsafe impl Params for AnyParams {}

impl device::Device for Metal<'_> {
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

    fn wide(&self, x: f64) -> u64 {
        device::two_floats(x)
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
            let mut session = Metal { device: &device, stream: &stream, buffers: Vec::new() };
            (case.run)(&mut session).err().map(|error| format!("{}: {error}", case.name))
        })
        .collect();
    assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
}

#[test]
fn a_recording_does_what_its_launches_do() {
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
    let (_, total) = device.memory().expect("numbers");
    let error = device.zeroed::<u8>(2 * total).expect_err("more than there is");
    assert!(matches!(error, MetalError::OutOfMemory { asked, .. } if asked == 2 * total), "{error}");
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
