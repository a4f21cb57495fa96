//! The decoder layer: sandwich norms around attention and feed-forward, a per-layer input, an output scale.

use super::attention::Attention;
use super::config::{LayerConfig, TextConfig};
use super::moe::Moe;
use super::per_layer::PerLayerInput;
use super::rope::PassAngles;
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::Gate;
use crate::ops::{Destination, Mlp, Ops};

/// One layer of a target or of an assistant.
pub(super) struct DecoderLayer<O: Ops> {
    input_layernorm: O::Norm,
    self_attn: Attention<O>,
    post_attention_layernorm: O::Norm,
    pre_feedforward_layernorm: O::Norm,
    mlp: Mlp<O>,
    moe: Option<Moe<O>>,
    post_feedforward_layernorm: O::Norm,
    per_layer_input: Option<PerLayerInput<O>>,
    layer_scalar: f32,
}

impl<O: Ops> DecoderLayer<O> {
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        index: usize,
        config: &TextConfig,
        layer: &LayerConfig,
    ) -> Result<Self> {
        let name = format!("layers.{index}.");
        let widths = [config.hidden_size, layer.intermediate_size];
        let norm = |loader: &mut Loader, norm: &str| {
            to.norm(loader.norm(&format!("{name}{norm}.weight"), config.hidden_size, config.rms_norm_eps)?)
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            self_attn: Attention::load(loader, to, &format!("{name}self_attn."), config, layer)?,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            pre_feedforward_layernorm: norm(loader, "pre_feedforward_layernorm")?,
            mlp: Mlp::load(loader, to, &format!("{name}mlp."), widths, Gate::GeluTanh)?,
            moe: config.moe.as_ref().map(|moe| Moe::load(loader, to, &name, config, moe)).transpose()?,
            post_feedforward_layernorm: norm(loader, "post_feedforward_layernorm")?,
            per_layer_input: match config.hidden_size_per_layer_input {
                0 => None,
                _ => Some(PerLayerInput::load(loader, to, &name, config)?),
            },
            // Not close to 1 in published weights, so a missing one is an error.
            layer_scalar: loader.factors(&format!("{name}layer_scalar"), 1)?[0],
        })
    }

    /// The key norm's weight if K = V: K is V, normed with it and rotated.
    pub(super) fn k_eq_v_weight(&self) -> Option<&[f32]> {
        self.self_attn.k_eq_v_weight()
    }

    /// The part of [`DecoderLayer::forward`] that later rows need: K and V. `index` is the layer's index.
    pub(super) fn append(
        &self,
        ops: &O,
        h: &O::Tensor,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<()> {
        self.self_attn.append(ops, &ops.norm(&self.input_layernorm, h)?, angles, kv, index)
    }

    /// `h` `(rows, hidden)` to `(rows, hidden)`. `input` is the layer's per-layer input `(rows, width)`, if the model
    /// has one; `attend` applies the attention.
    pub(super) fn forward(
        &self,
        ops: &O,
        h: &O::Tensor,
        input: Option<&O::Tensor>,
        attend: impl FnOnce(&Attention<O>, &O::Tensor) -> Result<O::Tensor>,
    ) -> Result<O::Tensor> {
        let attended = attend(&self.self_attn, &ops.norm(&self.input_layernorm, h)?)?;
        let h = ops.add_norm(&self.post_attention_layernorm, h, &attended, 1.0)?;

        let mut feed_forward = self.mlp.forward(ops, &ops.norm(&self.pre_feedforward_layernorm, &h)?)?;
        if let Some(moe) = &self.moe {
            feed_forward = moe.forward(ops, &h, &feed_forward)?;
        }
        match (&self.per_layer_input, input) {
            (Some(branch), Some(input)) => {
                let h = ops.add_norm(&self.post_feedforward_layernorm, &h, &feed_forward, 1.0)?;
                branch.forward(ops, &h, input, self.layer_scalar)
            }
            _ => ops.add_norm(&self.post_feedforward_layernorm, &h, &feed_forward, self.layer_scalar),
        }
    }
}
