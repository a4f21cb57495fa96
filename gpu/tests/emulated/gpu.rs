//! The suite on a GPU, for every driver interface.

/// A session on `foretoken_gpu::$module`, and the tests that use it; the caller defines `open`,
/// which returns a device, or `None` without one.
#[allow(unused_macros)]
macro_rules! on_a_gpu {
    ($module:ident) => {
        use foretoken_gpu::$module::{Buffer, Device, Stream};
        use std::mem::MaybeUninit;

        struct Gpu<'a> {
            device: &'a Device,
            stream: &'a Stream,
            buffers: Vec<Buffer<u8>>,
        }

        /// Any kernel's parameters.
        #[repr(C, align(16))]
        #[derive(Clone, Copy)]
        struct AnyParams([MaybeUninit<u8>; 1024]);

        // SAFETY: it begins with the structure of the plan, and the kernel reads no more.
        unsafe impl foretoken_gpu::Params for AnyParams {}

        impl $crate::emulated::device::Device for Gpu<'_> {
            fn upload(&mut self, bytes: &[u8]) -> u64 {
                let buffer = self.device.upload(bytes).expect("memory");
                let address = buffer.slice().address();
                self.buffers.push(buffer);
                address
            }

            fn download(&mut self, address: u64, bytes: &mut [u8]) {
                let of = |buffer: &&Buffer<u8>| {
                    let start = buffer.slice().address();
                    (start..=start + buffer.len() as u64).contains(&address)
                        && start + buffer.len() as u64 - address >= bytes.len() as u64
                };
                let buffer = self.buffers.iter().find(of).expect("a buffer of this address");
                let start = (address - buffer.slice().address()) as usize;
                buffer.read(start, bytes).expect("a device that works");
            }

            fn launch(&mut self, launch: foretoken_gpu::Launch<()>, params: &[MaybeUninit<u8>]) -> Result<(), String> {
                let foretoken_gpu::Launch { kernel, grid, threads, shared, .. } = launch;
                let mut bytes = AnyParams([MaybeUninit::uninit(); 1024]);
                bytes.0[..params.len()].copy_from_slice(params);
                let launch = foretoken_gpu::Launch { kernel, grid, threads, shared, params: bytes };
                // SAFETY: the session's buffers live until it is dropped, after the stream was
                // synchronized, and nothing else uses them.
                let launched = unsafe { self.stream.launch(&launch) }.and_then(|()| self.stream.synchronize());
                launched.map_err(|error| error.to_string())
            }
        }

        fn agree(cases: &[$crate::emulated::cases::Case]) {
            let Some(device) = open() else { return };
            eprintln!("{:?}", device.info());
            let stream = device.stream().expect("a stream");
            let failed: Vec<_> = (cases.iter())
                .filter_map(|case| {
                    let mut session = Gpu { device: &device, stream: &stream, buffers: Vec::new() };
                    (case.run)(&mut session).err().map(|error| format!("{}: {error}", case.name))
                })
                .collect();
            assert!(failed.is_empty(), "{} cases fail:\n{}", failed.len(), failed.join("\n"));
        }

        #[test]
        fn kernels_agree_with_the_cpu_on_a_device() {
            use $crate::emulated::cases::{all, small};
            agree(&all().into_iter().chain(small()).collect::<Vec<_>>());
        }

        /// Those that reach every line, for tools that slow a device down.
        #[test]
        fn small_cases_agree_with_the_cpu_on_a_device() {
            agree(&$crate::emulated::cases::small());
        }

        #[test]
        fn a_replayed_graph_runs_its_launches() {
            use foretoken_gpu::plan::pointwise::rms_norm;
            let Some(device) = open() else { return };
            let stream = device.stream().expect("a stream");
            let (x, y) = (device.upload(&[1.0f32; 256]).expect("memory"), device.zeroed::<f32>(256).expect("memory"));
            let plan = rms_norm(x.slice(), (1, 256), None, 0.0, None, y.slice()).expect("a plan");
            // The second launch reads the result of the first.
            let again = rms_norm(y.slice(), (1, 256), None, 0.0, None, y.slice()).expect("a plan");
            let graph = stream.record(|recorder| {
                // SAFETY: both are as their plans returned them.
                unsafe {
                    recorder.launch(&plan)?;
                    recorder.launch(&again)
                }
            });
            let graph = graph.expect("a graph");
            let mut got = [0.0f32; 256];
            for sign in [1.0f32, -1.0] {
                x.write(0, &[2.0 * sign; 256]).expect("memory");
                // SAFETY: the buffers outlive the graph, and nothing uses them before `read`, which waits.
                unsafe { stream.replay(&graph) }.expect("a replay");
                y.read(0, &mut got).expect("a result");
                assert_eq!(got, [sign; 256]);
            }
        }
    };
}

#[allow(unused_imports)] // by the suite of the emulated machine
pub(crate) use on_a_gpu;
