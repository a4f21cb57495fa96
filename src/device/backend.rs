//! [`Device`](super::Device) for the backends of `foretoken_gpu`, which share one interface.

macro_rules! backend {
    ($module:ident, $name:literal, $error:ident) => {
        pub(super) mod $module {
            use std::sync::{Arc, Mutex, PoisonError};

            use foretoken_gpu::$module::{self, $error, Buffer, Graph, Stream};

            use crate::device::{AnyLaunch, Device, Memory, Recording, out_of_memory};
            use crate::{Error, Result};

            /// A device and its one stream, shared by all sequences.
            struct Opened {
                device: $module::Device,
                stream: Arc<Mutex<Stream>>,
            }

            /// # Errors
            /// If there is no such device, or the driver fails.
            pub fn open(index: usize) -> Result<Arc<dyn Device>> {
                let device = $module::Device::open(index).map_err(failed)?;
                let stream = Arc::new(Mutex::new(device.stream().map_err(failed)?));
                tracing::info!(info = ?device.info(), concat!("a ", $name, " device is used"));
                Ok(Arc::new(Opened { device, stream }))
            }

            /// Wraps the driver's error, without the driver's name, which `Error::Device` adds.
            fn failed(error: $error) -> Error {
                if let $error::OutOfMemory { requested, free, .. } = error {
                    return out_of_memory($name, requested, free);
                }
                let text = error.to_string();
                let problem = text.strip_prefix(concat!($name, ": ")).unwrap_or(&text).into();
                Error::Device { device: $name.into(), problem }
            }

            // SAFETY: an allocation is a buffer of its own, freed after the launches that use it; the stream runs the
            // launches that it is given.
            unsafe impl Device for Opened {
                fn name(&self) -> String {
                    self.device.info().name.clone()
                }

                fn free_bytes(&self) -> Result<usize> {
                    self.device.memory().map(|(free, _)| free).map_err(failed)
                }

                fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
                    Ok(Box::new(Allocation(self.device.zeroed(bytes).map_err(failed)?)))
                }

                unsafe fn launch(&self, launch: &AnyLaunch) -> Result<()> {
                    let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
                    // SAFETY: the caller's contract covers the memory that the parameters point to; the kernel reads
                    // its own parameter structure, which is the start of `AnyLaunch`.
                    unsafe { stream.launch(&launch.launch) }.map_err(failed)
                }

                fn record(&self, launches: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
                    let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
                    let record = |recorder: &mut $module::Recorder| {
                        // SAFETY: `AnyParams` has room for any kernel's parameters.
                        launches.iter().try_for_each(|launch| unsafe { recorder.launch(&launch.launch) })
                    };
                    let graph = stream.record(record).map_err(failed)?;
                    Ok(Box::new(Recorded { graph, stream: self.stream.clone() }))
                }
            }

            struct Recorded {
                graph: Graph,
                stream: Arc<Mutex<Stream>>,
            }

            impl Recording for Recorded {
                unsafe fn replay(&self) -> Result<()> {
                    let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
                    // SAFETY: the caller's contract, as in `launch`.
                    unsafe { stream.replay(&self.graph) }.map_err(failed)
                }
            }

            struct Allocation(Buffer<u8>);

            impl Memory for Allocation {
                fn address(&self) -> u64 {
                    self.0.slice().address()
                }

                fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
                    self.0.write(at, bytes).map_err(failed)
                }

                fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
                    self.0.read(at, bytes).map_err(failed)
                }
            }
        }
    };
}

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
backend!(cuda, "CUDA", CudaError);
#[cfg(feature = "metal")]
backend!(metal, "Metal", MetalError);
