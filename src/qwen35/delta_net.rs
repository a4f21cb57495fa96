//! The gated delta net: projections and output norm around the recurrence, whose state belongs to the sequence.

use super::config::{TensorLayout, TextConfig};
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::{DeltaNet, HeadOrder};
use crate::ops::{DeltaNetInputs, Destination, Ops};

/// `linear_attn` of a decoder layer.
pub(super) struct GatedDeltaNet<O: Ops> {
    in_proj_qkv: O::Linear, // (channels, hidden): queries, keys, values
    in_proj_z: O::Linear,   // (value heads * value_head_dim, hidden)
    in_proj_b: O::Linear,   // (value heads, hidden)
    in_proj_a: O::Linear,   // (value heads, hidden)
    pub(super) net: O::DeltaNet,
    norm: O::Norm,       // (value_head_dim)
    out_proj: O::Linear, // (hidden, value heads * value_head_dim)
}

impl<O: Ops> GatedDeltaNet<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
    ) -> Result<Self> {
        let (hidden, dims) = (config.hidden_size, &config.delta_net);
        let (channels, values, heads) = (dims.channels(), dims.values(), dims.num_value_heads);
        let linear = |loader: &mut Loader, part: &str, outputs, inputs| {
            to.linear(loader.linear(&format!("{name}{part}.weight"), outputs, inputs)?)
        };
        let exact = |loader: &mut Loader, part: &str| {
            to.linear(loader.exact_linear(&format!("{name}{part}.weight"), heads, hidden)?)
        };
        Ok(Self {
            net: to.delta_net(delta_net(loader, name, config)?)?,
            in_proj_qkv: linear(loader, "in_proj_qkv", channels, hidden)?,
            in_proj_z: linear(loader, "in_proj_z", values, hidden)?,
            in_proj_b: exact(loader, "in_proj_b")?,
            in_proj_a: exact(loader, "in_proj_a")?,
            norm: to.norm(loader.norm(&format!("{name}norm.weight"), dims.value_head_dim, config.rms_norm_eps)?)?,
            out_proj: linear(loader, "out_proj", hidden, values)?,
        })
    }

    /// `x` `(rows, hidden)` to `(rows, hidden)`; `index` counts the delta nets. The rows are staged
    /// in the sequences' states.
    pub(super) fn forward(&self, ops: &O, x: &O::Tensor, kv: &mut O::Kv<'_>, index: usize) -> Result<O::Tensor> {
        let [qkv, z, b, a] = ops.project([&self.in_proj_qkv, &self.in_proj_z, &self.in_proj_b, &self.in_proj_a], x)?;
        let y = ops.delta_net(&self.net, DeltaNetInputs { qkv: &qkv, a: &a, b: &b }, kv, index)?;
        ops.linear(&self.out_proj, &ops.gated_norm(&self.norm, &z, &y)?)
    }
}

fn delta_net(loader: &mut Loader, name: &str, config: &TextConfig) -> Result<DeltaNet> {
    let dims = &config.delta_net;
    let (channels, heads, taps) = (dims.channels(), dims.num_value_heads, dims.conv_kernel_dim);
    let rate = loader.vector(&format!("{name}A_log"), heads)?;
    if config.tensor_layout == TensorLayout::Gguf && rate.iter().any(|rate| *rate > 0.0) {
        let problem = "is above 0, so states would grow; convert the checkpoint again (-exp(A_log) is stored)";
        return Err(loader.error(&format!("{name}A_log"), problem));
    }
    let stored = loader.floats(&format!("{name}conv1d.weight"), &[channels, 1, taps])?;
    Ok(DeltaNet {
        dims: dims.clone(),
        order: match config.tensor_layout {
            TensorLayout::HuggingFace => HeadOrder::Grouped,
            TensorLayout::Gguf => HeadOrder::Tiled,
        },
        // (taps, channels): lanes run over channels.
        conv_weight: (0..taps).flat_map(|tap| stored.iter().skip(tap).step_by(taps)).copied().collect(),
        dt_bias: loader.vector(&format!("{name}dt_bias"), heads)?,
        rate: match config.tensor_layout {
            TensorLayout::HuggingFace => rate.into_iter().map(|a_log| -f64::from(a_log).exp()).collect(),
            TensorLayout::Gguf => rate.into_iter().map(f64::from).collect(),
        },
        isa: loader.isa(),
    })
}
