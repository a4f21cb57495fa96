//! foretoken's GPU kernels: their sources, the plans of their launches, and the drivers that run them.
//!
//! * `shaders/` has the sources, in the common subset of CUDA C++ and the Metal Shading Language; `cuda/device.cuh` and
//!   `metal/device.metal` define the rest.
//! * [`plan`] has one function per kernel, which checks shapes and lengths and returns a
//!   [`Launch`]. It knows no device and is always compiled.
//! * `cuda` (feature `cuda` or `cuda-prebuilt`) and `metal` (feature `metal`) run launches on a
//!   device; the tests run them on an emulated one.
//!
//! Layouts of weights, activations and K/V pages are those of [`foretoken_kernels`].

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(any(feature = "cuda", feature = "cuda-prebuilt"))]
pub mod cuda;
#[cfg(any(test, feature = "metal"))]
mod in_flight;
mod launch;
#[cfg(feature = "metal")]
pub mod metal;
pub mod plan;

pub use launch::{DeviceSlice, Launch, LaunchError, MAX_BLOCKS, Params};
