//! [`Ops`] on a device: each operation is one launch or a few.

use std::sync::Arc;

use foretoken_gpu::DeviceSlice;
use foretoken_gpu::plan::matmul::Buckets;
use foretoken_gpu::plan::pointwise::{Strided, gelu_gate, rms_norm};
use foretoken_gpu::plan::rows::HeadNorm;
use foretoken_gpu::plan::vocabulary::{self, Grouped, top_k};

use super::experts::DeviceExperts;
use super::kv::Projection;
use super::outputs::{DraftOutputs, TargetOutputs};
use super::positions::{DeviceAngles, PassKv};
use super::temporaries::{Temporaries, Temporary};
use super::{Buffer, Input, Launcher, Matrices, subslice};
use crate::ops::{Heads, Ops};
use crate::{Error, Result};

/// Launches of one sequence's passes, and the memory of their results.
pub(crate) struct DeviceOps {
    pub(super) launcher: Launcher,
    pub(super) temporaries: Arc<Temporaries>,
    pub(super) outputs: Arc<TargetOutputs>,
    pub(super) draft: Option<Arc<DraftOutputs>>,
}

/// `f32` `(rows, width)`.
#[derive(Clone)]
pub(crate) struct DeviceTensor {
    pub(super) slice: DeviceSlice<f32>,
    pub(super) rows: usize,
    pub(super) width: usize,
    stride: usize,                        // elements from row to row
    _memory: Option<Arc<Temporary<f32>>>, // `None`: it belongs to the sequence
}

/// A root-mean-square norm.
pub(crate) struct DeviceNorm {
    pub(super) weight: Option<Buffer<f32>>, // (width)
    pub(super) width: usize,
    pub(super) eps: f32,
}

/// A table and the factor of its rows.
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
    // Buckets of one row: one per chosen centroid.
    pub(super) starts: Buffer<i32>,
    pub(super) count: Buffer<i32>,
    pub(super) row: Buffer<i32>,
}

/// The hidden state of a draft step: the second half of a drafter's input `(1, 2 * width)`, whose first half the next
/// step's embedding fills.
#[derive(Clone, Copy)]
pub(crate) struct DraftState {
    pub(super) input: DeviceSlice<f32>,
}

impl DeviceOps {
    /// The same memory, with another launcher.
    pub(super) fn with(&self, launcher: Launcher) -> Self {
        let (temporaries, outputs, draft) = (self.temporaries.clone(), self.outputs.clone(), self.draft.clone());
        Self { launcher, temporaries, outputs, draft }
    }

    pub(super) fn new_tensor(&self, rows: usize, width: usize) -> Result<DeviceTensor> {
        let memory = self.temporaries.take(rows * width)?;
        Ok(DeviceTensor { slice: memory.slice(), rows, width, stride: width, _memory: Some(Arc::new(memory)) })
    }

    fn normed(
        &self,
        norm: &DeviceNorm,
        x: &DeviceTensor,
        add_to: Option<(DeviceSlice<f32>, f32)>,
        y: DeviceSlice<f32>,
    ) -> Result<()> {
        let shape = (x.rows * x.width / norm.width.max(1), norm.width);
        self.launcher.run(rms_norm(x.slice, shape, norm.weight(), norm.eps, add_to, y))
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
        let y = self.new_tensor(ids.len(), table.table.inputs())?;
        table.table.embed_rows(&self.launcher, ids, table.scale, y.slice)?;
        Ok(y)
    }

    fn project<const N: usize>(&self, layers: [&Arc<Matrices>; N], x: &DeviceTensor) -> Result<[DeviceTensor; N]> {
        let input = Input::new(self, x);
        let mut products = Vec::with_capacity(N);
        for layer in layers {
            let y = self.new_tensor(x.rows, layer.outputs())?;
            layer.multiply(&input, y.slice)?;
            products.push(y);
        }
        products.try_into().map_err(|_| Error::argument("layers", "have no product each"))
    }

    fn norm(&self, norm: &DeviceNorm, x: &DeviceTensor) -> Result<DeviceTensor> {
        let y = self.new_tensor(x.rows, x.width)?;
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
        let y = self.new_tensor(x.rows, x.width)?;
        self.normed(norm, x, Some((residual.slice, scale)), y.slice)?;
        Ok(y)
    }

    fn gelu_gate(&self, gate: &DeviceTensor, up: &DeviceTensor) -> Result<DeviceTensor> {
        let y = self.new_tensor(gate.rows, gate.width)?;
        self.launcher.run(gelu_gate(gate.strided(), up.strided(), (gate.rows, gate.width), y.slice))?;
        Ok(y)
    }

    fn rows(&self, x: &DeviceTensor, rows: &[usize]) -> Result<DeviceTensor> {
        let first = rows.first().copied().unwrap_or(0);
        if !rows.iter().copied().eq(first..first + rows.len()) {
            return Err(Error::argument("rows", format!("{rows:?} are not contiguous; a device needs them so")));
        }
        Ok(x.some_rows(first, rows.len()))
    }

    fn columns(&self, x: &DeviceTensor, start: usize, width: usize) -> Result<DeviceTensor> {
        Ok(DeviceTensor { slice: subslice(x.slice, start, x.slice.len()), width, ..x.clone() })
    }

