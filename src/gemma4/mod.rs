//! Gemma 4 and its assistant, as modules that read like the reference (transformers' `modeling_gemma4.py` and
//! `modeling_gemma4_assistant.py`, version 5.17.0), with Hugging Face's names.

mod assistant;
mod attention;
mod centroids;
mod config;
mod layer;
mod mlp;
mod moe;
pub(crate) mod on_device;
mod per_layer;
mod rope;
mod target;

pub(crate) use assistant::check_pair;
pub use assistant::{Assistant, DraftStep, Scores};
pub use config::{AssistantConfig, AttentionType, CentroidConfig, LayerConfig, MoeConfig, RopeConfig, TextConfig};
pub(crate) use config::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS};
pub use target::Target;
pub(crate) use target::{is_dead, is_tower};
