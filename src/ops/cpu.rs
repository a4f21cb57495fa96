//! Operations on the CPU: candle tensors.

use std::sync::Arc;

use candle_core::Tensor;
use foretoken_kernels::Isa;
use foretoken_kernels::activation::soft_cap;

use super::{DeltaNetInputs, Destination, Heads, Ops, PassOutput, SharedExpert};
use crate::checkpoint::WeightUse;
use crate::kv::{DeltaNetState, Inputs, KvAccess, Round};
use crate::model::{Model, Output, select_rows};
use crate::nn::{
    Angles, CentroidHead, DeltaNet, Embedding, Experts, F32View, Gate, Linear, RmsNorm, Rotary, Scores, for_row_blocks,
    gate, gated, linear_narrowed, project, row_blocks, same_shape, tensor,
};
use crate::{Error, Result};

/// The CPU, with an instruction set.
#[derive(Clone, Copy)]
pub(crate) struct CpuOps {
    pub isa: Isa,
}

impl PassOutput<CpuOps> {
    /// The output of a pass of `model`; its tensors have no rows if no row has outputs.
    ///
    /// # Errors
    /// Candle's.
    pub fn into_output(self, model: &dyn Model) -> Result<Output> {
        match self.rows {
            Some((logits, hidden)) => Ok(Output { logits, hidden, taps: self.taps }),
            None => Output::empty(model, self.taps),
        }
    }
}

impl Ops for CpuOps {
    type Linear = Linear;
    type Norm = RmsNorm;
    type Embedding = Embedding;
    type Rotary = Rotary;
    type Experts = Experts;
    type DeltaNet = Arc<DeltaNet>;
    type CentroidHead = CentroidHead;
    type Tensor = Tensor;
    type State = Tensor;
    type Angles = Angles;
    type Scores = Vec<Scores>;
    type Ids<'a> = &'a [u32];
    type Kv<'a> = dyn KvAccess + 'a;

    fn embed(&self, table: &Embedding, ids: &[u32]) -> Result<Tensor> {
        table.forward(ids)
    }

    fn project<const N: usize>(&self, layers: [&Linear; N], x: &Tensor) -> Result<[Tensor; N]> {
        project(layers, x)
    }

    fn linear_narrowed(&self, layer: &Linear, x: &Tensor, start: usize, rows: &[usize]) -> Result<Tensor> {
        linear_narrowed(layer, x, start, rows)
    }

    fn norm(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        norm.forward(x)
    }

    fn add_norm(&self, norm: &RmsNorm, residual: &Tensor, x: &Tensor, scale: f32) -> Result<Tensor> {
        norm.add_to(residual, x, scale)
    }

    fn add(&self, residual: &Tensor, x: &Tensor) -> Result<Tensor> {
        let (rows, width) = x.dims2()?;
        same_shape("add", residual, x)?;
        let (residual, x) = (F32View::new(residual)?, F32View::new(x)?);
        let y = row_blocks(rows, width, |first, y| {
            let range = first * width..first * width + y.len();
            let sums = residual[range.clone()].iter().zip(&x[range]);
            y.iter_mut().zip(sums).for_each(|(y, (residual, x))| *y = residual + x);
        });
        tensor(y, (rows, width))
    }

    fn gate(&self, function: Gate, of: &Tensor, up: &Tensor) -> Result<Tensor> {
        gate(function, of, up, self.isa)
    }

    fn gated(&self, function: Gate, gate: &Linear, up: &Linear, x: &Tensor) -> Result<Tensor> {
        gated(function, gate, up, x)
    }

    fn gated_norm(&self, norm: &RmsNorm, of: &Tensor, x: &Tensor) -> Result<Tensor> {
        gate(Gate::Silu, of, &norm.forward(x)?, self.isa)
    }

    fn head_gate(&self, queries: &Tensor, x: &Tensor, head_dim: usize) -> Result<Tensor> {
        gate(Gate::Sigmoid, &columns_of_heads(queries, 2 * head_dim, head_dim, head_dim)?, x, self.isa)
    }

    fn rows(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        select_rows(x, rows)
    }

    fn columns(&self, x: &Tensor, start: usize, width: usize) -> Result<Tensor> {
        Ok(x.narrow(1, start, width)?.contiguous()?)
    }

    fn concat_columns(&self, left: &Tensor, right: &Tensor) -> Result<Tensor> {
        Ok(Tensor::cat(&[left, right], 1)?)
    }

    fn experts(
        &self,
        experts: &Experts,
        scores: &Tensor,
        x: &Tensor,
        shared: Option<SharedExpert<'_, Self>>,
    ) -> Result<Tensor> {
        let sum = experts.forward(scores, x)?;
        let Some(shared) = shared else { return Ok(sum) };
        let (sum, x, gates) = (F32View::new(&sum)?, F32View::new(shared.x)?, F32View::new(shared.gate)?);
        let (rows, width) = shared.x.dims2()?;
        let y = row_blocks(rows, width, |first, y| {
            for (row, y) in (first..).zip(y.chunks_exact_mut(width)) {
                let weight = 1.0 / (1.0 + (-gates[row]).exp());
                let terms = sum[row * width..].iter().zip(&x[row * width..]);
                y.iter_mut().zip(terms).for_each(|(y, (sum, shared))| *y = sum + weight * shared);
            }
        });
        tensor(y, (rows, width))
    }

