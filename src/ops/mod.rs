//! The operations that models are made of. A model is described once, generic over the backend: the CPU
//! ([`CpuOps`]) or a device ([`crate::device::DeviceOps`]).
//!
//! Activations are `f32` `(rows, width)`. Operations leave their inputs unchanged.

mod cpu;
mod mlp;

use crate::Result;
use crate::checkpoint::WeightUse;
use crate::nn::{CentroidHead, DeltaNet, Embedding, Experts, Gate, Linear, RmsNorm, Rotary};

pub(crate) use cpu::{CpuDestination, CpuOps};
pub(crate) use mlp::Mlp;

/// Heads before their norm and rotation: of every `stride` elements of `x` `(rows, heads * stride)` the first
/// `head_dim`. K and V are stored, and queries attend, after both; kernels may fuse the three.
pub(crate) struct Heads<'a, O: Ops> {
    pub x: &'a O::Tensor,
    pub head_dim: usize,
    pub stride: usize,
    pub norm: Option<&'a O::Norm>, // over head_dim
    pub angles: Option<&'a O::Angles>,
}

/// The shared expert, which all rows use.
pub(crate) struct SharedExpert<'a, O: Ops> {
    pub x: &'a O::Tensor,    // (rows, hidden): its results
    pub gate: &'a O::Tensor, // (rows, 1): its weight is the sigmoid
}

/// A delta net's inputs, from its projections.
pub(crate) struct DeltaNetInputs<'a, O: Ops> {
    pub qkv: &'a O::Tensor, // (rows, channels), before the convolution
    pub a: &'a O::Tensor,   // (rows, value heads): see `DeltaNet::gates`
    pub b: &'a O::Tensor,
}

impl<'a, O: Ops> Heads<'a, O> {
    /// Heads next to each other, with a norm.
    pub fn new(x: &'a O::Tensor, head_dim: usize, norm: &'a O::Norm, angles: Option<&'a O::Angles>) -> Self {
        Self { x, head_dim, stride: head_dim, norm: Some(norm), angles }
    }
}

/// Outputs of a target's pass: logits and hidden states, if any row has them, and taps.
pub(crate) struct PassOutput<O: Ops> {
    pub rows: Option<(O::Tensor, O::Tensor)>, // (rows, vocab) and (rows, hidden)
    pub taps: Vec<O::Tensor>,
}

/// Operations on activations and weights.
pub(crate) trait Ops: Sized {
    /// A matrix `(outputs, inputs)`.
    type Linear;
    /// A root-mean-square norm.
    type Norm;
    /// A table `(vocabulary, width)` with a scale.
    type Embedding;
    /// Rotary frequencies.
    type Rotary;
    /// Routed experts.
    type Experts;
    /// The convolution, gates and recurrence of a gated delta net.
    type DeltaNet;
    /// An output head that scores the tokens of a few centroids.
    type CentroidHead;
    /// Activations.
    type Tensor;
    /// The hidden states `(rows, width)` that a draft step continues.
    type State;
    /// Rotary angles of the rows that have queries.
    type Angles;
    /// Scores of the next token, for every row.
    type Scores;
    /// Token ids, one per row.
    type Ids<'a>: Copy;
    /// K and V of a pass, the recurrent states, and the positions of its rows.
    type Kv<'a>: ?Sized;

