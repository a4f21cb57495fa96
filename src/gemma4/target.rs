//! The model whose text is wanted.

use candle_core::Tensor;
use foretoken_kernels::activation::soft_cap;
use foretoken_kernels::{ElementType, Isa};
use half::{bf16, f16};

use super::config::TextConfig;
use super::layer::DecoderLayer;
use super::per_layer::PerLayerEmbeddings;
use super::rope::Rotations;
use crate::checkpoint::{Checkpoint, LoadOptions, Loader, StepCost, TableUse};
use crate::kv::{KvLayout, Round};
use crate::nn::{Embedding, F32View, Linear, RmsNorm};
use crate::{Error, Result};

/// A Gemma 4 text model of any published variant.
pub struct Target {
    pub(super) config: TextConfig,
    pub(super) embed_tokens: Embedding,
    pub(super) per_layer: Option<PerLayerEmbeddings>,
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: RmsNorm,
    pub(super) lm_head: Linear, // (vocab, hidden)
    pub(super) rotations: Rotations,
    isa: Isa,
    pub(super) step: StepCost,
}

/// Which rows of a pass are wanted. Layers that only read K and V compute no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Every row (verification).
    All,
    /// The newest row (the end of a prompt, a decode step).
    Last,
    /// None: only K and V (the earlier chunks of a prompt).
    Nothing,
}

/// The wanted rows' results.
pub struct Output {
    /// `(rows, vocab)`, after the soft cap.
    pub logits: Tensor,
    /// `(rows, hidden)`, after the final norm: what the assistant starts from.
    pub hidden: Tensor,
}

impl Target {
    /// Loads a checkpoint; weights stay in the mapped file.
    ///
    /// # Errors
    /// If config.json asks for something that is not implemented, or a tensor is missing or misshapen.
    pub fn load(checkpoint: &Checkpoint, options: impl Into<LoadOptions>) -> Result<Self> {
        let options = options.into();
        let config = checkpoint.target_config()?;
        for attention in config.layers.iter().filter(|layer| layer.kv_shared).map(|layer| layer.attention) {
            if config.kv_donor(attention).is_none() {
                let problem = format!("leaves no layer of {} to share K and V from", attention.name());
                let field = "num_kv_shared_layers".into();
                return Err(Error::Config { path: checkpoint.path().to_owned(), field, problem });
            }
        }
        let prefix = checkpoint.text_prefix()?;
        let mut loader = Loader::new(checkpoint, prefix, &options);
        let hidden = config.hidden_size;
        let table_use = if config.tie_word_embeddings { TableUse::Tied } else { TableUse::LookUp };
        let shape = [config.vocab_size, hidden];
        let embed_tokens = loader
            .embedding("embed_tokens.weight", shape, table_use, |element| round_to(element, (hidden as f32).sqrt()))?;
        let per_layer = match config.hidden_size_per_layer_input {
            0 => None,
            _ => Some(PerLayerEmbeddings::load(&mut loader, &config)?),
        };
        let layers = config.layers.iter().enumerate();
        let layers: Result<Vec<_>> = layers.map(|(i, l)| DecoderLayer::load(&mut loader, i, &config, l)).collect();
        let layers = layers?;
        let norm = loader.norm("norm.weight", hidden, config.rms_norm_eps)?;
        let mut step = loader.step_cost();
        loader.finish(|name| is_tower(name) || is_dead(name, prefix, &config) || name == "lm_head.weight");
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(embed_tokens.weight().clone(), options.isa),
            false => {
                let mut loader = Loader::new(checkpoint, "", &options);
                let lm_head = loader.head("lm_head.weight", config.vocab_size, hidden)?;
                step.bytes += loader.step_cost().bytes;
                step.multiply_adds += loader.step_cost().multiply_adds;
                lm_head
            }
        };
        let rotations = Rotations::new(&config, options.isa)?;
        tracing::info!(path = %checkpoint.path().display(), layers = config.layers.len(), hidden, "target loaded");
        Ok(Self { config, embed_tokens, per_layer, layers, norm, lm_head, rotations, isa: options.isa, step })
    }

    /// What config.json says.
    pub fn config(&self) -> &TextConfig {
        &self.config
    }

    /// A number that tells this model from others: of its configuration, and of some embeddings, which training moves.
    ///
    /// # Errors
    /// If an embedding cannot be read.
    pub(crate) fn fingerprint(&self) -> Result<u64> {
        let mut sums = [crc32fast::Hasher::new(), crc32fast::Hasher::new()];
        sums[0].update(format!("{:?}", self.config).as_bytes());
        let tokens = self.config.num_readable_tokens() as u32;
        let ids: Vec<u32> = (0..8).map(|i| (tokens - 1) / 8 * i).collect();
        for x in F32View::new(&self.embed(&ids)?)?.iter() {
            sums[1].update(&x.to_le_bytes());
        }
        let [config, weights] = sums.map(|sum| u64::from(sum.finalize()));
        Ok(config << 32 | weights)
    }

    /// What one row of a pass costs in weights.
    pub fn step_cost(&self) -> StepCost {
        self.step
    }

    /// The K/V that this model keeps: a store for every layer that computes its own, and who reads which.
    pub fn kv_layout(&self) -> KvLayout {
        let mut layout = self.config.kv_layout();
        for (store, layer) in layout.stores.iter_mut().zip(&self.layers) {
            store.key_weight = layer.key_weight().map(<[f32]>::to_vec);
        }
        layout
    }

    /// The scaled embeddings of `ids`: `(ids, hidden)`. The assistant's input as well.
    ///
    /// # Errors
    /// If an id is outside the vocabulary.
    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        self.embed_tokens.forward(ids)
    }

    /// One pass over `ids`, whose K and V are staged in `round`; `None` if [`Wanted::Nothing`] is.
    ///
    /// # Errors
    /// If there are not as many ids as the round has rows, or one is outside the vocabulary.
    pub fn forward(&self, ids: &[u32], round: &mut Round<'_>, wanted: Wanted) -> Result<Option<Output>> {
        if ids.len() != round.rows() {
            return Err(Error::Input(format!("{} tokens for a round of {} rows", ids.len(), round.rows())));
        }
        let wanted_rows = match wanted {
            Wanted::All => ids.len(),
            Wanted::Last => 1,
            Wanted::Nothing => 0,
        };
        let own_kv_layers = self.config.num_own_kv_layers();
        let mut h = self.embed(ids)?;
        let mut inputs = self.per_layer.as_ref().map(|per_layer| per_layer.forward(ids, &h)).transpose()?;
        let mut angles = self.rotations.angles(round.position(), ids.len());
        for (i, layer) in self.layers.iter().enumerate() {
            // From here on layers write no K or V: rows that nobody wants need not be computed.
            if i == own_kv_layers && wanted_rows < ids.len() {
                if wanted_rows == 0 {
                    return Ok(None);
                }
                h = newest(&h, wanted_rows)?;
                angles = angles.newest(wanted_rows);
                for input in inputs.iter_mut().flatten() {
                    *input = newest(input, wanted_rows)?;
                }
            }
            let input = inputs.as_ref().map(|inputs| &inputs[i]);
            h = layer.forward(&h, input, &angles, round, i)?;
        }
        if wanted_rows == 0 {
            return Ok(None);
        }
        if h.dim(0)? > wanted_rows {
            h = newest(&h, wanted_rows)?;
        }
        let hidden = self.norm.forward(&h)?;
        let logits = self.lm_head.forward_then(&hidden, |logits| {
            if let Some(cap) = self.config.final_logit_softcapping {
                soft_cap(self.isa, logits, cap as f32);
            }
        })?;
        Ok(Some(Output { logits, hidden }))
    }
}

