//! What a checkpoint says about its model: configuration, tokenizer, sampling.

use std::path::PathBuf;

use super::fields::{Fields, is_present};
use super::files::{Checkpoint, Files};
use super::generation::GenerationTokens;
use super::gguf::Gguf;
use super::head_names::HEADS;
use super::unsupported_tensors::{refuse_other_head, refuse_quantized, refuse_types};
use super::{generation, gguf};
use crate::Result;
use crate::gemma4::{AssistantConfig, TextConfig};
use crate::sampler::Sampling;
use crate::tokenizer::{Tokenizer, Tokens};

/// Where a configuration is.
pub(crate) enum ConfigSource<'a> {
    /// In config.json.
    Json(Fields),
    /// In metadata.
    Gguf(&'a Gguf),
}

impl Checkpoint {
    /// The configuration of a target.
    ///
    /// # Errors
    /// If it is missing, malformed, of another model, or needs something that is not implemented.
    pub fn target_config(&self) -> Result<TextConfig> {
        match &self.files {
            Files::HuggingFace(_) => {
                let fields = self.config()?;
                refuse_quantized(&fields, self)?;
                refuse_other_head(&fields)?;
                let mut config = TextConfig::target(&fields)?;
                config.tie_word_embeddings = config.tie_word_embeddings && !self.unties_head()?;
                Ok(config)
            }
            Files::Gguf(gguf) => {
                let config = gguf::target_config(gguf)?;
                refuse_types(self).map(|()| config)
            }
        }
    }

    /// The name of the output head: published, or nested in another way if it is there.
    pub(crate) fn head_name(&self) -> &'static str {
        HEADS.into_iter().find(|name| self.has(name)).unwrap_or(HEADS[0])
    }

    /// Whether the files have an output head with other values than the embedding, although the configuration ties
    /// the two. As in transformers, it is used then.
    ///
    /// # Errors
    /// If one of the two cannot be read.
    pub(crate) fn unties_head(&self) -> Result<bool> {
        if let Some(known) = self.has_own_head.get() {
            return Ok(*known);
        }
        let (Files::HuggingFace(_), Ok(prefix)) = (&self.files, self.text_prefix()) else { return Ok(false) };
        let head = self.head_name();
        let unties = self.has(head) && !self.is_copy(head, &format!("{prefix}embed_tokens.weight"))?;
        if unties {
            let path = self.path.display();
            tracing::warn!(%path, "tie_word_embeddings is true, but the output head differs from the embedding and is used");
        }
        Ok(*self.has_own_head.get_or_init(|| unties))
    }

    /// Whether the tensor `name` is bit for bit the tensor `original`; not if one is missing.
    ///
    /// # Errors
    /// If one cannot be read.
    pub(crate) fn is_copy(&self, name: &str, original: &str) -> Result<bool> {
        let (Some(own), Some(original)) = (self.get(name)?, self.get(original)?) else { return Ok(false) };
        let is_copy = own.dtype == original.dtype
            && own.shape == original.shape
            && own.bytes.as_slice() == original.bytes.as_slice();
        if is_copy {
            [&own, &original].iter().for_each(|tensor| tensor.bytes.release_all());
        }
        Ok(is_copy)
    }

    /// The configuration's source, for families other than Gemma 4.
    ///
    /// # Errors
    /// If it is missing or malformed, or the weights have an unsupported quantization.
    pub(crate) fn config_source(&self) -> Result<ConfigSource<'_>> {
        match &self.files {
            Files::HuggingFace(_) => {
                let fields = self.config()?;
                refuse_quantized(&fields, self)?;
                refuse_other_head(&fields)?;
                Ok(ConfigSource::Json(fields))
            }
            Files::Gguf(gguf) => refuse_types(self).map(|()| ConfigSource::Gguf(gguf)),
        }
    }

    /// The configuration of an assistant.
    ///
    /// # Errors
    /// As [`Checkpoint::target_config`].
    pub fn assistant_config(&self) -> Result<AssistantConfig> {
        match &self.files {
            Files::HuggingFace(_) => {
                let fields = self.config()?;
                refuse_quantized(&fields, self)?;
                let mut config = AssistantConfig::read(&fields)?;
                config.text.tie_word_embeddings = config.text.tie_word_embeddings && !self.unties_head()?;
                Ok(config)
            }
            Files::Gguf(gguf) => {
                let config = gguf::assistant_config(gguf)?;
                refuse_types(self).map(|()| config)
            }
        }
    }

    /// End-of-generation and suppressed tokens from `generation_config.json` or metadata.
    ///
    /// # Errors
    /// If `generation_config.json` or a metadata key is malformed.
    pub fn generation_tokens(&self) -> Result<GenerationTokens> {
        match &self.files {
            Files::HuggingFace(_) => generation::tokens(&self.path),
            Files::Gguf(gguf) => Ok(GenerationTokens { end: Vec::new(), suppressed: gguf::suppressed_tokens(gguf)? }),
        }
    }

    /// The publisher's sampling parameters, from `generation_config.json` or metadata; `None` if there are none, they
    /// are greedy, or need a sampler that is not implemented (with a warning).
    ///
    /// # Errors
    /// If one is malformed or out of its range.
    pub fn sampling_defaults(&self) -> Result<Option<Sampling>> {
        match &self.files {
            Files::HuggingFace(_) => generation::sampling(&self.path),
            Files::Gguf(gguf) => gguf::sampling_defaults(gguf),
        }
    }

    /// The tokenizer, whose ids must be below `vocab_size`; `None` if the checkpoint has none. For a GGUF file it is the
    /// file's own, with a warning if a tokenizer.json next to it has other tokens. That one is used if the file has no
    /// tokenizer, or one that cannot be read and has the same tokens.
    ///
    /// # Errors
    /// If it is malformed, or an id is outside the model's vocabulary.
    pub fn tokenizer(&self, vocab_size: usize) -> Result<Option<Tokenizer>> {
        match &self.files {
            Files::HuggingFace(_) => {
                let path = self.path.join("tokenizer.json");
                if is_present(&path) { Tokenizer::read(&path, vocab_size).map(Some) } else { Ok(None) }
            }
            Files::Gguf(gguf) => {
                let beside = Some(self.path.with_file_name("tokenizer.json")).filter(|beside| is_present(beside));
                let read = |beside: &PathBuf| Tokenizer::read(beside, vocab_size);
                match (gguf::tokenizer(gguf), &beside) {
                    (Ok(Some(own)), beside) => {
                        let same = |tokens: Tokens| gguf::check_tokens(gguf, tokens.spellings());
                        if let Some(Err(error)) = beside.as_ref().map(|beside| Tokens::read(beside).and_then(same)) {
                            tracing::warn!(%error, "the tokenizer.json next to the GGUF file is not used");
                        }
                        Tokenizer::new(own, &self.path, vocab_size).map(Some)
                    }
                    (Ok(None), beside) => beside.as_ref().map(read).transpose(),
                    (Err(error), Some(beside)) => {
                        let same = |beside: Tokenizer| gguf::check_tokenizer(gguf, &beside).map(|()| beside);
                        read(beside).and_then(same).map(Some).map_err(|_| error)
                    }
                    (Err(error), None) => Err(error),
                }
            }
        }
    }
}
