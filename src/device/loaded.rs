//! Loaded models on a device.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::delta_net::Shape;
use foretoken_gpu::plan::experts::{MAX_EXPERTS, MAX_EXPERTS_PER_ROW};
use foretoken_gpu::plan::pages::HEAD_DIMS;
use foretoken_gpu::plan::rows::has_pairing;
use foretoken_gpu::plan::vocabulary::MAX_TOP_K;
use foretoken_kernels::Isa;
use foretoken_kernels::activation::soft_cap;

use super::Device;
use super::buffer::Buffer;
use super::device_model::DeviceModel;
use super::experts::DeviceExperts;
use super::matrix::Matrices;
use super::ops::DeviceOps;
use super::outputs::{DraftOutputs, IdsAndScores};
use super::recurrent::DeviceDeltaNet;
use super::weights::{DeviceCentroidHead, DeviceEmbedding, DeviceNorm, DeviceRotary};
use crate::checkpoint::WeightUse;
use crate::gemma4::{AssistantModel, Head};
use crate::nn::{CentroidHead, DeltaNet, Embedding, Experts, Linear, RmsNorm, Rotary, Weight};
use crate::ops::Destination;
use crate::{Error, Result};

/// A target and its assistant, if any, on a device.
pub(super) struct LoadedModels {
    pub device: Arc<dyn Device>,
    pub target: Box<dyn DeviceModel>,
    pub assistant: Option<DeviceAssistant>,
    pub suppressed: Option<Buffer<u32>>, // never chosen
}

/// An assistant on a device.
pub(super) struct DeviceAssistant {
    pub model: AssistantModel<DeviceOps>,
    pub donors: Vec<usize>, // for each layer, the target layer whose K and V it reads
}

impl LoadedModels {
    /// Width of the target's hidden states.
    pub fn hidden_size(&self) -> usize {
        self.target.hidden_size()
    }

    /// Applies the soft cap of the target's logits, if there is one.
    pub fn soft_cap(&self, logits: &mut [f32]) {
        if let Some(cap) = self.target.soft_cap() {
            soft_cap(Isa::best(), logits, cap);
        }
    }

    /// The ids that are never chosen.
    pub fn suppressed(&self) -> Option<DeviceSlice<u32>> {
        self.suppressed.as_ref().map(Buffer::slice)
    }
}

impl DeviceAssistant {
    /// Memory for the results of draft steps of `rows` rows, for a target whose hidden states have `backbone` channels.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn outputs(&self, device: &dyn Device, rows: usize, backbone: usize) -> Result<DraftOutputs> {
        let (groups, scores) = match &self.model.head {
            Head::Dense(head) => (1, head.outputs()),
            Head::Centroids(head) => (head.top_k, head.top_k * head.table.outputs()),
        };
        DraftOutputs::new(device, rows, backbone, groups, scores)
    }

    /// The last step's scores of row `row`.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn read_scores(&self, outputs: &DraftOutputs, row: usize) -> Result<IdsAndScores> {
        match &self.model.head {
            Head::Dense(head) => Ok((None, outputs.read_scores(row, head.outputs())?)),
            Head::Centroids(head) => {
                let (best, len) = (head.top_k, head.table.outputs());
                let groups = outputs.groups.read(row * best, best)?;
                let ids = groups.iter().flat_map(|group| {
                    let start = *group as usize * len;
                    head.token_ordering.get(start..start + len).unwrap_or_default()
                });
                Ok((Some(ids.copied().collect()), outputs.read_scores(row, best * len)?))
            }
        }
    }
}

/// Checks the width of the heads of layers, which are given by index.
///
/// # Errors
/// If a layer's heads have another width.
pub(crate) fn check_head_dims(device: &dyn Device, heads: impl IntoIterator<Item = (usize, usize)>) -> Result<()> {
    let Some((i, head_dim)) = heads.into_iter().find(|(_, head_dim)| !HEAD_DIMS.contains(head_dim)) else {
        return Ok(());
    };
    let problem = format!("no kernels for heads of {head_dim}; supported are 32, 64, 128, 256 and 512; use the CPU");
    let problem = format!("tensor layers.{i}.self_attn.q_proj.weight: {problem}");
    Err(Error::Device { device: device.name(), problem })
}

