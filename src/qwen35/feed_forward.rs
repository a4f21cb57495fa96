//! The feed-forward part of a layer: a gated MLP, or routed experts and a shared one.

use super::config::{MoeConfig, TextConfig};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::{Experts, Gate};
use crate::ops::{Destination, Mlp, Ops, SharedExpert};

/// `mlp` of a decoder layer.
pub(super) enum FeedForward<O: Ops> {
    Dense(Box<Mlp<O>>),
    Experts(Box<Moe<O>>),
}

/// Routed experts, and a shared one times `sigmoid(shared_expert_gate(x))`.
pub(super) struct Moe<O: Ops> {
    gate: O::Linear, // (experts, hidden)
    experts: O::Experts,
    shared_expert_gate: O::Linear, // (1, hidden)
    shared_expert: Mlp<O>,
}

impl<O: Ops> FeedForward<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        Ok(match &config.moe {
            None => Self::Dense(Box::new(Mlp::load(loader, to, name, [hidden, config.intermediate_size], Gate::Silu)?)),
            Some(moe) => Self::Experts(Box::new(Moe::load(loader, to, name, hidden, moe)?)),
        })
    }

    pub(super) fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(ops, x),
            Self::Experts(moe) => moe.forward(ops, x),
        }
    }
}

impl<O: Ops> Moe<O> {
    fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        hidden: usize,
        moe: &MoeConfig,
    ) -> Result<Self> {
        let (count, width, used) = (moe.num_experts, moe.intermediate_size, moe.num_experts_per_tok);
        let gate_up_proj = loader.stack(&format!("{name}experts.gate_up_proj"), [count, 2 * width, hidden], used)?;
        let down_proj = loader.stack(&format!("{name}experts.down_proj"), [count, hidden, width], used)?;
        let (per_expert_scale, isa) = (vec![1.0; count], loader.isa());
        let experts = Experts { gate_up_proj, down_proj, per_expert_scale, top_k: used, gate: Gate::Silu, isa };
        let shared = &format!("{name}shared_expert.");
        let mut exact =
            |part: &str, outputs| to.linear(loader.exact_linear(&format!("{name}{part}.weight"), outputs, hidden)?);
        Ok(Self {
            gate: exact("gate", count)?,
            experts: to.experts(experts)?,
            shared_expert_gate: exact("shared_expert_gate", 1)?,
            shared_expert: Mlp::load(loader, to, shared, [hidden, moe.shared_intermediate_size], Gate::Silu)?,
        })
    }

    fn forward(&self, ops: &O, x: &O::Tensor) -> Result<O::Tensor> {
        let [scores, gate] = ops.project([&self.gate, &self.shared_expert_gate], x)?;
        let shared = self.shared_expert.forward(ops, x)?;
        ops.experts(&self.experts, &scores, x, Some(SharedExpert { x: &shared, gate: &gate }))
    }
}
