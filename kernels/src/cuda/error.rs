//! What can go wrong on a device.

use crate::gpu::Unfit;

/// An error of the driver, of a device, or of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver library is installed.
    NoDriver,
    /// The driver's version, and the oldest that works: 1000 times major plus 10 times minor.
    DriverTooOld {
        /// The driver's.
        found: i32,
        /// The oldest that works.
        needed: i32,
    },
    /// There is no device of this index.
    NoDevice {
        /// The index.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The device's compute capability is below 8.0.
    Unsupported {
        /// Its name.
        name: String,
        /// Its capability, major and minor.
        capability: (i32, i32),
    },
    /// The device has not that much memory left.
    OutOfMemory {
        /// Bytes asked for.
        asked: usize,
        /// Bytes free.
        free: usize,
        /// Bytes of the device.
        total: usize,
    },
    /// A plan does not fit.
    Unfit(Unfit),
    /// The kernels do not load on this device.
    BadImage {
        /// The source's name.
        source: &'static str,
        /// What the driver says.
        problem: String,
    },
    /// There is no such kernel: the images and the plans are of different versions.
    NoKernel(String),
    /// A length does not fit a buffer.
    Length {
        /// Elements given or asked for.
        asked: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// A call of the driver failed.
    Driver {
        /// The call.
        call: &'static str,
        /// What the driver says.
        problem: String,
    },
}

impl From<Unfit> for CudaError {
    fn from(unfit: Unfit) -> Self {
        Self::Unfit(unfit)
    }
}

/// `major.minor` of a driver's version.
fn version(version: i32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoDriver => {
                f.write_str("CUDA: no driver library (libcuda) is installed; install NVIDIA's driver, or use the CPU")
            }
            Self::DriverTooOld { found, needed } => write!(
                f,
                "CUDA: the driver supports CUDA {}, and {} is needed; update the driver, or use the CPU",
                version(*found),
                version(*needed)
            ),
            Self::NoDevice { index, count } => write!(f, "CUDA: there is no device {index}: the driver has {count}"),
            Self::Unsupported { name, capability: (major, minor) } => {
                write!(f, "CUDA: {name} has compute capability {major}.{minor}, and 8.0 is needed; use the CPU")
            }
            Self::OutOfMemory { asked, free, total } => {
                write!(f, "CUDA: out of memory: {asked} bytes asked for, {free} of {total} free")
            }
            Self::Unfit(unfit) => unfit.fmt(f),
            Self::BadImage { source, problem } => write!(f, "CUDA: the kernels of {source} do not load: {problem}"),
            Self::NoKernel(name) => write!(f, "CUDA: there is no kernel {name}; build the kernels again"),
            Self::Length { asked, len } => write!(f, "CUDA: {asked} elements of a buffer of {len}"),
            Self::Driver { call, problem } => write!(f, "CUDA: {call}: {problem}"),
        }
    }
}

impl std::error::Error for CudaError {}