/// Rows of a delta net's log, unless a round has more rows of which some may be rejected.
const LOG_ROWS: usize = 16;

/// A device, to which modules are copied as they are loaded.
pub(crate) struct DeviceDestination<'a>(pub &'a dyn Device);

impl DeviceDestination<'_> {
    fn matrices(&self, weight: &Weight) -> Result<Arc<Matrices>> {
        Matrices::upload(self.0, weight).map(Arc::new)
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Device { device: self.0.name(), problem: format!("{problem}; use the CPU") }
    }
}

impl Destination for DeviceDestination<'_> {
    type Ops = DeviceOps;

    fn weight_use(&self) -> WeightUse {
        WeightUse::Upload
    }

    fn linear(&self, from: Linear) -> Result<Arc<Matrices>> {
        self.matrices(from.weight())
    }

    fn norm(&self, from: RmsNorm) -> Result<DeviceNorm> {
        let weight = from.weight().map(|weight| Buffer::of(self.0, weight)).transpose()?;
        Ok(DeviceNorm { weight, width: from.width(), eps: from.eps() })
    }

    fn embedding(&self, from: Embedding) -> Result<DeviceEmbedding> {
        Ok(DeviceEmbedding { table: self.matrices(from.weight())?, scale: from.scale() })
    }

    fn tied_head(&self, table: &DeviceEmbedding) -> Arc<Matrices> {
        table.table.clone()
    }

    fn rotary(&self, from: Rotary) -> Result<DeviceRotary> {
        let (frequencies, pairing) = (from.inverse_frequencies(), from.pairing());
        if !has_pairing(pairing, frequencies.len()) {
            return Err(self.refuse(format!("{} rotary pairs of leading channels", frequencies.len())));
        }
        Ok(DeviceRotary { frequencies: Arc::new(Buffer::of(self.0, frequencies)?), pairing })
    }

    fn experts(&self, from: Experts) -> Result<DeviceExperts> {
        let (count, top_k) = (from.per_expert_scale.len(), from.top_k);
        if count > MAX_EXPERTS || top_k > MAX_EXPERTS_PER_ROW {
            let most = format!("supported are at most {MAX_EXPERTS_PER_ROW} of {MAX_EXPERTS}");
            return Err(self.refuse(format!("{top_k} of {count} experts; {most}")));
        }
        Ok(DeviceExperts {
            gate_up_proj: Matrices::upload(self.0, &from.gate_up_proj)?,
            down_proj: Matrices::upload(self.0, &from.down_proj)?,
            per_expert_scale: Buffer::of(self.0, &from.per_expert_scale)?,
            top_k,
            gate: from.gate,
        })
    }

    fn delta_net(&self, from: DeltaNet) -> Result<DeviceDeltaNet> {
        let dims = &from.dims;
        let shape = Shape {
            key_heads: dims.num_key_heads,
            value_heads: dims.num_value_heads,
            key_dim: dims.key_head_dim,
            value_dim: dims.value_head_dim,
            order: from.order,
            taps: dims.conv_kernel_dim,
            log_rows: LOG_ROWS.max(dims.conv_kernel_dim),
        };
        shape.check().map_err(|problem| self.refuse(problem.to_string()))?;
        let rate: Vec<f32> = from.rate.iter().map(|rate| *rate as f32).collect();
        Ok(DeviceDeltaNet {
            shape,
            conv: Buffer::of(self.0, &from.conv_weight)?,
            dt_bias: Buffer::of(self.0, &from.dt_bias)?,
            rate: Buffer::of(self.0, &rate)?,
        })
    }

    fn centroid_head(&self, from: CentroidHead) -> Result<DeviceCentroidHead> {
        let count = from.table.count();
        if count > MAX_TOP_K {
            return Err(self.refuse(format!("an assistant with {count} centroids; supported are at most {MAX_TOP_K}")));
        }
        Ok(DeviceCentroidHead {
            centroids: self.linear(from.centroids)?,
            table: self.matrices(&from.table)?,
            ordering: Buffer::of(self.0, &from.token_ordering)?,
            token_ordering: from.token_ordering,
            top_k: from.top_k,
        })
    }
}
