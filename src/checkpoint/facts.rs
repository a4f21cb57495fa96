//! Summary of a target checkpoint, from its configuration and tensor names alone.

use crate::kv::KvLayout;

/// Summary of a target checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct TargetFacts {
    /// The family's name.
    pub family: &'static str,
    /// The layers, by type.
    pub layers: String,
    /// Other features, a few words each.
    pub parts: Vec<String>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Token ids are below this number.
    pub vocab_size: usize,
    /// Maximum context in positions.
    pub max_position_embeddings: usize,
    /// K and V of the layers.
    pub kv_layout: KvLayout,
    /// Bytes of a sequence's recurrent state.
    pub state_bytes: u64,
    /// Bytes of the weights in memory, without tensors that nothing reads.
    pub weight_bytes: u64,
    /// Bytes of weights read per token.
    pub step_bytes: u64,
    /// Whether each token reads the weights of a few of many experts.
    pub has_experts: bool,
    /// The drafter of the model's family.
    pub own_drafter: OwnDrafter,
}

/// The target's own drafter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OwnDrafter {
    /// An assistant, in a checkpoint of its own.
    Assistant,
    /// A NextN head; a draft reads this many bytes of weights.
    NextnHead(u64),
    /// A NextN head that the checkpoint lacks.
    NoHead,
}
