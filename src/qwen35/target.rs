//! The target model.

use candle_core::Tensor;

use super::config::TextConfig;
use super::layer::{DecoderLayer, Mixer};
use super::nextn::{Head, is_nextn, is_unread_nextn};
use super::norm::zero_centred;
use super::text_model::TextModel;
use crate::checkpoint::{Checkpoint, LoadOptions, Loader, StepCost, TableUse, is_head, is_tower};
use crate::kv::{
    Batch, DeltaNetMatrices, DeltaNetState, KvCache, KvOptions, PagePool, Recurrent, SequenceState, available_memory,
};
use crate::model::{Model, NextnHead, Output, Request, weights_on_device};
use crate::nn::{Rotary, linear};
use crate::ops::{CpuDestination, CpuOps, Destination, Ops};
use crate::{Error, Result};

/// A Qwen3.5 or 3.6 text model, dense or with experts, and its NextN head if the checkpoint has one.
pub struct Target {
    config: TextConfig,
    ops: CpuOps,
    model: Option<TextModel<CpuOps>>, // `None`: it is on a device
    nextn: Option<Head<CpuOps>>,      // `None`: there is none, or it is on a device
    step: StepCost,
    fingerprint: u64,
}

/// The weights of a target on backend `O`.
pub(crate) struct Weights<O: Ops> {
    pub(super) model: TextModel<O>,
    pub(super) nextn: Option<Head<O>>,
}

impl Target {
    /// Loads a checkpoint; floating-point weights stay in the mapped file, quantized ones are packed in memory.
    ///
    /// # Errors
    /// If the configuration needs something that is not implemented, a tensor is missing or has another shape, or the
    /// load is cancelled. Unless the options omit it, a NextN head is loaded if any of its tensors is present; then all
    /// must be.
    pub fn load(checkpoint: &Checkpoint, options: impl Into<LoadOptions>) -> Result<Self> {
        let options = options.into();
        let (target, Weights { model, nextn }) =
            Self::load_to(&CpuDestination { isa: options.isa }, checkpoint, &options)?;
        Ok(Self { model: Some(model), nextn, ..target })
    }

    /// Loads a checkpoint to `to`, tensor by tensor. The returned host module has no weights.
    ///
    /// # Errors
    /// As [`Target::load`], or those of `to`.
    pub(crate) fn load_to<D: Destination>(
        to: &D,
        checkpoint: &Checkpoint,
        options: &LoadOptions,
    ) -> Result<(Self, Weights<D::Ops>)> {
        let config = TextConfig::of(checkpoint)?;
        let hidden = config.hidden_size;
        let mut loader = Loader::new(checkpoint, checkpoint.text_prefix()?, options).for_use(to.weight_use());
        let table_use = if config.tie_word_embeddings { TableUse::Tied } else { TableUse::LookUp };
        let shape = [config.vocab_size, hidden];
        let embed_tokens = to.embedding(loader.embedding("embed_tokens.weight", shape, table_use, |_| 1.0)?)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            let name = format!("layers.{i}.");
            let mixer = Mixer::load(&mut loader, to, &name, &config, *layer)?;
            layers.push(DecoderLayer::load(&mut loader, to, &name, &config, mixer)?);
        }
        let norm = to.norm(zero_centred(&mut loader, "norm.weight", hidden, &config, 1.0)?)?;
        let mut root = loader.beside("");
        let lm_head = match config.tie_word_embeddings {
            true => to.tied_head(&embed_tokens),
            false => to.linear(root.head(checkpoint.head_name(), config.vocab_size, hidden)?)?,
        };
        let (step, fingerprint) = (loader.step_cost().and(root.step_cost()), loader.fingerprint(&config));
        let nextn = if options.nextn { Head::load(&mut root, to, checkpoint, &config)? } else { None };
        let is_unread = if options.nextn { is_unread_nextn } else { is_nextn };
        loader.absorb(root);
        loader.finish(|name| is_tower(name) || is_head(name) || is_unread(checkpoint, name))?;
        let rotary = to.rotary(Rotary::of_leading(config.inverse_frequencies(), options.isa))?;
        let path = checkpoint.path().display();
        tracing::info!(%path, layers = layers.len(), hidden, nextn = nextn.is_some(), "target loaded");
        let ops = CpuOps { isa: options.isa };
        let target = Self { config: config.clone(), ops, model: None, nextn: None, step, fingerprint };
        let model = TextModel { config, embed_tokens, layers, norm, lm_head, rotary };
        Ok((target, Weights { model, nextn }))
    }

    /// The weights.
    ///
    /// # Errors
    /// If they are on a device.
    fn model(&self) -> Result<&TextModel<CpuOps>> {
        self.model.as_ref().ok_or_else(|| weights_on_device("target"))
    }

    /// The configuration.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// Whether there is a NextN head.
    pub fn has_nextn(&self) -> bool {
        self.nextn.is_some()
    }

    /// The embeddings of `ids`: `(ids, hidden)`.
    ///
    /// # Errors
    /// If an id is outside the vocabulary, or the weights are on a device.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.model()?.embed_tokens.forward(ids)
    }

    /// Logits of hidden states after a final norm, the trunk's or the head's: `(rows, vocab)`.
    ///
    /// # Errors
    /// Candle's, if the shape does not fit; or if the weights are on a device.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(&self.model()?.lm_head, hidden)
    }

    /// The NextN head, and the embeddings of `ids` for it.
    fn nextn_inputs(&self, ids: &[u32]) -> Result<(&Head<CpuOps>, Tensor)> {
        let head = self.nextn.as_ref().ok_or_else(|| Error::argument("nextn", "the checkpoint has no NextN head"))?;
        let embed_tokens = head.embed_tokens.as_ref().unwrap_or(&self.model()?.embed_tokens);
        Ok((head, embed_tokens.forward(ids)?))
    }

    /// The committed state of the sequence's delta nets, first to last.
    ///
    /// # Errors
    /// If the state is another model's.
    pub fn delta_nets(&self, state: &SequenceState) -> Result<Vec<DeltaNetMatrices>> {
        let missing = || Error::argument("state", "is another model's: it has no delta nets");
        Ok(state.recurrent::<DeltaNetState>().ok_or_else(missing)?.matrices())
    }
}

