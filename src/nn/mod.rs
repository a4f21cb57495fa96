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

pub(crate) use activation::{Gate, gate};
pub(crate) use aligned::Aligned;
pub use arena::{Allocation, Arena};
pub(crate) use balanced_groups::balanced_groups;
pub use bytes::Bytes;
#[cfg(test)]
pub(crate) use bytes::Recorded;
pub(crate) use bytes::{MappedFile, Source};
pub(crate) use centroid_head::CentroidHead;
pub use centroid_head::Scores;
pub use delta_net::DeltaNetConfig;
pub(crate) use delta_net::{DeltaNet, HeadOrder};
pub(crate) use embedding::Embedding;
pub(crate) use experts::Experts;
pub(crate) use linear::{Linear, gated, linear, linear_narrowed, project};
pub(crate) use multiply::{Input, Job, multiply};
pub use norm::RmsNorm;
pub(crate) use parallel::{blocks, divides, for_row_blocks, map, row_blocks};
pub(crate) use pod::{cast, cast_mut, elements};
pub use rotary::{Angles, Rotary};
pub(crate) use team::{for_each, threads, with_team};
pub(crate) use unpacked::Unpacked;
pub(crate) use view::same_shape;
pub use view::{F32View, tensor};
pub(crate) use weight::{Matrix, Storage, Weight};
