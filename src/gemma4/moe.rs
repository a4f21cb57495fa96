//! The mixture of experts that runs beside the dense MLP.

use candle_core::Tensor;
use candle_nn::Module;
use foretoken_kernels::{Isa, activation, vocabulary};

use super::config::{MoeConfig, TextConfig};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::{F32View, Input, Linear, RmsNorm, Weight, multiply, tensor};

/// Router, experts and the three norms around them.
pub(super) struct Moe {
    pub(super) router: Router,
    pub(super) experts: Experts,
    pub(super) post_feedforward_layernorm_1: RmsNorm,
    pub(super) pre_feedforward_layernorm_2: RmsNorm,
    pub(super) post_feedforward_layernorm_2: RmsNorm,
}

/// Routes rows to experts, with weights.
struct Choice {
    row: usize,
    expert: usize,
    weight: f32,
}

pub(super) struct Router {
    pub(super) norm: RmsNorm,              // (hidden): weightless norm, then scale / sqrt(hidden)
    pub(super) proj: Linear,               // (experts, hidden)
    pub(super) per_expert_scale: Vec<f32>, // (experts)
    pub(super) top_k: usize,
}

pub(super) struct Experts {
    pub(super) gate_up_proj: Weight, // (experts, 2 * intermediate, hidden): gate rows, then up rows
    pub(super) down_proj: Weight,    // (experts, hidden, intermediate)
    pub(super) intermediate: usize,
    pub(super) hidden: usize,
    isa: Isa,
}

impl Moe {
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig, moe: &MoeConfig) -> Result<Self> {
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        Ok(Self {
            router: Router::load(loader, &format!("{name}router."), config, moe)?,
            experts: Experts::load(loader, &format!("{name}experts."), hidden, moe)?,
            post_feedforward_layernorm_1: loader.norm(
                &format!("{name}post_feedforward_layernorm_1.weight"),
                hidden,
                eps,
            )?,
            pre_feedforward_layernorm_2: loader.norm(
                &format!("{name}pre_feedforward_layernorm_2.weight"),
                hidden,
                eps,
            )?,
            post_feedforward_layernorm_2: loader.norm(
                &format!("{name}post_feedforward_layernorm_2.weight"),
                hidden,
                eps,
            )?,
        })
    }

    /// The sum of the dense branch `mlp` and the experts; `residual` is the residual stream before the feed-forward
    /// norm.
    pub(super) fn forward(&self, residual: &Tensor, mlp: &Tensor) -> Result<Tensor> {
        let dense = self.post_feedforward_layernorm_1.forward(mlp)?;
        let choices = self.router.choose(residual)?;
        let experts = self.experts.forward(&self.pre_feedforward_layernorm_2.forward(residual)?, choices)?;
        self.post_feedforward_layernorm_2.add_to(&dense, &experts, 1.0)
    }
}

impl Router {
    fn load(loader: &mut Loader, name: &str, config: &TextConfig, moe: &MoeConfig) -> Result<Self> {
        let hidden = config.hidden_size;
        let mut scale = loader.vector(&format!("{name}scale"), hidden)?;
        scale.iter_mut().for_each(|s| *s *= (hidden as f32).powf(-0.5));
        Ok(Self {
            norm: RmsNorm::new(scale, config.rms_norm_eps, loader.isa()),
            proj: loader.exact_linear(&format!("{name}proj.weight"), moe.num_experts, hidden)?,
            per_expert_scale: loader.vector(&format!("{name}per_expert_scale"), moe.num_experts)?,
            top_k: moe.top_k_experts,
        })
    }

    /// The experts of every row, rows in order and experts in order within a row.
    ///
    /// Softmax over all experts, the best `top_k` renormalised to sum 1, each times its expert's scale.
    fn choose(&self, x: &Tensor) -> Result<Vec<Choice>> {
        let scores = self.proj.forward(&self.norm.forward(x)?)?;
        let (_, experts) = scores.dims2()?;
        let mut chosen = Vec::new();
        let mut choices = Vec::with_capacity(x.dim(0)? * self.top_k);
        for (row, scores) in F32View::new(&scores)?.chunks_exact(experts).enumerate() {
            let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            vocabulary::top_k(scores, self.top_k, &mut chosen);
            // The softmax denominator cancels in the renormalisation.
            let total: f32 = chosen.iter().map(|e| (scores[*e as usize] - max).exp()).sum();
            chosen.sort_unstable();
            choices.extend(chosen.iter().map(|e| {
                let expert = *e as usize;
                let weight = (scores[expert] - max).exp() / total * self.per_expert_scale[expert];
                Choice { row, expert, weight }
            }));
        }
        Ok(choices)
    }
}

impl Experts {
    fn load(loader: &mut Loader, name: &str, hidden: usize, moe: &MoeConfig) -> Result<Self> {
        let (experts, intermediate, used) = (moe.num_experts, moe.intermediate_size, moe.top_k_experts);
        Ok(Self {
            gate_up_proj: loader.stack(&format!("{name}gate_up_proj"), [experts, 2 * intermediate, hidden], used)?,
            down_proj: loader.stack(&format!("{name}down_proj"), [experts, hidden, intermediate], used)?,
            intermediate,
            hidden,
            isa: loader.isa(),
        })
    }

    /// Each chosen expert is read once for all of its rows, all experts in parallel. A row sums its experts in index
    /// order, so that its bits do not depend on the other rows.
    fn forward(&self, x: &Tensor, mut choices: Vec<Choice>) -> Result<Tensor> {
        choices.sort_by_key(|choice| choice.expert);
        let x = F32View::new(x)?;
        let buckets: Vec<&[Choice]> = choices.chunk_by(|a, b| a.expert == b.expert).collect();
        let rows_of = |bucket: &&[Choice]| -> Vec<f32> {
            bucket.iter().flat_map(|c| &x[c.row * self.hidden..(c.row + 1) * self.hidden]).copied().collect()
        };
        let gate_up = self.multiply(&self.gate_up_proj, &buckets, buckets.iter().map(rows_of).collect());
        let gated = gate_up.into_iter().map(|gate_up| {
            let mut gated = Vec::with_capacity(gate_up.len() / 2);
            for row in gate_up.chunks_exact(2 * self.intermediate) {
                let (gate, up) = row.split_at(self.intermediate);
                let start = gated.len();
                gated.extend_from_slice(gate);
                activation::gelu_gate(self.isa, &mut gated[start..], up);
            }
            gated
        });
        let down = self.multiply(&self.down_proj, &buckets, gated.collect());
        let mut sum = vec![0.0; x.len()];
        for (choices, down) in buckets.into_iter().zip(&down) {
            for (choice, y) in choices.iter().zip(down.chunks_exact(self.hidden)) {
                let sum = &mut sum[choice.row * self.hidden..(choice.row + 1) * self.hidden];
                sum.iter_mut().zip(y).for_each(|(sum, y)| *sum += choice.weight * y);
            }
        }
        tensor(sum, (x.len() / self.hidden, self.hidden))
    }

    /// Each bucket's rows times its expert's matrix.
    fn multiply(&self, weight: &Weight, buckets: &[&[Choice]], rows: Vec<Vec<f32>>) -> Vec<Vec<f32>> {
        let inputs: Vec<_> = rows.iter().zip(buckets).map(|(x, bucket)| Input::new(x, bucket.len())).collect();
        let matrices = buckets.iter().map(|bucket| weight.matrix(bucket[0].expert));
        multiply(self.isa, &matrices.zip(&inputs).collect::<Vec<_>>())
    }
}
