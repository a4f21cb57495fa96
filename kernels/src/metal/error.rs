//! What can go wrong on a device.

use crate::gpu::Unfit;

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
        /// How many there are.
        count: usize,
    },
    /// The device is older than Apple's M1, or the system than macOS 13.
    Unsupported {
        /// Its name.
        name: String,
    },
    /// The device has not that much memory left.
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// Bytes that the system recommends to use more, at most.
        free: usize,
        /// Bytes that it recommends to use.
        total: usize,
    },
    /// A plan does not fit.
    Unfit(Unfit),
    /// The system does not compile a source, or makes no pipeline of a kernel.
    BadSource {
        /// The source's, or the kernel's name.
        source: &'static str,
        /// What the compiler says.
        problem: String,
    },
    /// There is no such kernel: the sources and the plans are of different versions.
    NoKernel(&'static str),
    /// A length does not fit a buffer.
    Length {
        /// Elements given or asked for.
        asked: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// A call failed, or what was launched before.
    System {
        /// The call.
        call: &'static str,
        /// What the system says.
        problem: String,
    },
}

impl From<Unfit> for MetalError {
    fn from(unfit: Unfit) -> Self {
        Self::Unfit(unfit)
    }
}

impl std::fmt::Display for MetalError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoMetal => f.write_str("Metal: this system has none; use the CPU"),
            Self::NoDevice { index, count } => write!(f, "Metal: there is no device {index}: the system has {count}"),
            Self::Unsupported { name } => {
                write!(f, "Metal: {name} does not support Metal 3 on Apple silicon (M1, macOS 13); use the CPU")
            }
            Self::OutOfMemory { asked, free, total } => {
                write!(f, "Metal: out of memory: {asked} bytes asked for, {free} of {total} free")
            }
            Self::Unfit(unfit) => unfit.fmt(f),
            Self::BadSource { source, problem } => write!(f, "Metal: {source} does not compile: {problem}"),
            Self::NoKernel(name) => write!(f, "Metal: there is no kernel {name}; build the program again"),
            Self::Length { asked, len } => write!(f, "Metal: {asked} elements of a buffer of {len}"),
            Self::System { call, problem } => write!(f, "Metal: {call}: {problem}"),
        }
    }
}

impl std::error::Error for MetalError {}
