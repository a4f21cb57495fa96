//! The gated MLP.

use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::Gate;
use crate::ops::{Destination, Ops};

/// `down(gelu_tanh(gate(x)) * up(x))`.
pub(super) struct Mlp<O: Ops> {
    gate_proj: O::Linear, // (intermediate, hidden)
    up_proj: O::Linear,   // (intermediate, hidden)
    down_proj: O::Linear, // (hidden, intermediate)
}

impl<O: Ops> Mlp<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        [hidden, intermediate]: [usize; 2],
    ) -> Result<Self> {
        let mut linear =
            |part: &str, outputs, inputs| to.linear(loader.linear(&format!("{name}{part}.weight"), outputs, inputs)?);
        Ok(Self {
            gate_proj: linear("gate_proj", intermediate, hidden)?,
            up_proj: linear("up_proj", intermediate, hidden)?,
            down_proj: linear("down_proj", hidden, intermediate)?,
        })
    }

    pub(super) fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor> {
        ops.linear(&self.down_proj, &ops.gated(Gate::GeluTanh, &self.gate_proj, &self.up_proj, x)?)
    }
}
