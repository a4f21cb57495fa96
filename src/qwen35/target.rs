//! The target model.

use candle_core::Tensor;
use foretoken_kernels::Isa;

use super::config::TextConfig;
use super::layer::{DecoderLayer, Mixer};
use super::nextn::Head;
use super::norm::zero_centred;
use super::state::{DeltaNetMatrices, DeltaNetState};
use crate::checkpoint::{Checkpoint, LoadOptions, Loader, StepCost, TableUse, is_head};
use crate::kv::{Batch, KvCache, KvLayout, KvOptions, PagePool, SequenceState};
use crate::model::{Model, NextnHead, Output, Request, places, select_rows};
use crate::nn::{Embedding, Linear, RmsNorm, Rotary, linear};
use crate::{Error, Result};

/// A Qwen3.5 or 3.6 text model, dense or with experts, and its NextN head if the checkpoint has one.
pub struct Target {
    config: TextConfig,
    embed_tokens: Embedding,
    layers: Vec<DecoderLayer<Mixer>>,
    norm: RmsNorm,
    lm_head: Linear, // (vocab, hidden)
    rotary: Rotary,
    nextn: Option<Head>,
    step: StepCost,
    fingerprint: u64,
    isa: Isa,
}

impl Target {
    /// Loads a checkpoint; weights stay in the mapped file.
    ///
    /// # Errors
    /// If the configuration needs something that is not implemented, or a tensor is missing or has another shape. A NextN head is
    /// loaded if any of its tensors is present; then all must be.
    pub fn load(checkpoint: &Checkpoint, options: impl Into<LoadOptions>) -> Result<Self> {
        let options = options.into();
        let config = TextConfig::of(checkpoint)?;
        let (hidden, isa) = (config.hidden_size, options.isa);
        let mut loader = Loader::new(checkpoint, checkpoint.text_prefix()?, &options);
        let table_use = if config.tie_word_embeddings { TableUse::Tied } else { TableUse::LookUp };
        let embed_tokens = loader.embedding("embed_tokens.weight", [config.vocab_size, hidden], table_use, |_| 1.0)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            let name = format!("layers.{i}.");
            let mixer = Mixer::load(&mut loader, &name, &config, *layer)?;
            layers.push(DecoderLayer::load(&mut loader, &name, &config, mixer)?);
        }
        let norm = zero_centred(&mut loader, "norm.weight", hidden, &config, 1.0)?;
        let mut root = Loader::new(checkpoint, "", &options);
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(embed_tokens.weight().clone(), isa),
            false => root.head(checkpoint.head_name(), config.vocab_size, hidden)?,
        };
        let (step, fingerprint) = (loader.step_cost().and(root.step_cost()), loader.fingerprint(&config));
        let nextn = Head::load(&mut root, checkpoint, &config)?;
        loader.absorb(root);
        loader.finish(|name| is_vision(name) || is_head(name))?;
        let rotary = Rotary::of_leading(config.inverse_frequencies(), isa);
        let path = checkpoint.path().display();
        tracing::info!(%path, layers = layers.len(), hidden, nextn = nextn.is_some(), "target loaded");
        Ok(Self { config, embed_tokens, layers, norm, lm_head, rotary, nextn, step, fingerprint, isa })
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
    /// If an id is outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.embed_tokens.forward(ids)
    }

    /// Logits of hidden states after a final norm, the trunk's or the head's: `(rows, vocab)`.
    ///
    /// # Errors
    /// Candle's, if the shape does not fit.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        linear(&self.lm_head, hidden)
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
        let kv = KvCache::in_pool(self.config.kv_layout(), options, context, self.isa, pool)?;
        let delta_nets = self.layers.iter().filter_map(|layer| match &layer.mixer {
            Mixer::DeltaNet(delta_net) => Some(delta_net.recurrence()),
            Mixer::Attention(_) => None,
        });
        Ok(SequenceState::with_recurrent(kv, Box::new(DeltaNetState::new(delta_nets))))
    }

    fn forward(&self, batch: &mut Batch<'_>, request: &Request) -> Result<Output> {
        let mut h = self.embed(batch.ids())?;
        let angles = self.rotary.angles(batch.positions());
        let (mut delta_nets, mut taps) = (0, Vec::with_capacity(request.taps.len()));
        for (i, layer) in self.layers.iter().enumerate() {
            h = layer.forward(&h, |mixer, x| match mixer {
                Mixer::Attention(attention) => attention.forward(x, &angles, &mut batch.kv(), i),
                Mixer::DeltaNet(delta_net) => {
                    delta_nets += 1;
                    delta_net.forward(x, batch.rounds_mut(), delta_nets - 1)
                }
            })?;
            if request.taps.contains(&i) {
                taps.push(select_rows(&h, &request.hidden)?);
            }
        }
        let needed = request.rows();
        if needed.is_empty() {
            return Output::empty(self, taps);
        }
        let hidden = self.norm.forward(&select_rows(&h, &needed)?)?;
        let logits = self.logits(&select_rows(&hidden, &places(&request.logits, &needed))?)?;
        Ok(Output { logits, hidden: select_rows(&hidden, &places(&request.hidden, &needed))?, taps })
    }
}

impl NextnHead for Target {
    /// A cache of one layer. Per-layer formats apply only to the trunk.
    fn nextn_cache(&self, options: &KvOptions, pool: &PagePool) -> Result<KvCache> {
        let stores = vec![self.config.store()];
        let layout = KvLayout { stores, store_of_layer: vec![0], inverse_frequencies: Vec::new() };
        let options = KvOptions { layers: Vec::new(), ..options.clone() };
        KvCache::in_pool(layout, &options, self.config.max_position_embeddings, self.isa, pool)
    }

    fn nextn_rows(&self, batch: &mut Batch<'_>, hidden: &Tensor) -> Result<Tensor> {
        let head = self.nextn.as_ref().ok_or_else(|| Error::argument("nextn", "the checkpoint has no NextN head"))?;
        let angles = self.rotary.angles(batch.positions());
        let embed_tokens = head.embed_tokens.as_ref().unwrap_or(&self.embed_tokens);
        head.forward(&embed_tokens.forward(batch.ids())?, hidden, &angles, &mut batch.kv())
    }

    fn nextn_logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let own = self.nextn.as_ref().and_then(|head| head.lm_head.as_ref());
        linear(own.unwrap_or(&self.lm_head), hidden)
    }
}

/// Tensors of the vision tower, which text does not use.
pub(super) fn is_vision(name: &str) -> bool {
    // `v.` and `mm.` in combined GGUF files.
    ["visual.", "vision_", "v.", "mm."]
        .iter()
        .any(|tower| name.strip_prefix("model.").unwrap_or(name).starts_with(tower))
}
