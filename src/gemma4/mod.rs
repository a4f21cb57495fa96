//! Gemma 4 and its assistant, structured as in the reference (transformers' `modeling_gemma4.py` and
//! `modeling_gemma4_assistant.py`, version 5.17.0), with Hugging Face's names.

mod assistant;
mod attention;
mod built_centroids;
mod centroids;
mod config;
mod config_json;
mod convert;
mod describe;
mod facts;
pub(crate) mod gguf;
mod implied;
mod layer;
mod moe;
pub(crate) mod names;
mod on_device;
mod pair;
mod per_layer;
mod per_layer_config;
mod rope;
mod rope_config;
mod target;
mod tensor_names;
mod text_model;

pub use crate::nn::Scores;
pub use assistant::Assistant;
pub(crate) use assistant::{AssistantModel, Head};
pub use centroids::{BuildCentroids, CentroidUsage, Centroids};
pub use config::{AssistantConfig, AttentionType, CentroidConfig, LayerConfig, MoeConfig, TextConfig};
pub(crate) use convert::{description, directory};
pub(crate) use facts::facts;
pub(crate) use implied::{implied, implied_of_assistant};
pub(crate) use pair::check_pair;
pub use rope_config::RopeConfig;
pub use target::Target;
pub(crate) use tensor_names::{is_assistants_table, is_unused_kv};
