//! The MTP drafter: a small model that reads the target's K and V and the target's last hidden state.

use candle_core::Tensor;
use candle_nn::Module;

use super::centroids::CentroidHead;
use super::config::{AssistantConfig, AttentionType, TextConfig};
use super::layer::DecoderLayer;
use super::rope::Rotations;
use super::target::Target;
use crate::checkpoint::{Checkpoint, LoadOptions, Loader};
use crate::kv::{Borrowed, Committed};
use crate::nn::{F32View, Linear, RmsNorm};
use crate::{Error, Result};

/// A `gemma4_assistant`, checked against its target.
pub struct Assistant {
    pub(super) config: TextConfig,
    pub(super) pre_projection: Linear, // (hidden, 2 * backbone)
    pub(super) layers: Vec<DecoderLayer>,
    pub(super) norm: RmsNorm,
    pub(super) post_projection: Linear, // (backbone, hidden)
    pub(super) head: Head,              // its input embedding is the target's
    pub(super) rotations: Rotations,
    pub(super) donors: Vec<usize>, // for each layer, the target's layer whose K and V it reads
}

pub(super) enum Head {
    Dense(Linear),
    Centroids(CentroidHead),
}

/// Scores of the output head.
pub struct Scores {
    /// The scored ids; `None` means all, in order.
    pub ids: Option<Vec<u32>>,
    /// Their logits.
    pub logits: Vec<f32>,
}

/// The result of one draft step.
pub struct DraftStep {
    /// Scores of the next token.
    pub scores: Scores,
    /// `(1, backbone)`: replaces the target's hidden state in the next step.
    pub hidden: Tensor,
}

impl Assistant {
    /// Loads an assistant for `target`.
    ///
    /// # Errors
    /// If the pair does not fit, config.json needs something that is not implemented, or a tensor is missing or has
    /// another shape.
    pub fn load(checkpoint: &Checkpoint, target: &Target, options: impl Into<LoadOptions>) -> Result<Self> {
        let options = options.into();
        let config = checkpoint.assistant_config()?;
        let donors = check_pair(&config, target.config())?;
        let (text, backbone) = (&config.text, config.backbone_hidden_size);
        let hidden = text.hidden_size;
        let mut projections = Loader::new(checkpoint, "", &options);
        let pre_projection = projections.linear("pre_projection.weight", hidden, 2 * backbone)?;
        let post_projection = projections.linear("post_projection.weight", backbone, hidden)?;
        let mut loader = Loader::new(checkpoint, "model.", &options);
        let layers = text.layers.iter().enumerate();
        let layers: Result<Vec<_>> = layers.map(|(i, l)| DecoderLayer::load(&mut loader, i, text, l)).collect();
        let layers = layers?;
        let norm = loader.norm("norm.weight", hidden, text.rms_norm_eps)?;
        let head = match &config.centroids {
            Some(centroids) => Head::Centroids(CentroidHead::load(&mut projections, &config, centroids)?),
            None => Head::Dense(loader.head("embed_tokens.weight", text.vocab_size, hidden)?),
        };
        loader.absorb(projections);
        loader.finish(|name| name == "lm_head.weight");
        let rotations = Rotations::new(text, options.isa)?;
        let centroid_head = config.centroids.is_some();
        tracing::info!(path = %checkpoint.path().display(), hidden, centroid_head, "assistant loaded");
        let config = config.text;
        Ok(Self { config, pre_projection, layers, norm, post_projection, head, rotations, donors })
    }

    /// One draft step from `token` and the hidden state `(1, backbone)` that predicted it, over the committed K and V.
    ///
    /// The position is that of `token` after the committed ones, the same for all steps of a chain: the assistant
    /// writes no K or V and was trained with a constant position.
    ///
    /// # Errors
    /// If a shape does not fit (not for a checked pair).
    pub fn step(&self, target: &Target, token: u32, hidden: &Tensor, kv: Committed<'_>) -> Result<DraftStep> {
        let input = Tensor::cat(&[&target.embed(&[token])?, hidden], 1)?; // embedding first
        let mut h = self.pre_projection.forward(&input)?;
        let angles = self.rotations.angles(std::iter::once(kv.position()));
        let mut access = Borrowed { committed: kv, donors: &self.donors };
        for (i, layer) in self.layers.iter().enumerate() {
            h = layer.forward(&h, None, &angles, &mut access, i)?;
        }
        let n = self.norm.forward(&h)?;
        let scores = match &self.head {
            Head::Dense(head) => Scores { ids: None, logits: F32View::new(&head.forward(&n)?)?.to_vec() },
            Head::Centroids(head) => {
                let (ids, logits) = head.forward(&n)?;
                Scores { ids: Some(ids), logits }
            }
        };
        Ok(DraftStep { scores, hidden: self.post_projection.forward(&n)? })
    }
}

/// Checks that the assistant's queries fit the target's K and V; returns the donor layer of each of its layers.
pub(crate) fn check_pair(assistant: &AssistantConfig, target: &TextConfig) -> Result<Vec<usize>> {
    let refuse = |problem: String| Err(Error::Pair { problem });
    if assistant.backbone_hidden_size != target.hidden_size {
        let (made_for, is) = (assistant.backbone_hidden_size, target.hidden_size);
        return refuse(format!("it was made for hidden_size {made_for}, the target's is {is}"));
    }
    if assistant.text.vocab_size != target.vocab_size {
        let (a, t) = (assistant.text.vocab_size, target.vocab_size);
        return refuse(format!("its vocab_size is {a}, the target's is {t}"));
    }
    let mut donors = Vec::with_capacity(assistant.text.layers.len());
    for (i, layer) in assistant.text.layers.iter().enumerate() {
        let name = layer.attention.name();
        let Some(donor) = target.kv_donor(layer.attention) else {
            return refuse(format!("its layer {i} is of {name}, of which the target keeps no K and V"));
        };
        let of_target = &target.layers[donor];
        if layer.head_dim != of_target.head_dim {
            let (a, t) = (layer.head_dim, of_target.head_dim);
            return refuse(format!("its {name} layer {i} has head_dim {a}, the target's layer {donor} {t}"));
        }
        if layer.num_kv_heads != of_target.num_kv_heads {
            let (a, t) = (layer.num_kv_heads, of_target.num_kv_heads);
            return refuse(format!("its {name} layer {i} has {a} K/V heads, the target's layer {donor} {t}"));
        }
        if layer.attention == AttentionType::Sliding && assistant.text.sliding_window != target.sliding_window {
            let (a, t) = (assistant.text.sliding_window, target.sliding_window);
            return refuse(format!("its sliding_window is {a}, the target's {t}"));
        }
        donors.push(donor);
    }
    Ok(donors)
}
