//! The target model.

use candle_core::Tensor;

use super::config::TextConfig;
use super::layer::DecoderLayer;
use super::per_layer::{PerLayerEmbeddings, round_to};
use super::rope::Rotations;
use super::text_model::TextModel;
use crate::checkpoint::{Checkpoint, LoadOptions, Loader, StepCost, TableUse, is_head, is_inner_assistants, is_unread};
use crate::kv::{Batch, KvCache, KvLayout, KvOptions, PagePool, SequenceState};
use crate::model::{Model, Output, Request, weights_on_device};
use crate::ops::{CpuDestination, CpuOps, Destination};
use crate::{Error, Result};

/// A Gemma 4 text model of any published variant.
pub struct Target {
    config: TextConfig,
    layout: KvLayout,
    fingerprint: u64,
    step: StepCost,
    ops: CpuOps,
    model: Option<TextModel<CpuOps>>, // `None`: it is on a device
}

impl Target {
    /// Loads a checkpoint; floating-point weights stay in the mapped file, quantized ones are packed in memory.
    ///
    /// # Errors
    /// If config.json needs something that is not implemented, a tensor is missing or has another shape, or the load is
    /// cancelled.
    pub fn load(checkpoint: &Checkpoint, options: impl Into<LoadOptions>) -> Result<Self> {
        let options = options.into();
        let (target, model) = Self::load_to(&CpuDestination { isa: options.isa }, checkpoint, &options)?;
        Ok(Self { model: Some(model), ..target })
    }

    /// Loads a checkpoint to `to`, tensor by tensor. The returned host module has no weights.
    ///
    /// # Errors
    /// As [`Target::load`], or those of `to`.
    pub(crate) fn load_to<D: Destination>(
        to: &D,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
    ) -> Result<(Self, TextModel<D::Ops>)> {
        let config = checkpoint.target_config()?;
        for attention in config.layers.iter().filter(|layer| layer.kv_shared).map(|layer| layer.attention) {
            if config.kv_donor(attention).is_none() {
                let problem = format!("leaves no layer of {} to share K and V from", attention.name());
                let field = "num_kv_shared_layers".into();
                return Err(Error::Config { path: checkpoint.path().to_owned(), field, problem });
            }
        }
        let prefix = checkpoint.text_prefix()?;
        let mut loader = Loader::new(checkpoint, prefix, options).for_use(to.weight_use());
        let hidden = config.hidden_size;
        let table_use = if config.tie_word_embeddings { TableUse::Tied } else { TableUse::LookUp };
        let shape = [config.vocab_size, hidden];
        let embedding = loader
            .embedding("embed_tokens.weight", shape, table_use, |element| round_to(element, (hidden as f32).sqrt()))?;
        let embed_tokens = to.embedding(embedding)?;
        let per_layer = match config.hidden_size_per_layer_input {
            0 => None,
            _ => Some(PerLayerEmbeddings::load(&mut loader, to, &config)?),
        };
        let layers = config.layers.iter().enumerate();
        let layers: Result<Vec<_>> = layers.map(|(i, l)| DecoderLayer::load(&mut loader, to, i, &config, l)).collect();
        let layers = layers?;
        let norm = to.norm(loader.norm("norm.weight", hidden, config.rms_norm_eps)?)?;
        let mut root = loader.beside("");
        let lm_head = match config.tie_word_embeddings {
            true => to.tied_head(&embed_tokens),
            false => to.linear(root.head(checkpoint.head_name(), config.vocab_size, hidden)?)?,
        };
        let (step, fingerprint) = (loader.step_cost().and(root.step_cost()), loader.fingerprint(&config));
        loader.absorb(root);
        loader.finish(|name| is_unread(name, prefix, &config) || is_head(name))?;
        let inner = || checkpoint.names().iter().any(|name| is_inner_assistants(name));
        if checkpoint.gguf().is_some() && inner() {
            tracing::warn!(path = %checkpoint.path().display(), "the assistant inside the model's file is ignored");
        }
        let rotations = Rotations::new(&config, options.isa, to)?;
        tracing::info!(path = %checkpoint.path().display(), layers = config.layers.len(), hidden, "target loaded");
        let model = TextModel { config, embed_tokens, per_layer, layers, norm, lm_head, rotations };
        let (config, layout, ops) = (model.config.clone(), model.kv_layout(), CpuOps { isa: options.isa });
        Ok((Self { config, layout, fingerprint, step, ops, model: None }, model))
    }

    /// The configuration.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// The weights.
    ///
    /// # Errors
    /// If they are on a device.
    pub(crate) fn model(&self) -> Result<&TextModel<CpuOps>> {
        self.model.as_ref().ok_or_else(|| weights_on_device("target"))
    }

    /// The K/V layout: one store per layer that computes K and V, and the store of each layer.
    pub fn kv_layout(&self) -> KvLayout {
        self.layout.clone()
    }

    /// The scaled embeddings of `ids`: `(ids, hidden)`. The assistant's input as well.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, or the weights are on a device.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.model()?.embed_tokens.forward(ids)
    }
}

impl Model for Target {
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn num_readable_tokens(&self) -> usize {
        self.config.num_readable_tokens()
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.config.max_position_embeddings
    }

    fn bos_token_id(&self) -> Option<u32> {
        self.config.bos_token_id
    }

    fn step_cost(&self) -> StepCost {
        self.step
    }

    fn fingerprint(&self) -> Result<u64> {
        Ok(self.fingerprint)
    }

    fn new_state(&self, options: &KvOptions, pool: &PagePool) -> Result<SequenceState> {
        let context = self.config.max_position_embeddings;
        Ok(SequenceState::new(KvCache::in_pool(self.kv_layout(), options, context, self.ops.isa, pool)?))
    }

    fn forward(&self, batch: &mut Batch<'_>, request: &Request) -> Result<Output> {
        let ids = batch.ids().to_vec();
        self.model()?.forward(&self.ops, &ids, ids.len(), &mut batch.kv(), request)?.into_output(self)
    }
}
