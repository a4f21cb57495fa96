//! Errors of CUDA devices.

use crate::launch::LaunchError;

/// An error of the driver, of a device, or of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver library is installed.
    NoDriver,
    /// The driver's version, and the oldest supported: 1000 times major plus 10 times minor.
    DriverTooOld {
        /// The driver's.
        found: i32,
        /// The oldest supported.
        needed: i32,
    },
    /// There is no device of this index.
    NoDevice {
        /// The index.
        index: usize,
        /// Number of devices.
        count: usize,
    },
    /// The device's compute capability is below 8.0.
    Unsupported {
        /// Its name.
        name: String,
        /// Its capability, major and minor.
        capability: (i32, i32),
    },
    /// Not enough memory is left on the device.
    OutOfMemory {
        /// The call that failed.
        call: &'static str,
        /// Bytes requested; `None` for memory that the driver takes itself, for kernels, graphs or launches.
        requested: Option<usize>,
        /// Bytes free; 0 if the driver does not say.
        free: usize,
        /// Bytes of the device; 0 if the driver does not say.
        total: usize,
    },
    /// A launch is invalid.
    Launch(LaunchError),
    /// The kernels do not load on this device.
    BadImage {
        /// The source's name.
        source: &'static str,
        /// The driver's message.
        problem: String,
    },
    /// No image has this kernel: images and plans are of different versions.
    NoKernel(&'static str),
    /// A length exceeds a buffer.
    Length {
        /// Elements requested.
        requested: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// A kernel was aborted: this call and all later ones of the process fail.
    Poisoned {
        /// The call that reported it, which may be later than the launch.
        call: &'static str,
        /// The driver's message.
        problem: String,
    },
    /// A call of the driver failed.
    Driver {
        /// The call.
        call: &'static str,
        /// The driver's message.
        problem: String,
    },
}

impl From<LaunchError> for CudaError {
    fn from(error: LaunchError) -> Self {
        Self::Launch(error)
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
                "CUDA: the driver supports CUDA {}, but {} is required; update the driver, or use the CPU",
                version(*found),
                version(*needed)
            ),
            Self::NoDevice { index, count } => {
                write!(f, "CUDA: there is no device {index}: the driver has {count}; choose another, or the CPU")
            }
            Self::Unsupported { name, capability: (major, minor) } => {
                write!(f, "CUDA: {name} has compute capability {major}.{minor}, but 8.0 is required; use the CPU")
            }
            Self::OutOfMemory { call, requested, free, total } => match requested {
                Some(requested) => {
                    write!(f, "CUDA: out of memory: {requested} bytes requested, {free} of {total} free")
                }
                None => write!(f, "CUDA: {call}: out of memory: {free} of {total} bytes free"),
            },
            Self::Launch(error) => error.fmt(f),
            Self::BadImage { source, problem } => write!(f, "CUDA: cannot load the kernels of {source}: {problem}"),
            Self::NoKernel(name) => write!(f, "CUDA: kernel {name} not found; rebuild the kernels"),
            Self::Length { requested, len } => {
                write!(f, "CUDA: {requested} elements requested of a buffer of {len}")
            }
            Self::Poisoned { call, problem } => write!(
                f,
                "CUDA: {call}: {problem}; a kernel was aborted, and the device takes no more calls of this process: start it \
                 again, or use the CPU"
            ),
            Self::Driver { call, problem } => write!(f, "CUDA: {call}: {problem}"),
        }
    }
}

impl std::error::Error for CudaError {}
