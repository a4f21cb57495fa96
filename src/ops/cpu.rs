//! Operations on the CPU: candle tensors.

use candle_core::Tensor;
use foretoken_kernels::Isa;
use foretoken_kernels::activation::soft_cap;

use super::{Destination, Heads, Ops};
use crate::Result;
use crate::checkpoint::WeightUse;
use crate::kv::KvAccess;
use crate::model::select_rows;
use crate::nn::{Angles, CentroidHead, Embedding, Experts, Linear, RmsNorm, Rotary, Scores, gelu_gate, project};

/// The CPU, with an instruction set.
#[derive(Clone, Copy)]
pub(crate) struct CpuOps {
    pub isa: Isa,
}

impl Ops for CpuOps {
    type Linear = Linear;
    type Norm = RmsNorm;
    type Embedding = Embedding;
    type Rotary = Rotary;
    type Experts = Experts;
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

    fn norm(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        norm.forward(x)
    }

    fn add_norm(&self, norm: &RmsNorm, residual: &Tensor, x: &Tensor, scale: f32) -> Result<Tensor> {
        norm.add_to(residual, x, scale)
    }

    fn gelu_gate(&self, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
        gelu_gate(gate, up, self.isa)
    }

    fn rows(&self, x: &Tensor, rows: &[usize]) -> Result<Tensor> {
        select_rows(x, rows)
    }

    fn columns(&self, x: &Tensor, start: usize, width: usize) -> Result<Tensor> {
        Ok(x.narrow(1, start, width)?.contiguous()?)
    }

    fn experts(&self, experts: &Experts, scores: &Tensor, x: &Tensor) -> Result<Tensor> {
        experts.forward(scores, x)
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

    fn final_norm(&self, norm: &RmsNorm, x: &Tensor) -> Result<Tensor> {
        norm.forward(x)
    }

    fn logits(&self, head: &Linear, hidden: &Tensor, cap: Option<f32>) -> Result<Tensor> {
        head.forward_then(hidden, |logits| {
            if let Some(cap) = cap {
                soft_cap(self.isa, logits, cap);
            }
        })
    }

    fn embed_beside(&self, table: &Embedding, ids: &[u32], state: &Tensor) -> Result<Tensor> {
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
        match self.angles {
            Some(angles) => angles.norm_and_rotate(self.norm, self.x),
            None => {
                let (rows, width) = self.x.dims2()?;
                let head_dim = self.norm.width();
                Ok(self.norm.forward(self.x)?.reshape((rows, width / head_dim, head_dim))?)
            }
        }
    }
}

/// Modules stay on the CPU.
pub(crate) struct OnCpu {
    pub isa: Isa,
}

impl Destination for OnCpu {
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

    fn centroid_head(&self, from: CentroidHead) -> Result<CentroidHead> {
        Ok(from)
    }
}
