//! The feed-forward part of a layer: a gated MLP, or routed experts and a shared one.

use candle_core::Tensor;

use super::config::{MoeConfig, TextConfig};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::{Experts, F32View, Gate, Linear, linear, project, silu_gate, tensor};

/// `mlp` of a decoder layer.
pub(super) enum FeedForward {
    Dense(Box<Mlp>),
    Experts(Box<Moe>),
}

/// `down(silu(gate(x)) * up(x))`.
pub(super) struct Mlp {
    gate_proj: Linear, // (intermediate, hidden)
    up_proj: Linear,   // (intermediate, hidden)
    down_proj: Linear, // (hidden, intermediate)
}

/// Routed experts, and a shared one times `sigmoid(shared_expert_gate(x))`.
pub(super) struct Moe {
    gate: Linear, // (experts, hidden)
    experts: Experts,
    shared_expert_gate: Linear, // (1, hidden)
    shared_expert: Mlp,
}

impl FeedForward {
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig) -> Result<Self> {
        Ok(match &config.moe {
            None => Self::Dense(Box::new(Mlp::load(loader, name, config.hidden_size, config.intermediate_size)?)),
            Some(moe) => Self::Experts(Box::new(Moe::load(loader, name, config.hidden_size, moe)?)),
        })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(x),
            Self::Experts(moe) => moe.forward(x),
        }
    }
}

impl Mlp {
    fn load(loader: &mut Loader, name: &str, hidden: usize, intermediate: usize) -> Result<Self> {
        Ok(Self {
            gate_proj: loader.linear(&format!("{name}gate_proj.weight"), intermediate, hidden)?,
            up_proj: loader.linear(&format!("{name}up_proj.weight"), intermediate, hidden)?,
            down_proj: loader.linear(&format!("{name}down_proj.weight"), hidden, intermediate)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [gate, up] = project([&self.gate_proj, &self.up_proj], x)?;
        linear(&self.down_proj, &silu_gate(&gate, &up, self.gate_proj.isa())?)
    }
}

impl Moe {
    fn load(loader: &mut Loader, name: &str, hidden: usize, moe: &MoeConfig) -> Result<Self> {
        let (count, width, used) = (moe.num_experts, moe.intermediate_size, moe.num_experts_per_tok);
        let mut stack = |fused: &str, parts: &[&str], shape: [usize; 3]| {
            let of = |expert: usize| parts.iter().map(move |part| format!("{name}experts.{expert}.{part}.weight"));
            match loader.has(&format!("{name}experts.{fused}")) {
                true => loader.stack(&format!("{name}experts.{fused}"), shape, used),
                false => loader.stack_of((0..count).map(|expert| of(expert).collect()).collect(), shape, used),
            }
        };
        let gate_up_proj = stack("gate_up_proj", &["gate_proj", "up_proj"], [count, 2 * width, hidden])?;
        let down_proj = stack("down_proj", &["down_proj"], [count, hidden, width])?;
        let experts = Experts::new(gate_up_proj, down_proj, vec![1.0; count], used, loader.isa()).gated_by(Gate::Silu);
        let shared = &format!("{name}shared_expert.");
        Ok(Self {
            gate: loader.exact_linear(&format!("{name}gate.weight"), count, hidden)?,
            experts,
            shared_expert_gate: loader.exact_linear(&format!("{name}shared_expert_gate.weight"), 1, hidden)?,
            shared_expert: Mlp::load(loader, shared, hidden, moe.shared_intermediate_size)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let [scores, share] = project([&self.gate, &self.shared_expert_gate], x)?;
        let mut sum = F32View::new(&self.experts.forward(&scores, x)?)?.to_vec();
        let shared = self.shared_expert.forward(x)?;
        let (shared, share, width) = (F32View::new(&shared)?, F32View::new(&share)?, sum.len() / x.dim(0)?);
        let rows = sum.chunks_exact_mut(width).zip(shared.chunks_exact(width));
        for ((sum, shared), share) in rows.zip(share.iter()) {
            let share = 1.0 / (1.0 + (-share).exp());
            sum.iter_mut().zip(shared).for_each(|(sum, shared)| *sum += share * shared);
        }
        tensor(sum, x.dims())
    }
}
