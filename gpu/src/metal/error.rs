//! Errors of Metal devices.

use crate::launch::LaunchError;

/// An error of the system, of a device, or of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MetalError {
    /// This system has no Metal.
    NoMetal,
    /// There is no device of this index.
    NoDevice {
        /// The index.
        index: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device is older than Apple's M1, or the system than macOS 13.
    Unsupported {
        /// Its name.
        name: String,
    },
    /// Not enough memory is left on the device.
    OutOfMemory {
        /// Bytes requested.
        requested: usize,
        /// Bytes left of `total`.
        free: usize,
        /// Bytes that the system recommends to use at most.
        total: usize,
    },
    /// A buffer is larger than the device supports.
    BufferTooLarge {
        /// Bytes requested.
        requested: usize,
        /// Bytes of the largest buffer.
        largest: usize,
    },
    /// A launch is invalid.
    Launch(LaunchError),
    /// The system cannot compile a source, or cannot create a pipeline for a kernel.
    BadSource {
        /// The source's, or the kernel's name.
        source: &'static str,
        /// The compiler's message.
        problem: String,
    },
    /// No source has this kernel: sources and plans are of different versions.
    NoKernel(&'static str),
    /// A length exceeds a buffer.
    Length {
        /// Elements requested.
        requested: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// A launch failed. What it should have written is undefined, so all later launches, reads and writes of the device
    /// fail as well.
    Poisoned {
        /// The system's message.
        problem: String,
    },
    /// A call failed.
    System {
        /// The call.
        call: &'static str,
        /// The system's message.
        problem: String,
    },
}

impl From<LaunchError> for MetalError {
    fn from(error: LaunchError) -> Self {
        Self::Launch(error)
    }
}

impl std::fmt::Display for MetalError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoMetal => f.write_str("Metal: not available on this system; use the CPU"),
            Self::NoDevice { index, count } => {
                write!(f, "Metal: there is no device {index}: the system has {count}; choose another, or the CPU")
            }
            Self::Unsupported { name } => {
                write!(f, "Metal: {name} does not support Metal 3 on Apple silicon (M1, macOS 13); use the CPU")
            }
            Self::OutOfMemory { requested, free, total } => {
                write!(f, "Metal: out of memory: {requested} bytes requested, {free} of {total} free")
            }
            Self::BufferTooLarge { requested, largest } => {
                write!(f, "Metal: buffer too large: {requested} bytes requested, at most {largest} supported")
            }
            Self::Launch(error) => error.fmt(f),
            Self::BadSource { source, problem } => write!(f, "Metal: cannot compile {source}: {problem}"),
            Self::NoKernel(name) => write!(f, "Metal: kernel {name} not found; rebuild the program"),
            Self::Length { requested, len } => {
                write!(f, "Metal: {requested} elements requested of a buffer of {len}")
            }
            Self::Poisoned { problem } => write!(
                f,
                "Metal: a launch failed: {problem}; its results are lost, and the device takes no more calls: open it \
                 again, or use the CPU"
            ),
            Self::System { call, problem } => write!(f, "Metal: {call}: {problem}"),
        }
    }
}

impl std::error::Error for MetalError {}
