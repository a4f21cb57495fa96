//! CUDA devices: memory, streams, launches of [`crate::gpu`]'s plans, graphs.
//!
//! The driver is loaded when a [`Device`] is opened, so a program that was built with this feature starts everywhere, and the
//! CPU's kernels work in the same process whatever happens here. Nothing of the CUDA toolkit is linked or needed at run
//! time: the kernels come as machine code for compute capabilities 8.0, 8.9 and 9.0, and as PTX for those between and after.

mod buffer;
mod device;
mod driver;
mod error;
mod images;
mod stream;

pub use crate::gpu::Plain;
pub use buffer::Buffer;
pub use device::{Device, DeviceInfo};
pub use error::CudaError;
pub use stream::{Graph, Recorder, Stream};
