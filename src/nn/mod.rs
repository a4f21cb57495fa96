//! Neural-network modules of the models: candle tensors in and out, [`foretoken_kernels`] inside.
//!
//! Activations are `f32`, `(rows, width)`, contiguous. Weights keep the checkpoint's type.

mod activation;
mod aligned;
mod arena;
mod balanced_groups;
mod bytes;
mod centroid_head;
mod delta_net;
mod embedding;
mod experts;
mod linear;
mod multiply;
mod norm;
mod parallel;
mod pod;
mod rotary;
mod team;
mod unpacked;
mod view;
mod weight;

pub use activation::{Gate, gate};
pub(crate) use aligned::Aligned;
pub use arena::{Allocation, Arena};
pub(crate) use balanced_groups::balanced_groups;
pub use bytes::{Bytes, MappedFile, Source};
pub use centroid_head::{CentroidHead, Scores};
pub use delta_net::{DeltaNet, DeltaNetConfig, HeadOrder};
pub use embedding::Embedding;
pub use experts::Experts;
pub use linear::{Linear, gated, linear, project};
pub use multiply::{Input, Job, multiply};
pub use norm::RmsNorm;
pub(crate) use parallel::{blocks, divides, for_row_blocks, map, row_blocks};
pub(crate) use pod::{cast, cast_mut, elements};
pub use rotary::{Angles, Rotary};
pub(crate) use team::{for_each, threads, with_team};
pub(crate) use unpacked::Unpacked;
pub(crate) use view::same_shape;
pub use view::{F32View, tensor};
pub(crate) use weight::Storage;
pub use weight::{Matrix, Weight};
