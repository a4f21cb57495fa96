//! The NextN (multi-token prediction) head: one attention layer that predicts the token after the next from the trunk's
//! hidden state and the next token's embedding. Embedding and output head are the trunk's unless the checkpoint has others for it.

use candle_core::Tensor;

use super::attention::Attention;
use super::config::TextConfig;
use super::layer::DecoderLayer;
use super::norm::zero_centred;
use crate::Result;
use crate::checkpoint::{Checkpoint, Loader, TableUse};
use crate::kv::KvAccess;
use crate::nn::{Angles, Embedding, Linear, RmsNorm, linear};
use crate::ops::{CpuOps, OnCpu};

/// The head's own weights.
pub(super) struct Head {
    pre_fc_norm_embedding: RmsNorm,
    pre_fc_norm_hidden: RmsNorm,
    fc: Linear, // (hidden, 2 * hidden): the embedding's half first
    layer: DecoderLayer<CpuOps, Attention<CpuOps>>,
    norm: RmsNorm,
    /// `None` is the trunk's, here and below.
    pub(super) embed_tokens: Option<Embedding>,
    pub(super) lm_head: Option<Linear>, // (vocab, hidden)
}

/// Tensors of a head with its own embedding and output head.
const EMBED_TOKENS: &str = "mtp.embed_tokens.weight";
pub(super) const LM_HEAD: &str = "mtp.shared_head.head.weight";

impl Head {
    /// The head, if the checkpoint has one.
    ///
    /// # Errors
    /// If it is incomplete.
    pub(super) fn load(root: &mut Loader, checkpoint: &Checkpoint, config: &TextConfig) -> Result<Option<Self>> {
        if !checkpoint.names().iter().any(|name| name.starts_with("mtp.")) {
            if config.mtp_num_hidden_layers.is_some_and(|layers| layers > 0) {
                let path = checkpoint.path().display();
                tracing::warn!(%path, "the configuration has a NextN head, but there are no mtp.* tensors; it is not used");
            }
            return Ok(None);
        }
        let hidden = config.hidden_size;
        let norm =
            |root: &mut Loader, name: &str| zero_centred(root, &format!("mtp.{name}.weight"), hidden, config, 1.0);
        let to = &OnCpu { isa: root.isa() };
        let attention = Attention::load(root, to, "mtp.layers.0.self_attn.", config)?;
        // A table that rows are gathered from stays in the file.
        let embed_tokens = match root.has(EMBED_TOKENS) || config.mtp_use_dedicated_embeddings {
            true => Some(root.embedding(EMBED_TOKENS, [config.vocab_size, hidden], TableUse::LookUp, |_| 1.0)?),
            false => None,
        };
        let trunks = match config.tie_word_embeddings {
            true => format!("{}embed_tokens.weight", checkpoint.text_prefix()?),
            false => checkpoint.head_name().to_owned(),
        };
        let lm_head = match root.has(LM_HEAD) && !root.is_copy(LM_HEAD, &trunks)? {
            true => Some(root.head(LM_HEAD, config.vocab_size, hidden)?),
            false => None,
        };
        Ok(Some(Self {
            pre_fc_norm_embedding: norm(root, "pre_fc_norm_embedding")?,
            pre_fc_norm_hidden: norm(root, "pre_fc_norm_hidden")?,
            fc: root.linear("mtp.fc.weight", hidden, 2 * hidden)?,
            layer: DecoderLayer::load(root, to, "mtp.layers.0.", config, attention)?,
            norm: norm(root, "norm")?,
            embed_tokens,
            lm_head,
        }))
    }

    /// Hidden states `(rows, hidden)` from the embeddings of tokens at `p + 1` and the hidden states of positions `p`, appended
    /// to `kv`.
    pub(super) fn forward(
        &self,
        ops: &CpuOps,
        embedding: &Tensor,
        hidden: &Tensor,
        angles: &Angles,
        kv: &mut dyn KvAccess,
    ) -> Result<Tensor> {
        let embedding = self.pre_fc_norm_embedding.forward(embedding)?;
        let hidden = self.pre_fc_norm_hidden.forward(hidden)?;
        let x = linear(&self.fc, &Tensor::cat(&[&embedding, &hidden], 1)?)?;
        let h = self.layer.forward(ops, &x, |attention, x| attention.forward(ops, x, angles, kv, 0))?;
        self.norm.forward(&h)
    }
}
