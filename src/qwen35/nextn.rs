//! The NextN (multi-token prediction) head: one attention layer that predicts the token after the next from the trunk's
//! hidden state and the next token's embedding. Embedding and output head are the trunk's.

use candle_core::Tensor;

use super::attention::Attention;
use super::config::TextConfig;
use super::layer::DecoderLayer;
use super::norm::zero_centred;
use super::target::Target;
use crate::checkpoint::{Checkpoint, Loader};
use crate::kv::{KvAccess, KvCache, KvLayout, KvOptions, PagePool, Round};
use crate::nn::{Linear, RmsNorm, linear};
use crate::{Error, Result};

/// The head's own weights.
pub(crate) struct NextnHead {
    pre_fc_norm_embedding: RmsNorm,
    pre_fc_norm_hidden: RmsNorm,
    fc: Linear, // (hidden, 2 * hidden): the embedding's half first
    layer: DecoderLayer<Attention>,
    norm: RmsNorm,
}

impl NextnHead {
    /// The head, if the checkpoint has one.
    ///
    /// # Errors
    /// If it is incomplete.
    pub(super) fn load(root: &mut Loader, checkpoint: &Checkpoint, config: &TextConfig) -> Result<Option<Self>> {
        if !checkpoint.names().iter().any(|name| name.starts_with("mtp.")) {
            if config.mtp_num_hidden_layers.is_some_and(|layers| layers > 0) {
                let path = checkpoint.path().display();
                tracing::warn!(%path, "the configuration names a NextN head, but there are no mtp.* tensors: none drafts");
            }
            return Ok(None);
        }
        let hidden = config.hidden_size;
        let norm =
            |root: &mut Loader, name: &str| zero_centred(root, &format!("mtp.{name}.weight"), hidden, config, 1.0);
        let attention = Attention::load(root, "mtp.layers.0.self_attn.", config)?;
        Ok(Some(Self {
            pre_fc_norm_embedding: norm(root, "pre_fc_norm_embedding")?,
            pre_fc_norm_hidden: norm(root, "pre_fc_norm_hidden")?,
            fc: root.linear("mtp.fc.weight", hidden, 2 * hidden)?,
            layer: DecoderLayer::load(root, "mtp.layers.0.", config, attention)?,
            norm: norm(root, "norm")?,
        }))
    }
}

impl Target {
    /// An empty cache for the NextN head's one layer; its pages come from `pool`. Formats of single layers are the
    /// trunk's.
    ///
    /// # Errors
    /// As [`KvCache::in_pool`].
    pub fn nextn_cache(&self, options: &KvOptions, pool: &PagePool) -> Result<KvCache> {
        let stores = vec![self.config().store()];
        let layout = KvLayout { stores, store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        let options = KvOptions { layers: Vec::new(), ..options.clone() };
        KvCache::in_pool(layout, &options, self.config().max_position_embeddings, self.isa(), pool)
    }

    /// One pass of the NextN head over rows (hidden state of position `p`, token at `p + 1`), staged in `round`: the
    /// hidden states `(rows, hidden)`, of which [`Target::logits`] makes the logits of the tokens at `p + 2`.
    ///
    /// # Errors
    /// If there is no head, an id is outside the vocabulary, a number is not finite, or memory is exhausted.
    pub fn nextn_rows(&self, ids: &[u32], hidden: &Tensor, round: &mut Round<'_>) -> Result<Tensor> {
        let head = self.nextn().ok_or_else(|| Error::argument("nextn", "the checkpoint has no such head"))?;
        let embedding = head.pre_fc_norm_embedding.forward(&self.embed(ids)?)?;
        let hidden = head.pre_fc_norm_hidden.forward(hidden)?;
        let x = linear(&head.fc, &Tensor::cat(&[&embedding, &hidden], 1)?)?;
        let angles = self.rotary().angles(round.positions());
        let h = head.layer.forward(&x, |attention, x| attention.forward(x, &angles, round, 0))?;
        head.norm.forward(&h)
    }
}
