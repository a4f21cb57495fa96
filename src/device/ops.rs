//! [`Ops`] on a device: each operation is one launch or a few.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::pointwise::{self, Gate, Strided, rms_norm};
use foretoken_gpu::plan::positions::keep_rows;
use foretoken_gpu::plan::rows::HeadNorm;
use foretoken_gpu::plan::vocabulary::{self, top_k};

use super::buffer::Buffer;
use super::experts::DeviceExperts;
use super::kv::Projection;
use super::launcher::Launcher;
use super::matrix::{Input, Matrices};
use super::outputs::{DraftOutputs, DraftState, TargetOutputs};
use super::positions::{DeviceAngles, PassKv, PassSegments};
use super::queue::{DeviceTensor, Queue};
use super::weights::{DeviceCentroidHead, DeviceEmbedding, DeviceNorm};
use crate::ops::{Heads, Ops};
use crate::{Error, Result};

/// Launches of passes, and the memory of their results.
pub(crate) struct DeviceOps {
    pub(super) queue: Queue,
    pub(super) outputs: Arc<TargetOutputs>,
    pub(super) draft: Option<Arc<DraftOutputs>>,
    /// The rows with outputs in the current pass.
    pub(super) kept: Option<PassSegments>,
}

impl DeviceOps {
    /// The same memory, with another launcher.
    pub(super) fn with(&self, launcher: Launcher) -> Self {
        let queue = Queue { launcher, temporaries: self.queue.temporaries.clone() };
        Self { queue, outputs: self.outputs.clone(), draft: self.draft.clone(), kept: self.kept.clone() }
    }

    fn normed(
        &self,
        norm: &DeviceNorm,
        x: &DeviceTensor,
        add_to: Option<(DeviceSlice<f32>, f32)>,
        y: DeviceSlice<f32>,
    ) -> Result<()> {
        let shape = (x.rows * x.width / norm.width.max(1), norm.width);
        self.queue.launcher.run(rms_norm(x.slice, shape, norm.weight(), norm.eps, add_to, y))
    }

    fn draft(&self) -> Result<&DraftOutputs> {
        let missing = || Error::argument("speculation", "needs an assistant; load one, or turn speculation off");
        self.draft.as_deref().ok_or_else(missing)
    }
}

impl Ops for DeviceOps {
    type Linear = Arc<Matrices>;
    type Norm = DeviceNorm;
    type Embedding = DeviceEmbedding;
    type Rotary = Buffer<f32>; // inverse frequencies
    type Experts = DeviceExperts;
    type CentroidHead = DeviceCentroidHead;
    type Tensor = DeviceTensor;
    type State = DraftState;
    type Angles = DeviceAngles;
    type Scores = vocabulary::Scores;
    type Ids<'a> = DeviceSlice<u32>;
    type Kv<'a> = PassKv<'a>;

