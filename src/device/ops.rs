//! [`Ops`] on a device: each operation is one launch or a few.

use std::sync::Arc;

use foretoken_gpu::plan::delta_net::{self, Layer, Projected};
use foretoken_gpu::plan::experts;
use foretoken_gpu::plan::pointwise::{self, GateNorm, Strided, TableType, embed, normed_silu_gate, rms_norm};
use foretoken_gpu::plan::positions::keep_rows;
use foretoken_gpu::plan::rows::HeadNorm;
use foretoken_gpu::plan::vocabulary::{self, top_k};
use foretoken_gpu::{DeviceSlice, MAX_BLOCKS};
use foretoken_kernels::ElementType;

use super::buffer::{Buffer, subslice};
use super::experts::DeviceExperts;
use super::kv::Projection;
use super::launcher::Launcher;
use super::matrix::{Input, Matrices};
use super::outputs::{DraftOutputs, TargetOutputs};
use super::positions::{DeviceAngles, PassKv, PassSegments};
use super::queue::{DeviceTensor, Queue};
use super::recurrent::{DeltaNets, DeviceDeltaNet};
use super::states::{StateInputs, copy};
use super::weights::{DeviceCentroidHead, DeviceEmbedding, DeviceNorm, DeviceRotary};
use crate::nn::Gate;
use crate::ops::{DeltaNetInputs, Heads, Ops, SharedExpert};
use crate::{Error, Result};

/// Launches of passes, and the memory of their results.
pub(crate) struct DeviceOps {
    pub(super) queue: Queue,
    pub(super) outputs: Arc<TargetOutputs>,
    pub(super) draft: Option<Arc<DraftOutputs>>,
    /// The rows with outputs in the current pass.
    pub(super) output_segments: Option<PassSegments>,
    /// Receives the hidden states of all rows of the current pass; `None`: only rows with outputs have them.
    pub(super) all_states: Option<Arc<Buffer<f32>>>,
    /// `None`: rows are tokens alone.
    pub(super) inputs: Option<Arc<StateInputs>>,
}

impl DeviceOps {
    /// The same memory, with another launcher.
    pub(super) fn with(&self, launcher: Launcher) -> Self {
        Self {
            queue: Queue { launcher, partial_bytes: self.queue.partial_bytes },
            outputs: self.outputs.clone(),
            draft: self.draft.clone(),
            output_segments: self.output_segments.clone(),
            all_states: self.all_states.clone(),
            inputs: self.inputs.clone(),
        }
    }

    /// The hidden states beside the tokens of a pass of `rows` rows: `(rows, hidden)`.
    ///
    /// # Errors
    /// If its rows are tokens alone.
    pub(crate) fn states(&self, rows: usize) -> Result<DeviceTensor> {
        let inputs = self.inputs()?;
        Ok(DeviceTensor::of_outputs(inputs.states.slice(), rows, inputs.width))
    }

    fn inputs(&self) -> Result<&StateInputs> {
        self.inputs.as_deref().ok_or_else(|| Error::argument("hidden", "is missing, but the model reads hidden states"))
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
        self.draft.as_deref().ok_or_else(no_assistant)
    }
}

pub(super) fn no_assistant() -> Error {
    Error::argument("speculation", "needs an assistant; load one, or turn speculation off")
}

impl Ops for DeviceOps {
    type Linear = Arc<Matrices>;
    type Norm = DeviceNorm;
    type Embedding = DeviceEmbedding;
    type Rotary = DeviceRotary;
    type Experts = DeviceExperts;
    type DeltaNet = DeviceDeltaNet;
    type CentroidHead = DeviceCentroidHead;
    type Tensor = DeviceTensor;
    type State = DeviceSlice<f32>; // a drafter's input: `DraftOutputs::input`
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

