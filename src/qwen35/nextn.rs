//! The NextN (multi-token prediction) head: one attention layer that predicts the token after the next from the trunk's
//! hidden state and the next token's embedding. Embedding and output head are the trunk's unless
//! the checkpoint has others for it.

use super::attention::Attention;
use super::config::TextConfig;
use super::layer::DecoderLayer;
use super::norm::zero_centred;
use crate::Result;
use crate::checkpoint::{Checkpoint, Loader, TableUse};
use crate::ops::{Destination, Ops};

/// The head's own weights, on backend `O`.
pub(crate) struct Head<O: Ops> {
    pre_fc_norm_embedding: O::Norm,
    pre_fc_norm_hidden: O::Norm,
    fc: O::Linear, // (hidden, 2 * hidden): the embedding's half first
    layer: DecoderLayer<O, Attention<O>>,
    pub(super) norm: O::Norm,
    /// `None` is the trunk's, here and below.
    pub(super) embed_tokens: Option<O::Embedding>,
    pub(super) lm_head: Option<O::Linear>, // (vocab, hidden)
}

/// Tensors of a head with its own embedding and output head.
pub(super) const EMBED_TOKENS: &str = "mtp.embed_tokens.weight";
pub(super) const LM_HEAD: &str = "mtp.shared_head.head.weight";

/// Whether the checkpoint has a head that is read: in a GGUF file a block with `nextn.*`.
pub(super) fn has_nextn(checkpoint: &Checkpoint) -> bool {
    match checkpoint.gguf() {
        Some(gguf) => gguf.names().nextn.is_some(),
        None => checkpoint.names().iter().any(|name| name.starts_with("mtp.")),
    }
}

/// Whether a tensor belongs to a head: scales in a GGUF file have only the name in its block.
pub(super) fn is_nextn(checkpoint: &Checkpoint, name: &str) -> bool {
    let block = checkpoint.gguf().and_then(|gguf| gguf.names().nextn);
    name.starts_with("mtp.") || block.is_some_and(|block| name.starts_with(&format!("blk.{block}.")))
}

/// Whether a tensor belongs to a head that is not read: Ollama's GGUF files have it under `mtp.*`.
pub(super) fn is_unread_nextn(checkpoint: &Checkpoint, name: &str) -> bool {
    name.starts_with("mtp.") && checkpoint.gguf().is_some_and(|gguf| gguf.info(name).is_some())
}

impl<O: Ops> Head<O> {
    /// Loads the head to `to`, if the checkpoint has one.
    ///
    /// # Errors
    /// If it is incomplete, or those of `to`.
    pub(super) fn load(
        root: &mut Loader,
        to: &impl Destination<Ops = O>,
        checkpoint: &Checkpoint,
        config: &TextConfig,
    ) -> Result<Option<Self>> {
        if !has_nextn(checkpoint) {
            let path = checkpoint.path().display();
            if checkpoint.names().iter().any(|name| is_unread_nextn(checkpoint, name)) {
                tracing::warn!(%path, "the file's NextN head is under mtp.* instead of nextn.*; it is not used");
            } else if config.mtp_num_hidden_layers.is_some_and(|layers| layers > 0) {
                tracing::warn!(%path, "the configuration has a NextN head, but there are no mtp.* tensors; it is not used");
            }
            return Ok(None);
        }
        let hidden = config.hidden_size;
        let norm = |root: &mut Loader, name: &str| {
            to.norm(zero_centred(root, &format!("mtp.{name}.weight"), hidden, config, 1.0)?)
        };
        let attention = Attention::load(root, to, "mtp.layers.0.self_attn.", config)?;
        // A table that rows are gathered from stays in the file.
        let embed_tokens = match root.has(EMBED_TOKENS) || config.mtp_use_dedicated_embeddings {
            true => {
                let shape = [config.vocab_size, hidden];
                Some(to.embedding(root.embedding(EMBED_TOKENS, shape, TableUse::LookUp, |_| 1.0)?)?)
            }
            false => None,
        };
        let trunks = match config.tie_word_embeddings {
            true => format!("{}embed_tokens.weight", checkpoint.text_prefix()?),
            false => checkpoint.head_name().to_owned(),
        };
        let lm_head = match root.has(LM_HEAD) && !root.is_copy(LM_HEAD, &trunks)? {
            true => Some(to.linear(root.head(LM_HEAD, config.vocab_size, hidden)?)?),
            false => None,
        };
        Ok(Some(Self {
            pre_fc_norm_embedding: norm(root, "pre_fc_norm_embedding")?,
            pre_fc_norm_hidden: norm(root, "pre_fc_norm_hidden")?,
            fc: to.linear(root.linear("mtp.fc.weight", hidden, 2 * hidden)?)?,
            layer: DecoderLayer::load(root, to, "mtp.layers.0.", config, attention)?,
            norm: norm(root, "norm")?,
            embed_tokens,
            lm_head,
        }))
    }

    /// Hidden states before the final norm, `(rows, hidden)`, from the embeddings of tokens at `p + 1` and the hidden
    /// states of positions `p`, appended to `kv`.
    pub(super) fn forward(
        &self,
        ops: &O,
        embedding: &O::Tensor,
        hidden: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
    ) -> Result<O::Tensor> {
        let x = self.input(ops, embedding, hidden)?;
        self.layer.forward(ops, &x, |attention, x| attention.forward(ops, x, angles, kv, 0))
    }

    /// The part of [`Head::forward`] that later rows need: K and V.
    pub(super) fn append(
        &self,
        ops: &O,
        embedding: &O::Tensor,
        hidden: &O::Tensor,
        angles: &O::Angles,
        kv: &mut O::Kv<'_>,
    ) -> Result<()> {
        let x = self.layer.mixer_input(ops, &self.input(ops, embedding, hidden)?)?;
        self.layer.mixer.append(ops, &x, angles, kv, 0)
    }

    fn input(&self, ops: &O, embedding: &O::Tensor, hidden: &O::Tensor) -> Result<O::Tensor> {
        let embedding = ops.norm(&self.pre_fc_norm_embedding, embedding)?;
        let hidden = ops.norm(&self.pre_fc_norm_hidden, hidden)?;
        ops.linear(&self.fc, &ops.concat_columns(&embedding, &hidden)?)
    }
}