    fn embed(&self, table: &DeviceEmbedding, ids: DeviceSlice<u32>) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(ids.len(), table.table.inputs())?;
        table.table.embed_rows(&self.queue.launcher, ids, table.scale, y.strided())?;
        Ok(y)
    }

    fn project<const N: usize>(&self, layers: [&Arc<Matrices>; N], x: &DeviceTensor) -> Result<[DeviceTensor; N]> {
        let input = Input::new(&self.queue, x);
        let mut products = Vec::with_capacity(N);
        for layer in layers {
            let y = self.queue.new_tensor(x.rows, layer.outputs())?;
            layer.multiply(&input, y.slice)?;
            products.push(y);
        }
        products.try_into().map_err(|_| Error::argument("layers", "must have one product each"))
    }

    fn norm(&self, norm: &DeviceNorm, x: &DeviceTensor) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(x.rows, x.width)?;
        self.normed(norm, x, None, y.slice)?;
        Ok(y)
    }

    fn add_norm(
        &self,
        norm: &DeviceNorm,
        residual: &DeviceTensor,
        x: &DeviceTensor,
        scale: f32,
    ) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(x.rows, x.width)?;
        self.normed(norm, x, Some((residual.slice, scale)), y.slice)?;
        Ok(y)
    }

    fn gelu_gate(&self, gate: &DeviceTensor, up: &DeviceTensor) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(gate.rows, gate.width)?;
        let shape = (gate.rows, gate.width);
        self.queue.launcher.run(pointwise::gate(Gate::GeluTanh, gate.strided(), up.strided(), shape, y.slice))?;
        Ok(y)
    }

    fn rows(&self, x: &DeviceTensor, rows: &[usize]) -> Result<DeviceTensor> {
        let first = rows.first().copied().unwrap_or(0);
        if rows.iter().copied().eq(first..first + rows.len()) {
            return Ok(x.some_rows(first, rows.len()));
        }
        let kept = self.kept.as_ref().filter(|kept| kept.rows() == rows.len() && x.is_contiguous());
        let Some(kept) = kept else {
            return Err(Error::argument("rows", format!("{rows:?} are not those with outputs")));
        };
        let y = self.queue.new_tensor(rows.len(), x.width)?;
        self.queue.launcher.run(keep_rows(&kept.segments, (x.slice, x.rows), (y.slice, y.rows), x.width))?;
        Ok(y)
    }

    fn columns(&self, x: &DeviceTensor, start: usize, width: usize) -> Result<DeviceTensor> {
        Ok(x.some_columns(start, width))
    }

    fn experts(&self, experts: &DeviceExperts, scores: &DeviceTensor, x: &DeviceTensor) -> Result<DeviceTensor> {
        experts.forward(&self.queue, scores, x)
    }

    fn angles(&self, rotary: &Buffer<f32>, kv: &PassKv<'_>) -> Result<DeviceAngles> {
        kv.angles(&self.queue, rotary.slice())
    }

    fn narrow(&self, kv: &mut PassKv<'_>, _: &[usize]) -> Result<()> {
        kv.narrow(&self.queue)
    }

    fn append(&self, kv: &mut PassKv<'_>, layer: usize, k: Heads<'_, Self>, v: Heads<'_, Self>) -> Result<()> {
        let PassKv { stores, rows, .. } = &*kv;
        let projections = (k.projection(), v.projection());
        stores.plan.append(&self.queue, kv.donor(layer), projections, rows, (&stores.tables, stores.faults))
    }

    fn attend(&self, kv: &PassKv<'_>, layer: usize, q: Heads<'_, Self>) -> Result<DeviceTensor> {
        let heads = q.x.width / q.norm.width.max(1);
        let y = self.queue.new_tensor(q.x.rows, q.x.width)?;
        kv.stores.plan.attend(&self.queue, kv.donor(layer), (q.projection(), heads), &kv.rows, y.slice)?;
        Ok(y)
    }

    fn final_norm(&self, norm: &DeviceNorm, x: &DeviceTensor) -> Result<DeviceTensor> {
        let y = DeviceTensor::of_outputs(self.outputs.hidden.slice(), x.rows, x.width);
        self.normed(norm, x, None, y.slice)?;
        Ok(y)
    }

    fn logits(&self, head: &Arc<Matrices>, hidden: &DeviceTensor, _: Option<f32>) -> Result<DeviceTensor> {
        let y = DeviceTensor::of_outputs(self.outputs.logits.slice(), hidden.rows, head.outputs());
        head.multiply(&Input::new(&self.queue, hidden), y.slice)?;
        Ok(y)
    }

    fn embed_beside(&self, table: &DeviceEmbedding, ids: DeviceSlice<u32>, state: &DraftState) -> Result<DeviceTensor> {
        let width = table.table.inputs();
        let y = Strided { slice: state.input, stride: 2 * width };
        table.table.embed_rows(&self.queue.launcher, ids, table.scale, y)?;
        Ok(DeviceTensor::of_outputs(state.input, ids.len(), 2 * width))
    }

    fn next_state(&self, layer: &Arc<Matrices>, x: &DeviceTensor) -> Result<DraftState> {
        let outputs = self.draft()?;
        layer.multiply(&Input::new(&self.queue, x), outputs.hidden.slice())?;
        Ok(DraftState { input: outputs.input.slice() })
    }

    fn scores(&self, head: &Arc<Matrices>, x: &DeviceTensor) -> Result<vocabulary::Scores> {
        let scores = self.draft()?.dense_scores(head, x.rows);
        head.multiply(&Input::new(&self.queue, x), scores.x)?;
        Ok(scores)
    }

    fn centroid_scores(&self, head: &DeviceCentroidHead, x: &DeviceTensor) -> Result<vocabulary::Scores> {
        let (count, best, outputs) = (head.centroids.outputs(), head.top_k, self.draft()?);
        let ranks = self.queue.new_tensor(x.rows, count)?;
        let input = Input::new(&self.queue, x);
        head.centroids.multiply(&input, ranks.slice)?;
        self.queue.launcher.run(top_k((ranks.slice, x.rows, count), (outputs.groups.slice(), best)))?;
        let (scores, entries) = (outputs.centroid_scores(head, x.rows), x.rows * best);
        head.table.multiply_buckets(&input, &outputs.buckets(x.rows), (entries, entries), scores.x)?;
        Ok(scores)
    }
}

impl Heads<'_, DeviceOps> {
    fn projection(&self) -> Projection {
        let norm = HeadNorm { weight: self.norm.weight(), eps: self.norm.eps };
        Projection { x: self.x.slice, norm, rotary: self.angles.and_then(DeviceAngles::rotary) }
    }
}