impl Model for Target {
    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn max_position_embeddings(&self) -> usize {
        self.config.max_position_embeddings
    }

    fn step_cost(&self) -> StepCost {
        self.step
    }

    fn fingerprint(&self) -> Result<u64> {
        Ok(self.fingerprint)
    }

    fn new_state(&self, options: &KvOptions, pool: &PagePool) -> Result<SequenceState> {
        // A device has the state of its sequences; this one only cannot be truncated.
        let delta_nets = self.model.iter().flat_map(TextModel::delta_nets);
        let delta_nets = DeltaNetState::new(delta_nets, available_memory())?;
        let memory = options.memory.or_else(|| pool.available_beside(delta_nets.bytes() as u64));
        let (context, options) = (self.config.max_position_embeddings, KvOptions { memory, ..options.clone() });
        let kv = KvCache::in_pool(self.config.kv_layout(), &options, context, self.ops.isa, pool)?;
        Ok(SequenceState::with_recurrent(kv, Box::new(delta_nets)))
    }

    fn forward(&self, batch: &mut Batch<'_>, request: &Request) -> Result<Output> {
        let ids = batch.ids().to_vec();
        self.model()?.forward(&self.ops, &ids, ids.len(), &mut batch.kv(), request)?.into_output(self)
    }
}

impl NextnHead for Target {
    /// A cache of one layer. Per-layer formats apply only to the trunk.
    fn nextn_cache(&self, options: &KvOptions, pool: &PagePool) -> Result<KvCache> {
        let layout = self.config.nextn_kv_layout();
        let options = KvOptions { layers: Vec::new(), ..options.clone() };
        KvCache::in_pool(layout, &options, self.config.max_position_embeddings, self.ops.isa, pool)
    }

    fn nextn_rows(&self, batch: &mut Batch<'_>, hidden: &Tensor) -> Result<Tensor> {
        let (head, embedding) = self.nextn_inputs(batch.ids())?;
        let mut kv = batch.kv();
        let angles = self.ops.angles(&self.model()?.rotary, &kv)?;
        let h = head.forward(&self.ops, &embedding, hidden, &angles, &mut kv)?;
        self.ops.norm(&head.norm, &h)
    }

    fn nextn_append(&self, batch: &mut Batch<'_>, hidden: &Tensor) -> Result<()> {
        let (head, embedding) = self.nextn_inputs(batch.ids())?;
        let mut kv = batch.kv();
        let angles = self.ops.angles(&self.model()?.rotary, &kv)?;
        head.append(&self.ops, &embedding, hidden, &angles, &mut kv)
    }

    fn nextn_logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let own = self.nextn.as_ref().and_then(|head| head.lm_head.as_ref());
        linear(own.unwrap_or(&self.model()?.lm_head), hidden)
    }
}
