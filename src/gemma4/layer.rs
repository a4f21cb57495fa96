//! The decoder layer: sandwich norms around attention and feed-forward, a per-layer input, an output scale.

use candle_core::Tensor;

use super::attention::Attention;
use super::config::{LayerConfig, TextConfig};
use super::mlp::Mlp;
use super::moe::Moe;
use super::per_layer::PerLayerInput;
use super::rope::PassAngles;
use crate::Result;
use crate::checkpoint::Loader;
use crate::kv::KvAccess;
use crate::nn::RmsNorm;

/// One layer of a target or of an assistant.
pub(super) struct DecoderLayer {
    pub(super) input_layernorm: RmsNorm,
    pub(super) self_attn: Attention,
    pub(super) post_attention_layernorm: RmsNorm,
    pub(super) pre_feedforward_layernorm: RmsNorm,
    pub(super) mlp: Mlp,
    pub(super) moe: Option<Moe>,
    pub(super) post_feedforward_layernorm: RmsNorm,
    pub(super) per_layer_input: Option<PerLayerInput>,
    pub(super) layer_scalar: f32,
}

impl DecoderLayer {
    pub(super) fn load(loader: &mut Loader, index: usize, config: &TextConfig, layer: &LayerConfig) -> Result<Self> {
        let name = format!("layers.{index}.");
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        Ok(Self {
            input_layernorm: loader.norm(&format!("{name}input_layernorm.weight"), hidden, eps)?,
            self_attn: Attention::load(loader, &format!("{name}self_attn."), config, layer)?,
            post_attention_layernorm: loader.norm(&format!("{name}post_attention_layernorm.weight"), hidden, eps)?,
            pre_feedforward_layernorm: loader.norm(&format!("{name}pre_feedforward_layernorm.weight"), hidden, eps)?,
            mlp: Mlp::load(loader, &format!("{name}mlp."), hidden, layer.intermediate_size)?,
            moe: config.moe.as_ref().map(|moe| Moe::load(loader, &name, config, moe)).transpose()?,
            post_feedforward_layernorm: loader.norm(
                &format!("{name}post_feedforward_layernorm.weight"),
                hidden,
                eps,
            )?,
            per_layer_input: match config.hidden_size_per_layer_input {
                0 => None,
                _ => Some(PerLayerInput::load(loader, &name, config)?),
            },
            // Not close to 1 in published weights, so a missing one is an error.
            layer_scalar: loader.vector(&format!("{name}layer_scalar"), 1)?[0],
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
        h: &Tensor,
        input: Option<&Tensor>,
        angles: &PassAngles,
        kv: &mut impl KvAccess,
        index: usize,
    ) -> Result<Tensor> {
        let attended = self.self_attn.forward(&self.input_layernorm.forward(h)?, angles, kv, index)?;
        let h = self.post_attention_layernorm.add_to(h, &attended, 1.0)?;

        let mut fed = self.mlp.forward(&self.pre_feedforward_layernorm.forward(&h)?)?;
        if let Some(moe) = &self.moe {
            fed = moe.forward(&h, &fed)?;
        }
        match (&self.per_layer_input, input) {
            (Some(branch), Some(input)) => {
                let h = self.post_feedforward_layernorm.add_to(&h, &fed, 1.0)?;
                branch.forward(&h, input, self.layer_scalar)
            }
            _ => self.post_feedforward_layernorm.add_to(&h, &fed, self.layer_scalar),
        }
    }
}