    /// The scaled rows of `ids`: `(ids, width)`.
    fn embed(&self, table: &Self::Embedding, ids: Self::Ids<'_>) -> Result<Self::Tensor>;

    /// `x W^T` for several matrices: `(rows, outputs)` each.
    fn project<const N: usize>(&self, layers: [&Self::Linear; N], x: &Self::Tensor) -> Result<[Self::Tensor; N]>;

    /// `x W^T`: `(rows, outputs)`.
    fn linear(&self, layer: &Self::Linear, x: &Self::Tensor) -> Result<Self::Tensor> {
        let [y] = self.project([layer], x)?;
        Ok(y)
    }

    /// `x W^T`, whose columns from `start` on are read in `rows` only, ascending: in other rows they may be any finite
    /// values. Default: all are computed.
    fn linear_narrowed(
        &self,
        layer: &Self::Linear,
        x: &Self::Tensor,
        start: usize,
        rows: &[usize],
    ) -> Result<Self::Tensor> {
        let _ = (start, rows);
        self.linear(layer, x)
    }

    /// `norm(x)`, over every group of consecutive elements as wide as the norm.
    fn norm(&self, norm: &Self::Norm, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// `(residual + norm(x)) * scale`.
    fn add_norm(
        &self,
        norm: &Self::Norm,
        residual: &Self::Tensor,
        x: &Self::Tensor,
        scale: f32,
    ) -> Result<Self::Tensor>;

    /// `residual + x`.
    fn add(&self, residual: &Self::Tensor, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// `f(gate) * up`.
    fn gate(&self, function: Gate, gate: &Self::Tensor, up: &Self::Tensor) -> Result<Self::Tensor>;

    /// `f(x G^T) * (x U^T)`, of equally shaped matrices: `(rows, outputs)`.
    fn gated(&self, function: Gate, gate: &Self::Linear, up: &Self::Linear, x: &Self::Tensor) -> Result<Self::Tensor> {
        let [gate, up] = self.project([gate, up], x)?;
        self.gate(function, &gate, &up)
    }

    /// `silu(gate) * norm(x)`, the norm over every group of consecutive elements as wide as it.
    fn gated_norm(&self, norm: &Self::Norm, gate: &Self::Tensor, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// `sigmoid(gate) * x`, head by head: the gate is the second half of the head in `queries`
    /// `(rows, heads * 2 * head_dim)`; `x` is `(rows, heads * head_dim)`.
    fn head_gate(&self, queries: &Self::Tensor, x: &Self::Tensor, head_dim: usize) -> Result<Self::Tensor>;

    /// Some rows of `x`, ascending. On a device they are contiguous, or all rows with outputs.
    fn rows(&self, x: &Self::Tensor, rows: &[usize]) -> Result<Self::Tensor>;

    /// Columns `start..start + width` of `x`.
    fn columns(&self, x: &Self::Tensor, start: usize, width: usize) -> Result<Self::Tensor>;

    /// The columns of `left`, then those of `right`: `(rows, left + right)`.
    fn concat_columns(&self, left: &Self::Tensor, right: &Self::Tensor) -> Result<Self::Tensor>;

    /// The weighted sum of the experts that `scores` `(rows, experts)` choose for `x` `(rows,
    /// hidden)`, and of a shared one: `(rows, hidden)`.
    fn experts(
        &self,
        experts: &Self::Experts,
        scores: &Self::Tensor,
        x: &Self::Tensor,
        shared: Option<SharedExpert<'_, Self>>,
    ) -> Result<Self::Tensor>;

    /// The angles of the rows that have queries.
    fn angles(&self, rotary: &Self::Rotary, kv: &Self::Kv<'_>) -> Result<Self::Angles>;

    /// Restricts the rest of the pass to queries of `rows`. On a device they are all rows with outputs.
    fn narrow(&self, kv: &mut Self::Kv<'_>, rows: &[usize]) -> Result<()>;

    /// Stores the K and V of layer `layer`.
    fn append(&self, kv: &mut Self::Kv<'_>, layer: usize, k: Heads<'_, Self>, v: Heads<'_, Self>) -> Result<()>;

    /// The attention of the queries over the K and V that layer `layer` reads: `(rows, heads * head_dim)`.
    fn attend(&self, kv: &Self::Kv<'_>, layer: usize, q: Heads<'_, Self>) -> Result<Self::Tensor>;

    /// The outputs of the `index`th delta net, `(rows, value heads * value_head_dim)`. The rows are
    /// staged in the sequences' states.
    fn delta_net(
        &self,
        net: &Self::DeltaNet,
        inputs: DeltaNetInputs<'_, Self>,
        kv: &mut Self::Kv<'_>,
        index: usize,
    ) -> Result<Self::Tensor>;

    /// The norm after the last layer, which gives the pass's hidden states.
    fn final_norm(&self, norm: &Self::Norm, x: &Self::Tensor) -> Result<Self::Tensor>;

    /// The target's logits of hidden states: `(rows, vocabulary)`. On a device the soft cap is
    /// applied when they are read.
    fn logits(&self, head: &Self::Linear, hidden: &Self::Tensor, soft_cap: Option<f32>) -> Result<Self::Tensor>;

    /// A drafter's input: the embedding of each token, then the state that predicted it: `(rows, 2 * width)`.
    fn embed_concat(&self, table: &Self::Embedding, ids: Self::Ids<'_>, state: &Self::State) -> Result<Self::Tensor>;

    /// The state for the next draft step.
    fn next_state(&self, layer: &Self::Linear, x: &Self::Tensor) -> Result<Self::State>;

    /// Scores of all tokens.
    fn scores(&self, head: &Self::Linear, x: &Self::Tensor) -> Result<Self::Scores>;

    /// Scores of the tokens of the best centroids.
    fn centroid_scores(&self, head: &Self::CentroidHead, x: &Self::Tensor) -> Result<Self::Scores>;
}

/// Where a model's modules are moved, each as soon as its tensors are read.
pub(crate) trait Destination {
    /// The operations there.
    type Ops: Ops;

    /// How the weights are used.
    fn weight_use(&self) -> WeightUse;

    /// # Errors
    /// If no kernel there supports the weight's type, or memory is exhausted; likewise for the others.
    fn linear(&self, from: Linear) -> Result<<Self::Ops as Ops>::Linear>;

    fn norm(&self, from: RmsNorm) -> Result<<Self::Ops as Ops>::Norm>;

    fn embedding(&self, from: Embedding) -> Result<<Self::Ops as Ops>::Embedding>;

    /// The output head whose rows are those of `table`.
    fn tied_head(&self, table: &<Self::Ops as Ops>::Embedding) -> <Self::Ops as Ops>::Linear;

    fn rotary(&self, from: Rotary) -> Result<<Self::Ops as Ops>::Rotary>;

    fn experts(&self, from: Experts) -> Result<<Self::Ops as Ops>::Experts>;

    fn delta_net(&self, from: DeltaNet) -> Result<<Self::Ops as Ops>::DeltaNet>;

    fn centroid_head(&self, from: CentroidHead) -> Result<<Self::Ops as Ops>::CentroidHead>;
}