    fn add(&self, residual: &DeviceTensor, x: &DeviceTensor) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(x.rows, x.width)?;
        self.queue.launcher.run(pointwise::add(residual.slice, x.slice, (x.rows, x.width), y.slice))?;
        Ok(y)
    }

    fn gate(&self, function: Gate, gate: &DeviceTensor, up: &DeviceTensor) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(gate.rows, gate.width)?;
        let shape = (gate.rows, gate.width);
        self.queue.launcher.run(pointwise::gate(function, gate.strided(), up.strided(), shape, y.slice))?;
        Ok(y)
    }

    fn gated_norm(&self, norm: &DeviceNorm, gate: &DeviceTensor, x: &DeviceTensor) -> Result<DeviceTensor> {
        let Some(weight) = norm.weight().filter(|_| GateNorm::supports(norm.width)) else {
            return self.gate(Gate::Silu, gate, &self.norm(norm, x)?);
        };
        let y = self.queue.new_tensor(x.rows, x.width)?;
        let norm = GateNorm { weight, head: norm.width, eps: norm.eps };
        let launch = normed_silu_gate(&norm, gate.strided(), x.strided(), (x.rows, x.width), y.slice);
        self.queue.launcher.run(launch)?;
        Ok(y)
    }

    fn head_gate(&self, queries: &DeviceTensor, x: &DeviceTensor, head_dim: usize) -> Result<DeviceTensor> {
        let y = self.queue.new_tensor(x.rows, x.width)?;
        let heads = x.width / head_dim.max(1);
        // A head is a row of the launch, whose number is limited.
        let at_once = (MAX_BLOCKS / heads.max(1)).max(1);
        for first in (0..x.rows).step_by(at_once) {
            let rows = at_once.min(x.rows - first);
            let [gate, up, y] = [queries, x, &y].map(|tensor| tensor.some_rows(first, rows).slice);
            let gate = Strided { slice: subslice(gate, head_dim, gate.len()), stride: 2 * head_dim };
            let (up, shape) = (Strided { slice: up, stride: head_dim }, (rows * heads, head_dim));
            self.queue.launcher.run(pointwise::gate(Gate::Sigmoid, gate, up, shape, y))?;
        }
        Ok(y)
    }

    fn rows(&self, x: &DeviceTensor, rows: &[usize]) -> Result<DeviceTensor> {
        let first = rows.first().copied().unwrap_or(0);
        // A recorded pass is replayed for other numbers of rows of several sequences.
        let is_fixed = rows.len() == x.rows || self.output_segments.as_ref().is_none_or(|of| of.segments.count < 2);
        if is_fixed && rows.iter().copied().eq(first..first + rows.len()) {
            return Ok(x.some_rows(first, rows.len()));
        }
        let outputs = self.output_segments.as_ref().filter(|of| of.rows() == rows.len() && x.is_contiguous());
        let Some(outputs) = outputs else {
            return Err(Error::argument("rows", format!("{rows:?} are not those with outputs")));
        };
        let y = self.queue.new_tensor(rows.len(), x.width)?;
        self.queue.launcher.run(keep_rows(&outputs.segments, (x.slice, x.rows), (y.slice, y.rows), x.width))?;
        Ok(y)
    }

    fn columns(&self, x: &DeviceTensor, start: usize, width: usize) -> Result<DeviceTensor> {
        Ok(x.some_columns(start, width))
    }

    fn concat_columns(&self, left: &DeviceTensor, right: &DeviceTensor) -> Result<DeviceTensor> {
        let (rows, width) = (left.rows, left.width + right.width);
        let y = self.queue.new_tensor(rows, width)?;
        let order = subslice(self.inputs()?.order.slice(), 0, rows);
        for (x, start) in [(left, 0), (right, left.width)] {
            // A lookup of all rows, in order.
            let (table_type, shape) = (TableType::Float(ElementType::F32), (x.rows, x.width));
            let y = Strided { slice: subslice(y.slice, start, y.slice.len()), stride: width };
            self.queue.launcher.run(embed(table_type, x.slice.cast(), shape, (order, rows), 1.0, y))?;
        }
        Ok(y)
    }

    fn experts(
        &self,
        experts: &DeviceExperts,
        scores: &DeviceTensor,
        x: &DeviceTensor,
        shared: Option<SharedExpert<'_, Self>>,
    ) -> Result<DeviceTensor> {
        let shared = shared.map(|shared| experts::SharedExpert { x: shared.x.slice, gate: shared.gate.slice });
        experts.forward(&self.queue, scores, x, shared)
    }

    fn angles(&self, rotary: &DeviceRotary, kv: &PassKv<'_>) -> Result<DeviceAngles> {
        kv.angles(&self.queue, rotary)
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
        let heads = q.x.width / q.stride.max(1);
        let y = self.queue.new_tensor(q.x.rows, heads * q.head_dim)?;
        kv.stores.plan.attend(&self.queue, kv.donor(layer), q.projection(), heads, &kv.rows, y.slice)?;
        Ok(y)
    }

    fn delta_net(
        &self,
        net: &DeviceDeltaNet,
        from: DeltaNetInputs<'_, Self>,
        kv: &mut PassKv<'_>,
        index: usize,
    ) -> Result<DeviceTensor> {
        let missing = || Error::argument("state", "is another model's: it has no delta nets");
        let states = kv.states.ok_or_else(missing)?;
        let (DeltaNets { shape, layers }, rows, launcher) = (states.nets, kv.rows.rows, &self.queue.launcher);
        let inputs = states.has_whole.then(|| self.queue.new_tensor(rows, shape.row_len())).transpose()?;
        let inputs = inputs.as_ref().map(|inputs| inputs.slice);
        let layer = Layer { shape, index, layers, segments: kv.rows.segments, rows, inputs };
        let projected = Projected { qkv: from.qkv.slice, a: from.a.slice, b: from.b.slice };
        launcher.run(delta_net::inputs(&layer, kv.rows.places, &net.weights(), &projected))?;
        let y = self.queue.new_tensor(rows, shape.value_heads * shape.value_dim)?;
        launcher.run(delta_net::delta_rule(&layer, y.slice))?;
        Ok(y)
    }

    fn final_norm(&self, norm: &DeviceNorm, x: &DeviceTensor) -> Result<DeviceTensor> {
        let to = self.all_states.as_deref().unwrap_or(&self.outputs.hidden);
        let y = DeviceTensor::of_outputs(to.slice(), x.rows, x.width);
        self.normed(norm, x, None, y.slice)?;
        Ok(y)
    }

    fn logits(&self, head: &Arc<Matrices>, hidden: &DeviceTensor, _: Option<f32>) -> Result<DeviceTensor> {
        let y = DeviceTensor::of_outputs(self.outputs.logits.slice(), hidden.rows, head.outputs());
        if self.all_states.is_some() {
            if hidden.rows == 0 {
                return Ok(y);
            }
            let to = subslice(self.outputs.hidden.slice(), 0, hidden.slice.len());
            copy(&self.queue.launcher, hidden.slice, to)?;
        }
        head.multiply(&Input::new(&self.queue, hidden), y.slice)?;
        Ok(y)
    }

    fn embed_concat(
        &self,
        table: &DeviceEmbedding,
        ids: DeviceSlice<u32>,
        state: &DeviceSlice<f32>,
    ) -> Result<DeviceTensor> {
        let width = table.table.inputs();
        let y = Strided { slice: *state, stride: 2 * width };
        table.table.embed_rows(&self.queue.launcher, ids, table.scale, y)?;
        Ok(DeviceTensor::of_outputs(*state, ids.len(), 2 * width))
    }

    fn next_state(&self, layer: &Arc<Matrices>, x: &DeviceTensor) -> Result<DeviceSlice<f32>> {
        let outputs = self.draft()?;
        layer.multiply(&Input::new(&self.queue, x), outputs.hidden.slice())?;
        Ok(outputs.input.slice())
    }

    fn scores(&self, head: &Arc<Matrices>, x: &DeviceTensor) -> Result<vocabulary::Scores> {
        let scores = self.draft()?.scores(x.rows, head.outputs(), None);
        head.multiply(&Input::new(&self.queue, x), scores.x)?;
        Ok(scores)
    }

    fn centroid_scores(&self, head: &DeviceCentroidHead, x: &DeviceTensor) -> Result<vocabulary::Scores> {
        let (count, best, outputs) = (head.centroids.outputs(), head.top_k, self.draft()?);
        let ranks = self.queue.new_tensor(x.rows, count)?;
        let input = Input::new(&self.queue, x);
        head.centroids.multiply(&input, ranks.slice)?;
        self.queue.launcher.run(top_k(ranks.slice, x.rows, count, outputs.groups.slice(), best))?;
        let grouped = head.grouped(outputs.groups.slice());
        let scores = outputs.scores(x.rows, best * grouped.len, Some(grouped));
        head.table.multiply_buckets(&input, &outputs.buckets(x.rows, best), scores.x)?;
        Ok(scores)
    }
}

impl Heads<'_, DeviceOps> {
    fn projection(&self) -> Projection {
        let norm = self.norm.map(|norm| HeadNorm { weight: norm.weight(), eps: norm.eps });
        let rotary = self.angles.and_then(DeviceAngles::rotary);
        Projection { x: self.x.slice, stride: self.stride, norm, rotary }
    }
}
