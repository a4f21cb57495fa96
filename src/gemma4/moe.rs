//! The mixture of experts next to the dense MLP.

use super::config::{MoeConfig, TextConfig};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::{Experts, Gate, RmsNorm};
use crate::ops::{Destination, Ops};

/// Router, experts and the three norms around them.
pub(super) struct Moe<O: Ops> {
    router_norm: O::Norm,   // (hidden): weightless norm, then scale / sqrt(hidden)
    router_proj: O::Linear, // (experts, hidden)
    experts: O::Experts,
    post_feedforward_layernorm_1: O::Norm,
    pre_feedforward_layernorm_2: O::Norm,
    post_feedforward_layernorm_2: O::Norm,
}

impl<O: Ops> Moe<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
        moe: &MoeConfig,
    ) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let (count, width, used) = (moe.num_experts, moe.intermediate_size, moe.top_k_experts);
        let mut scale = loader.factors(&format!("{name}router.scale"), hidden)?;
        scale.iter_mut().for_each(|s| *s *= (hidden as f32).powf(-0.5));
        let isa = loader.isa();
        let router_proj = to.linear(loader.exact_linear(&format!("{name}router.proj.weight"), count, hidden)?)?;
        let per_expert_scale = loader.factors(&format!("{name}router.per_expert_scale"), count)?;
        let gate_up_proj = loader.stack(&format!("{name}experts.gate_up_proj"), [count, 2 * width, hidden], used)?;
        let down_proj = loader.stack(&format!("{name}experts.down_proj"), [count, hidden, width], used)?;
        let experts = Experts { gate_up_proj, down_proj, per_expert_scale, top_k: used, gate: Gate::GeluTanh, isa };
        let experts = to.experts(experts)?;
        let mut norm = |norm: &str| to.norm(loader.norm(&format!("{name}{norm}.weight"), hidden, eps)?);
        Ok(Self {
            router_norm: to.norm(RmsNorm::new(scale, eps, isa))?,
            router_proj,
            experts,
            post_feedforward_layernorm_1: norm("post_feedforward_layernorm_1")?,
            pre_feedforward_layernorm_2: norm("pre_feedforward_layernorm_2")?,
            post_feedforward_layernorm_2: norm("post_feedforward_layernorm_2")?,
        })
    }

    /// The sum of the dense branch `mlp` and the experts; `residual` is the residual stream before the feed-forward
    /// norm.
    pub(super) fn forward(&self, ops: &O, residual: &O::Tensor, mlp: &O::Tensor) -> Result<O::Tensor> {
        let dense = ops.norm(&self.post_feedforward_layernorm_1, mlp)?;
        let scores = ops.linear(&self.router_proj, &ops.norm(&self.router_norm, residual)?)?;
        let x = ops.norm(&self.pre_feedforward_layernorm_2, residual)?;
        let experts = ops.experts(&self.experts, &scores, &x, None)?;
        ops.add_norm(&self.post_feedforward_layernorm_2, &dense, &experts, 1.0)
    }
}
