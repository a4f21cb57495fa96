//! The decoder layer: sandwich norms around attention and feed-forward, a per-layer input, an output scale.

use super::attention::Attention;
use super::config::{LayerConfig, TextConfig};
use super::mlp::Mlp;
use super::moe::Moe;
use super::per_layer::PerLayerInput;
use super::rope::PassAngles;
use crate::Result;
use crate::checkpoint::Loader;
use crate::ops::{Destination, Ops};

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
        let norm = |loader: &mut Loader, norm: &str| {
            to.norm(loader.norm(&format!("{name}{norm}.weight"), config.hidden_size, config.rms_norm_eps)?)
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            self_attn: Attention::load(loader, to, &format!("{name}self_attn."), config, layer)?,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            pre_feedforward_layernorm: norm(loader, "pre_feedforward_layernorm")?,
            mlp: Mlp::load(loader, to, &format!("{name}mlp."), [config.hidden_size, layer.intermediate_size])?,
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

    /// `h` `(rows, hidden)` to `(rows, hidden)`. `index` is the layer's index, `input` its per-layer input
    /// `(rows, width)`, if the model has one.
    pub(super) fn forward(
        &self,
        ops: &O,
        h: &O::Tensor,
        input: Option<&O::Tensor>,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<O::Tensor> {
        let attended = self.self_attn.forward(ops, &ops.norm(&self.input_layernorm, h)?, angles, kv, index)?;
        self.feed_forward(ops, h, &attended, input)
    }

    /// The part of [`DecoderLayer::forward`] that later rows need: K and V.
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

    /// The rest of `forward`, over K and V that `append` stored.
    pub(super) fn forward_appended(
        &self,
        ops: &O,
        h: &O::Tensor,
        input: Option<&O::Tensor>,
        angles: &PassAngles<O>,
        kv: &mut O::Kv<'_>,
        index: usize,
    ) -> Result<O::Tensor> {
        let attended = self.self_attn.attend(ops, &ops.norm(&self.input_layernorm, h)?, angles, kv, index)?;
        self.feed_forward(ops, h, &attended, input)
    }

    fn feed_forward(
        &self,
        ops: &O,
        h: &O::Tensor,
        attended: &O::Tensor,
        input: Option<&O::Tensor>,
    ) -> Result<O::Tensor> {
        let h = ops.add_norm(&self.post_attention_layernorm, h, attended, 1.0)?;

        let mut fed = self.mlp.forward(ops, &ops.norm(&self.pre_feedforward_layernorm, &h)?)?;
        if let Some(moe) = &self.moe {
            fed = moe.forward(ops, &h, &fed)?;
        }
        match (&self.per_layer_input, input) {
            (Some(branch), Some(input)) => {
                let h = ops.add_norm(&self.post_feedforward_layernorm, &h, &fed, 1.0)?;
                branch.forward(ops, &h, input, self.layer_scalar)
            }
            _ => ops.add_norm(&self.post_feedforward_layernorm, &h, &fed, self.layer_scalar),
        }
    }
}
