//! The decoder layer: pre-norms around a token mixer and a feed-forward part.

use super::attention::Attention;
use super::config::{LayerType, TextConfig};
use super::delta_net::GatedDeltaNet;
use super::feed_forward::FeedForward;
use super::norm::zero_centred;
use crate::Result;
use crate::checkpoint::Loader;
use crate::ops::{Destination, Ops};

/// The token mixer.
pub(super) enum Mixer<O: Ops> {
    DeltaNet(GatedDeltaNet<O>),
    Attention(Attention<O>),
}

/// One layer of the trunk, or of the NextN head.
pub(super) struct DecoderLayer<O: Ops, M> {
    input_layernorm: O::Norm,
    pub mixer: M,
    post_attention_layernorm: O::Norm,
    mlp: FeedForward<O>,
}

impl<O: Ops> Mixer<O> {
    /// The mixer of the trunk's layer `name`.
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
        layer: LayerType,
    ) -> Result<Self> {
        Ok(match layer {
            LayerType::Linear => {
                Self::DeltaNet(GatedDeltaNet::load(loader, to, &format!("{name}linear_attn."), config)?)
            }
            LayerType::Full => Self::Attention(Attention::load(loader, to, &format!("{name}self_attn."), config)?),
        })
    }
}

impl<O: Ops, M> DecoderLayer<O, M> {
    /// The layer `name`, with its loaded mixer.
    pub(super) fn load(
        loader: &mut Loader,
        to: &impl Destination<Ops = O>,
        name: &str,
        config: &TextConfig,
        mixer: M,
    ) -> Result<Self> {
        let hidden = config.hidden_size;
        let norm = |loader: &mut Loader, norm: &str| {
            to.norm(zero_centred(loader, &format!("{name}{norm}.weight"), hidden, config, 1.0)?)
        };
        Ok(Self {
            input_layernorm: norm(loader, "input_layernorm")?,
            mixer,
            post_attention_layernorm: norm(loader, "post_attention_layernorm")?,
            mlp: FeedForward::load(loader, to, &format!("{name}mlp."), config)?,
        })
    }

    /// The mixer's input, of `h` `(rows, hidden)`.
    pub(super) fn mixer_input(&self, ops: &O, h: &O::Tensor) -> Result<O::Tensor> {
        ops.norm(&self.input_layernorm, h)
    }

    /// `h` `(rows, hidden)` to `(rows, hidden)`; `mix` applies the mixer.
    pub(super) fn forward(
        &self,
        ops: &O,
        h: &O::Tensor,
        mix: impl FnOnce(&M, &O::Tensor) -> Result<O::Tensor>,
    ) -> Result<O::Tensor> {
        let h = ops.add(h, &mix(&self.mixer, &self.mixer_input(ops, h)?)?)?;
        let feed_forward = self.mlp.forward(ops, &ops.norm(&self.post_attention_layernorm, &h)?)?;
        ops.add(&h, &feed_forward)
    }
}
