//! What a target is and reads, from its configuration and its tensors' names alone.

use crate::kv::KvLayout;

/// A target's facts, for people and for estimates.
pub struct TargetFacts {
    /// The family's name.
    pub family: &'static str,
    /// Layers, by what they are.
    pub layers: String,
    /// What else it has, each in a few words.
    pub parts: Vec<String>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Token ids are below this.
    pub vocab_size: usize,
    /// Maximum context in positions.
    pub max_position_embeddings: usize,
    /// K and V of its layers.
    pub kv_layout: KvLayout,
    /// Bytes of a sequence's recurrent state.
    pub state_bytes: u64,
    /// Bytes of weights that a token reads.
    pub step_bytes: u64,
    /// What drafts for it.
    pub drafts: Drafts,
}

/// What drafts for a target, besides what drafts for any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drafts {
    /// An assistant, a checkpoint of its own.
    Assistant,
    /// A head of its own; a draft reads so many bytes of weights.
    OwnHead(u64),
    /// The head that this family has is not in the checkpoint.
    NoHead,
}