    fn experts(&self, experts: &DeviceExperts, scores: &DeviceTensor, x: &DeviceTensor) -> Result<DeviceTensor> {
        experts.forward(self, scores, x)
    }

    fn angles(&self, rotary: &Buffer<f32>, kv: &PassKv<'_>) -> Result<DeviceAngles> {
        kv.angles(self, rotary.slice())
    }

    fn narrow(&self, kv: &mut PassKv<'_>, rows: &[usize]) -> Result<()> {
        kv.narrow(self, rows.len())
    }

    fn append(&self, kv: &mut PassKv<'_>, layer: usize, k: Heads<'_, Self>, v: Heads<'_, Self>) -> Result<()> {
        kv.kv.append(&self.launcher, kv.donor(layer), (k.projection(), v.projection()), &kv.positions)
    }

    fn attend(&self, kv: &PassKv<'_>, layer: usize, q: Heads<'_, Self>) -> Result<DeviceTensor> {
        let heads = q.x.width / q.norm.width.max(1);
        let y = self.new_tensor(q.x.rows, q.x.width)?;
        kv.kv.attend(self, kv.donor(layer), (q.projection(), heads), &kv.positions, y.slice)?;
        Ok(y)
    }

    fn final_norm(&self, norm: &DeviceNorm, x: &DeviceTensor) -> Result<DeviceTensor> {
        let y = DeviceTensor::of_sequence(self.outputs.hidden.slice(), x.rows, x.width);
        self.normed(norm, x, None, y.slice)?;
        Ok(y)
    }

    fn logits(&self, head: &Arc<Matrices>, hidden: &DeviceTensor, _: Option<f32>) -> Result<DeviceTensor> {
        let y = DeviceTensor::of_sequence(self.outputs.logits.slice(), hidden.rows, head.outputs());
        head.multiply(&Input::new(self, hidden), y.slice)?;
        Ok(y)
    }

    fn embed_beside(&self, table: &DeviceEmbedding, id: DeviceSlice<u32>, state: &DraftState) -> Result<DeviceTensor> {
        let width = table.table.inputs();
        table.table.embed_rows(&self.launcher, id, table.scale, subslice(state.input, 0, width))?;
        Ok(DeviceTensor::of_sequence(state.input, 1, 2 * width))
    }

    fn next_state(&self, layer: &Arc<Matrices>, x: &DeviceTensor) -> Result<DraftState> {
        let state = self.draft()?.next_state();
        let width = layer.outputs();
        layer.multiply(&Input::new(self, x), subslice(state.input, width, width))?;
        Ok(state)
    }

    fn scores(&self, head: &Arc<Matrices>, x: &DeviceTensor) -> Result<vocabulary::Scores> {
        let scores = self.draft()?.dense_scores(head);
        head.multiply(&Input::new(self, x), scores.x)?;
        Ok(scores)
    }

    fn centroid_scores(&self, head: &DeviceCentroidHead, x: &DeviceTensor) -> Result<vocabulary::Scores> {
        let (count, best, outputs) = (head.centroids.outputs(), head.top_k, self.draft()?);
        let ranks = self.new_tensor(1, count)?;
        let (input, groups) = (Input::new(self, x), outputs.groups.slice());
        head.centroids.multiply(&input, ranks.slice)?;
        self.launcher.run(top_k((ranks.slice, count), (groups, best)))?;
        let lists = Buckets {
            matrices: groups,
            starts: head.starts.slice(),
            count: head.count.slice(),
            rows: Some(head.row.slice()),
        };
        let scores = outputs.centroid_scores(head);
        head.table.multiply_buckets(&input, &lists, (best, best), scores.x)?;
        Ok(scores)
    }
}

impl DeviceTensor {
    /// Memory of the sequence, at a constant address.
    fn of_sequence(slice: DeviceSlice<f32>, rows: usize, width: usize) -> Self {
        Self { slice: subslice(slice, 0, rows * width), rows, width, stride: width, _memory: None }
    }

    /// `rows` rows from `first` on.
    pub(super) fn some_rows(&self, first: usize, rows: usize) -> Self {
        let len = if self.stride == self.width { rows * self.width } else { self.slice.len() };
        Self { slice: subslice(self.slice, first * self.stride, len), rows, ..self.clone() }
    }

    pub(super) fn strided(&self) -> Strided {
        Strided { slice: self.slice, stride: self.stride }
    }
}

impl DeviceNorm {
    fn weight(&self) -> Option<DeviceSlice<f32>> {
        self.weight.as_ref().map(Buffer::slice)
    }
}

impl Heads<'_, DeviceOps> {
    fn projection(&self) -> Projection {
        let norm = HeadNorm { weight: self.norm.weight(), eps: self.norm.eps };
        Projection { x: self.x.slice, norm, rotary: self.angles.and_then(DeviceAngles::rotary) }
    }
}

impl DeviceCentroidHead {
    /// Scores of the groups in `groups`.
    pub(super) fn grouped(&self, groups: DeviceSlice<i32>) -> Grouped {
        Grouped { groups, ordering: self.ordering.slice(), len: self.table.outputs() }
    }
}
