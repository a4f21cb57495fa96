//! Metal devices: memory, streams, launches of [`crate::gpu`]'s plans, recordings of them.
//!
//! The interface is that of `cuda`. The Mac compiles the kernels when a [`Device`] is opened, from sources that are part of
//! the program; where there is no Metal, [`Device::open`] says so, and the CPU's kernels work all the same.
//!
//! The sources are compiled with fast math off: their results are defined by every operation's rounding.

mod buffer;
mod device;
mod error;
mod stream;
#[cfg_attr(target_os = "macos", path = "system.rs")]
#[cfg_attr(not(target_os = "macos"), path = "no_system.rs")]
mod system;

pub use crate::gpu::Plain;
pub use buffer::Buffer;
pub use device::{Device, DeviceInfo};
pub use error::MetalError;
pub use stream::{Graph, Recorder, Stream};

/// The kernels' sources, a text each: see `build.rs`.
mod sources {
    include!(concat!(env!("OUT_DIR"), "/sources.rs"));
}
