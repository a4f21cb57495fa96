//! The gated MLP.

use candle_core::Tensor;
use candle_nn::Module;

use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::{Linear, gelu_gate, project};
use foretoken_kernels::Isa;

/// `down(gelu_tanh(gate(x)) * up(x))`.
pub(super) struct Mlp {
    pub(super) gate_proj: Linear, // (intermediate, hidden)
    pub(super) up_proj: Linear,   // (intermediate, hidden)
    pub(super) down_proj: Linear, // (hidden, intermediate)
    isa: Isa,
}

impl Mlp {
    pub(super) fn load(loader: &mut Loader, name: &str, hidden: usize, intermediate: usize) -> Result<Self> {
        Ok(Self {
            gate_proj: loader.linear(&format!("{name}gate_proj.weight"), intermediate, hidden)?,
            up_proj: loader.linear(&format!("{name}up_proj.weight"), intermediate, hidden)?,
            down_proj: loader.linear(&format!("{name}down_proj.weight"), hidden, intermediate)?,
            isa: loader.isa(),
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = project([&self.gate_proj, &self.up_proj], x)?;
        Ok(self.down_proj.forward(&gelu_gate(&gate, &up, self.isa)?)?)
    }
}
