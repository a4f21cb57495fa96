//! The gated MLP.

use crate::Result;
use crate::checkpoint::Loader;
use crate::ops::{CpuOps, Ops, Upload};

/// `down(gelu_tanh(gate(x)) * up(x))`.
pub(super) struct Mlp<O: Ops> {
    gate_proj: O::Linear, // (intermediate, hidden)
    up_proj: O::Linear,   // (intermediate, hidden)
    down_proj: O::Linear, // (hidden, intermediate)
}

impl Mlp<CpuOps> {
    pub(super) fn load(loader: &mut Loader, name: &str, hidden: usize, intermediate: usize) -> Result<Self> {
        Ok(Self {
            gate_proj: loader.linear(&format!("{name}gate_proj.weight"), intermediate, hidden)?,
            up_proj: loader.linear(&format!("{name}up_proj.weight"), intermediate, hidden)?,
            down_proj: loader.linear(&format!("{name}down_proj.weight"), hidden, intermediate)?,
        })
    }

    pub(super) fn upload<U: Upload>(&self, to: &U) -> Result<Mlp<U::Ops>> {
        Ok(Mlp {
            gate_proj: to.linear(&self.gate_proj)?,
            up_proj: to.linear(&self.up_proj)?,
            down_proj: to.linear(&self.down_proj)?,
        })
    }
}

impl<O: Ops> Mlp<O> {
    pub(super) fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor> {
        let [gate, up] = ops.project([&self.gate_proj, &self.up_proj], x)?;
        ops.linear(&self.down_proj, &ops.gelu_gate(&gate, &up)?)
    }
}
