//! CUDA devices: memory, streams, launches, graphs.
//!
//! The driver is loaded when a [`Device`] is opened, so a program built with this feature starts on machines without
//! one. The CUDA toolkit is neither linked nor needed at run time: kernels are embedded as machine code for compute
//! capabilities 8.0, 8.9 and 9.0 and PTX for others (feature `cuda`), or as PTX only (`cuda-prebuilt`).

mod buffer;
mod device;
mod driver;
mod error;
mod images;
mod stream;

pub use buffer::Buffer;
pub use device::{Device, DeviceInfo};
pub use error::CudaError;
pub use stream::{Graph, Recorder, Stream};
