//! Metal devices: memory, streams, launches, recordings.
//!
//! The interface is that of `cuda`. The Mac compiles the kernels, whose sources are embedded, when a [`Device`] is
//! opened; without Metal, [`Device::open`] is an error.
//!
//! The sources are compiled with fast math off, so that every operation is rounded as it is written.

mod buffer;
mod device;
mod error;
mod info;
mod memory;
mod queue;
mod sources;
mod stream;
#[cfg_attr(target_os = "macos", path = "system.rs")]
#[cfg_attr(not(target_os = "macos"), path = "no_system.rs")]
mod system;

pub use buffer::Buffer;
pub use device::Device;
pub use error::MetalError;
pub use info::DeviceInfo;
pub use stream::{Graph, Recorder, Stream};
