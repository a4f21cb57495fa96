//! Weights on a device other than matrices and experts.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::rows::Pairing;
use foretoken_gpu::plan::vocabulary::Grouped;

use super::buffer::Buffer;
use super::matrix::Matrices;

/// A root-mean-square norm.
pub(crate) struct DeviceNorm {
    pub(super) weight: Option<Buffer<f32>>, // (width)
    pub(super) width: usize,
    pub(super) eps: f32,
}

/// Inverse frequencies, and which channels rotate.
#[derive(Clone)]
pub(crate) struct DeviceRotary {
    pub(super) frequencies: Arc<Buffer<f32>>,
    pub(super) pairing: Pairing,
}

/// A table and its row factor.
#[derive(Clone)]
pub(crate) struct DeviceEmbedding {
    pub(super) table: Arc<Matrices>,
    pub(super) scale: f32,
}

/// See [`crate::nn::CentroidHead`].
pub(crate) struct DeviceCentroidHead {
    pub(super) centroids: Arc<Matrices>,
    pub(super) table: Arc<Matrices>,
    pub(super) ordering: Buffer<u32>,
    pub(super) token_ordering: Vec<u32>, // the host's copy
    pub(super) top_k: usize,
}

impl DeviceNorm {
    pub(super) fn weight(&self) -> Option<DeviceSlice<f32>> {
        self.weight.as_ref().map(Buffer::slice)
    }
}

impl DeviceCentroidHead {
    /// Scores of the groups in `groups`.
    pub(super) fn grouped(&self, groups: DeviceSlice<i32>) -> Grouped {
        Grouped { groups, ordering: self.ordering.slice(), len: self.table.outputs() }
    }
}
