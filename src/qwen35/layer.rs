//! The decoder layer: pre-norms around a token mixer and a feed-forward part.

use candle_core::Tensor;

use super::attention::Attention;
use super::config::{LayerType, TextConfig};
use super::delta_net::GatedDeltaNet;
use super::feed_forward::FeedForward;
use super::norm::zero_centred;
use crate::Result;
use crate::checkpoint::Loader;
use crate::nn::RmsNorm;

/// The token mixer.
pub(super) enum Mixer {
    DeltaNet(GatedDeltaNet),
    Attention(Attention),
}

/// One layer of the trunk, or of the NextN head.
pub(super) struct DecoderLayer<M> {
    input_layernorm: RmsNorm,
    pub mixer: M,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

impl Mixer {
    /// The mixer of the trunk's layer `name`.
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig, layer: LayerType) -> Result<Self> {
        Ok(match layer {
            LayerType::Linear => Self::DeltaNet(GatedDeltaNet::load(loader, &format!("{name}linear_attn."), config)?),
            LayerType::Full => Self::Attention(Attention::load(loader, &format!("{name}self_attn."), config)?),
        })
    }
}

impl<M> DecoderLayer<M> {
    /// The layer `name`, with its loaded mixer.
    pub(super) fn load(loader: &mut Loader, name: &str, config: &TextConfig, mixer: M) -> Result<Self> {
        let hidden = config.hidden_size;
        let norm = |loader: &mut Loader, norm: &str| {
            zero_centred(loader, &format!("{name}{norm}.weight"), hidden, config, 1.0)
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            mixer,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp: FeedForward::load(loader, &format!("{name}mlp."), config)?,
        })
    }

    /// `h` `(rows, hidden)` to `(rows, hidden)`; `mix` applies the mixer.
    pub(super) fn forward(&self, h: &Tensor, mix: impl FnOnce(&M, &Tensor) -> Result<Tensor>) -> Result<Tensor> {
        let h = (h + mix(&self.mixer, &self.input_layernorm.forward(h)?)?)?;
        let fed = self.mlp.forward(&self.post_attention_layernorm.forward(&h)?)?;
        Ok((h + fed)?)
    }
}