    fn angles(&self, rotary: &Rotary, kv: &(dyn KvAccess + '_)) -> Result<Angles> {
        Ok(rotary.angles(kv.positions()))
    }

    fn narrow(&self, kv: &mut (dyn KvAccess + '_), rows: &[usize]) -> Result<()> {
        kv.narrow(rows)
    }

    fn append(&self, kv: &mut (dyn KvAccess + '_), layer: usize, k: Heads<'_, Self>, v: Heads<'_, Self>) -> Result<()> {
        kv.append(layer, &k.normed()?, &v.normed()?)
    }

    fn attend(&self, kv: &(dyn KvAccess + '_), layer: usize, q: Heads<'_, Self>) -> Result<Tensor> {
        kv.attend(layer, &q.normed()?)
    }

    fn delta_net(
        &self,
        net: &Arc<DeltaNet>,
        inputs: DeltaNetInputs<'_, Self>,
        kv: &mut (dyn KvAccess + '_),
        index: usize,
    ) -> Result<Tensor> {
        let (decay, beta) = net.gates(inputs.a, inputs.b)?;
        let (rows, channels) = inputs.qkv.dims2()?;
        let (qkv, heads, width) = (F32View::new(inputs.qkv)?, net.dims.num_value_heads, net.dims.values());
        let mut y = vec![0.0; rows * width];
        let mut first = 0;
        kv.for_rounds(&mut |round: &mut Round<'_>| {
            let end = first + round.rows();
            let gates = first * heads..end * heads;
            let qkv = &qkv[first * channels..end * channels];
            let inputs = Inputs { qkv, decay: &decay[gates.clone()], beta: &beta[gates] };
            let missing = || Error::argument("state", "is another model's: it has no delta nets");
            let state = round.recurrent_mut::<DeltaNetState>().ok_or_else(missing)?;
            state.stage(index, &inputs, &mut y[first * width..end * width]);
            first = end;
            Ok(())
        })?;
        tensor(y, (rows, width))
    }

    fn final_norm(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        norm.forward(x)
    }

    fn logits(&self, head: &Linear, hidden: &Tensor, cap: Option<f32>) -> Result<Tensor> {
        head.forward_then(hidden, |logits| {
            if let Some(cap) = cap {
                for_row_blocks(logits, 1, |_, logits| soft_cap(self.isa, logits, cap));
            }
        })
    }

    fn embed_concat(&self, table: &Embedding, ids: &[u32], state: &Tensor) -> Result<Tensor> {
        Ok(Tensor::cat(&[&table.forward(ids)?, state], 1)?)
    }

    fn next_state(&self, layer: &Linear, x: &Tensor) -> Result<Tensor> {
        self.linear(layer, x)
    }

    fn scores(&self, head: &Linear, x: &Tensor) -> Result<Vec<Scores>> {
        let logits = self.linear(head, x)?;
        (0..logits.dim(0)?).map(|row| Ok(Scores { ids: None, logits: logits.narrow(0, row, 1)? })).collect()
    }

    fn centroid_scores(&self, head: &CentroidHead, x: &Tensor) -> Result<Vec<Scores>> {
        head.forward(x)
    }
}

impl Heads<'_, CpuOps> {
    /// The heads after norm and rotation: `(rows, heads, head_dim)`.
    fn normed(&self) -> Result<Tensor> {
        let x = match self.stride == self.head_dim {
            true => self.x.clone(),
            false => columns_of_heads(self.x, self.stride, 0, self.head_dim)?,
        };
        let x = match (self.norm, self.angles) {
            (Some(norm), Some(angles)) => return angles.norm_and_rotate(norm, &x),
            (Some(norm), None) => norm.forward(&x)?,
            (None, None) => x,
            (None, Some(_)) => return Err(Error::argument("angles", "are of heads without a norm")),
        };
        let (rows, width) = x.dims2()?;
        Ok(x.reshape((rows, width / self.head_dim, self.head_dim))?)
    }
}

/// Of every `stride` elements of `x` `(rows, heads * stride)` the `width` ones from `start` on:
/// `(rows, heads * width)`.
fn columns_of_heads(x: &Tensor, stride: usize, start: usize, width: usize) -> Result<Tensor> {
    let (rows, all) = x.dims2()?;
    let (view, heads) = (F32View::new(x)?, all / stride);
    let columns = row_blocks(rows, heads * width, |first, y| {
        let from = view[first * all..].chunks_exact(stride);
        y.chunks_exact_mut(width).zip(from).for_each(|(y, head)| y.copy_from_slice(&head[start..start + width]));
    });
    tensor(columns, (rows, heads * width))
}

/// The CPU: modules are moved nowhere.
pub(crate) struct CpuDestination {
    pub isa: Isa,
}

impl Destination for CpuDestination {
    type Ops = CpuOps;

    fn weight_use(&self) -> WeightUse {
        WeightUse::Multiply
    }

    fn linear(&self, from: Linear) -> Result<Linear> {
        Ok(from)
    }

    fn norm(&self, from: RmsNorm) -> Result<RmsNorm> {
        Ok(from)
    }

    fn embedding(&self, from: Embedding) -> Result<Embedding> {
        Ok(from)
    }

    fn tied_head(&self, table: &Embedding) -> Linear {
        Linear::new(table.weight().clone(), self.isa)
    }

    fn rotary(&self, from: Rotary) -> Result<Rotary> {
        Ok(from)
    }

    fn experts(&self, from: Experts) -> Result<Experts> {
        Ok(from)
    }

    fn delta_net(&self, from: DeltaNet) -> Result<Arc<DeltaNet>> {
        Ok(Arc::new(from))
    }

    fn centroid_head(&self, from: CentroidHead) -> Result<CentroidHead> {
        Ok(from)
    }
}
