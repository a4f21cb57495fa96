//! The gated MLP.

use super::{Destination, Ops};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::Gate;

/// `down(f(gate(x)) * up(x))`.
pub(crate) struct Mlp<O: Ops> {
    function: Gate,
    gate_proj: O::Linear, // (intermediate, hidden)
    up_proj: O::Linear,   // (intermediate, hidden)
    down_proj: O::Linear, // (hidden, intermediate)
}

impl<O: Ops> Mlp<O> {
    pub fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        [hidden, intermediate]: [usize; 2],
        function: Gate,
    ) -> Result<Self> {
        let mut linear =
            |part: &str, outputs, inputs| to.linear(loader.linear(&format!("{name}{part}.weight"), outputs, inputs)?);
        Ok(Self {
            function,
            gate_proj: linear("gate_proj", intermediate, hidden)?,
            up_proj: linear("up_proj", intermediate, hidden)?,
            down_proj: linear("down_proj", hidden, intermediate)?,
        })
    }

    /// `x` `(rows, hidden)` to `(rows, hidden)`.
    pub fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor> {
        ops.linear(&self.down_proj, &ops.gated(self.function, &self.gate_proj, &self.up_proj, x)?)
    }
}
