//! The gated delta net: projections, gates and output norm around the recurrence, whose state belongs to the sequence.

use std::sync::Arc;

use candle_core::Tensor;

use super::config::{TensorLayout, TextConfig};
use super::state::{DeltaNetState, Inputs, Recurrence};
use crate::checkpoint::Loader;
use crate::kv::Round;
use crate::nn::{F32View, Linear, RmsNorm, linear, project, silu_gate, tensor};
use crate::{Error, Result};

/// `linear_attn` of a decoder layer.
pub(super) struct GatedDeltaNet {
    in_proj_qkv: Linear, // (channels, hidden): queries, keys, values
    in_proj_z: Linear,   // (value heads * value_head_dim, hidden)
    in_proj_b: Linear,   // (value heads, hidden)
    in_proj_a: Linear,   // (value heads, hidden)
    dt_bias: Vec<f32>,   // (value heads)
    rate: Vec<f64>,      // (value heads): -exp(A_log)
    norm: RmsNorm,       // (value_head_dim)
    out_proj: Linear,    // (hidden, value heads * value_head_dim)
    recurrence: Arc<Recurrence>,
}

impl GatedDeltaNet {
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig) -> Result<Self> {
        let (hidden, dims) = (config.hidden_size, &config.delta_net);
        let (channels, values, heads) = (dims.channels(), dims.values(), dims.num_value_heads);
        let rate = loader.vector(&format!("{name}A_log"), heads)?;
        if config.tensor_layout == TensorLayout::Gguf && rate.iter().any(|rate| *rate > 0.0) {
            let problem = "is above 0, so states would grow; convert the checkpoint again (-exp(A_log) is stored)";
            return Err(loader.error(&format!("{name}A_log"), problem));
        }
        let stored = loader.floats(&format!("{name}conv1d.weight"), &[channels, 1, dims.conv_kernel_dim])?;
        let taps = dims.conv_kernel_dim;
        // (taps, channels): lanes run over channels.
        let weight = (0..taps).flat_map(|tap| stored.iter().skip(tap).step_by(taps)).copied().collect();
        let recurrence = Recurrence::new(dims.clone(), config.tensor_layout, weight, loader.isa());
        Ok(Self {
            in_proj_qkv: loader.linear(&format!("{name}in_proj_qkv.weight"), channels, hidden)?,
            in_proj_z: loader.linear(&format!("{name}in_proj_z.weight"), values, hidden)?,
            in_proj_b: loader.exact_linear(&format!("{name}in_proj_b.weight"), heads, hidden)?,
            in_proj_a: loader.exact_linear(&format!("{name}in_proj_a.weight"), heads, hidden)?,
            dt_bias: loader.vector(&format!("{name}dt_bias"), heads)?,
            rate: match config.tensor_layout {
                TensorLayout::HuggingFace => rate.into_iter().map(|a_log| -f64::from(a_log).exp()).collect(),
                TensorLayout::Gguf => rate.into_iter().map(f64::from).collect(),
            },
            norm: loader.norm(&format!("{name}norm.weight"), dims.value_head_dim, config.rms_norm_eps)?,
            out_proj: loader.linear(&format!("{name}out_proj.weight"), hidden, values)?,
            recurrence: Arc::new(recurrence),
        })
    }

    /// The layer's recurrence, for a sequence's state.
    pub(super) fn recurrence(&self) -> &Arc<Recurrence> {
        &self.recurrence
    }

    /// `x` `(rows, hidden)` of all rounds to `(rows, hidden)`; `index` counts the delta nets. The rows are staged in
    /// the rounds.
    pub(super) fn forward(&self, x: &Tensor, rounds: &mut [Round<'_>], index: usize) -> Result<Tensor> {
        let [qkv, z, b, a] = project([&self.in_proj_qkv, &self.in_proj_z, &self.in_proj_b, &self.in_proj_a], x)?;
        let heads = self.dt_bias.len();
        let decay: Vec<f32> = F32View::new(&a)?.iter().enumerate().map(|(i, a)| self.decay(i % heads, *a)).collect();
        let beta: Vec<f32> = F32View::new(&b)?.iter().map(|b| sigmoid(*b)).collect();
        let (rows, width) = z.dims2()?;
        let mut y = vec![0.0; rows * width];
        let (qkv, channels) = (F32View::new(&qkv)?, qkv.dim(1)?);
        let mut first = 0;
        for round in rounds {
            let end = first + round.rows();
            let gates = first * heads..end * heads;
            let qkv = &qkv[first * channels..end * channels];
            let inputs = Inputs { qkv, decay: &decay[gates.clone()], beta: &beta[gates] };
            let missing = || Error::argument("state", "is another model's: it has no delta nets");
            let state = round.recurrent_mut::<DeltaNetState>().ok_or_else(missing)?;
            state.stage(index, &inputs, &mut y[first * width..end * width]);
            first = end;
        }
        let y = self.norm.forward(&tensor(y, (rows, width))?)?;
        linear(&self.out_proj, &silu_gate(&z, &y, self.norm.isa())?)
    }

    /// `exp(-exp(A_log) softplus(a + dt_bias))`: the decay of the head's state.
    fn decay(&self, head: usize, a: f32) -> f32 {
        let x = f64::from(a) + f64::from(self.dt_bias[head]);
        let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
        (self.rate[head] * softplus).exp() as f32
    }
}

fn sigmoid(x: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(x)).exp())) as f32
}
