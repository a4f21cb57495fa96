//! The choice of the device that models run on, and its opening.

use std::str::FromStr;
use std::sync::Arc;

use super::Device;
use crate::{Error, Result};

/// Where models run.
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum DeviceChoice {
    /// The CPU.
    #[default]
    Cpu,
    /// The CUDA device of this index, from 0 on (features `cuda` and `cuda-prebuilt`).
    Cuda(usize),
    /// The Metal device of this index, from 0 on (feature `metal`).
    Metal(usize),
    /// The first usable CUDA or Metal device, else the CPU.
    Auto,
    /// A custom [`Device`].
    Given(Arc<dyn Device>),
}

impl FromStr for DeviceChoice {
    type Err = Error;

    /// `cpu`, `cuda`, `cuda:1`, `metal`, `metal:1` or `auto`.
    fn from_str(text: &str) -> Result<Self> {
        let (name, number) = text.split_once(':').unwrap_or((text, "0"));
        match (name, number.parse()) {
            ("cuda", Ok(number)) => Ok(Self::Cuda(number)),
            ("metal", Ok(number)) => Ok(Self::Metal(number)),
            _ if text == "cpu" => Ok(Self::Cpu),
            _ if text == "auto" => Ok(Self::Auto),
            _ => {
                let problem =
                    format!("{text:?} is not a device; expected one of cpu, cuda, cuda:N, metal, metal:N, auto");
                Err(Error::argument("device", problem))
            }
        }
    }
}

/// Opens the chosen device, which several engines may then share ([`DeviceChoice::Given`]); `None` is the CPU.
///
/// # Errors
/// If this build does not support it, there is no such device, or the driver fails.
pub fn open(choice: &DeviceChoice) -> Result<Option<Arc<dyn Device>>> {
    match choice {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Given(device) => Ok(Some(device.clone())),
        DeviceChoice::Cuda(index) => open_cuda(*index).map(Some),
        DeviceChoice::Metal(index) => open_metal(*index).map(Some),
        DeviceChoice::Auto => {
            for opened in [open_cuda(0), open_metal(0)] {
                match opened {
                    Ok(device) => return Ok(Some(device)),
                    Err(error) => tracing::info!(%error, "this device is not usable"),
                }
            }
            Ok(None)
        }
    }
}

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
use super::backend::cuda::open as open_cuda;
#[cfg(feature = "metal")]
use super::backend::metal::open as open_metal;

#[cfg(not(any(feature = "cuda", feature = "cuda-prebuilt")))]
fn open_cuda(_: usize) -> Result<Arc<dyn Device>> {
    Err(not_built("CUDA", "the feature cuda or cuda-prebuilt"))
}

#[cfg(not(feature = "metal"))]
fn open_metal(_: usize) -> Result<Arc<dyn Device>> {
    Err(not_built("Metal", "the feature metal"))
}

#[cfg(not(all(any(feature = "cuda", feature = "cuda-prebuilt"), feature = "metal")))]
fn not_built(device: &str, with: &str) -> Error {
    let problem = format!("not supported by this build; build with {with}, or use the CPU");
    Error::Device { device: device.into(), problem }
}