fn newest(x: &Tensor, rows: usize) -> Result<Tensor> {
    Ok(x.narrow(0, x.dim(0)? - rows, rows)?.contiguous()?)
}

/// Image and audio towers, which text does not pass.
pub(crate) fn is_tower(name: &str) -> bool {
    ["vision_", "audio_", "embed_vision", "embed_audio", "multi_modal_projector"]
        .iter()
        .any(|tower| name.strip_prefix("model.").unwrap_or(name).starts_with(tower))
}

/// K and V weights of KV-shared layers, which published checkpoints still carry.
pub(crate) fn is_dead(name: &str, prefix: &str, config: &TextConfig) -> bool {
    let layer = name.strip_prefix(prefix).and_then(|name| name.strip_prefix("layers."));
    let Some((index, rest)) = layer.and_then(|rest| rest.split_once('.')) else { return false };
    index.parse::<usize>().ok().and_then(|i| config.layers.get(i)).is_some_and(|layer| layer.kv_shared)
        && ["k_proj", "v_proj", "k_norm", "v_norm"].iter().any(|dead| rest.starts_with(&format!("self_attn.{dead}.")))
}

/// The embedding scale is rounded to the table's type before it is used, in the reference and so here. Quantized tables
/// come from engines that do not round it.
pub(super) fn round_to(element: Option<ElementType>, x: f32) -> f32 {
    match element {
        None | Some(ElementType::F32) => x,
        Some(ElementType::F16) => f16::from_f32(x).to_f32(),
        Some(ElementType::Bf16) => bf16::from_f32(x).to_f32(),
    }
}
