//! Qwen3.5 and 3.6: gated delta-net layers, gated attention in every fourth layer, dense or with
//! experts, and a NextN head for drafting. The modules are structured as in transformers'
//! `modeling_qwen3_5.py`, version 5.23, with Hugging Face's names.

mod attention;
mod call_grammar;
mod config;
mod convert;
mod delta_net;
mod facts;
mod feed_forward;
mod gguf;
mod implied;
mod layer;
mod names;
mod nextn;
mod norm;
mod on_device;
mod reply;
mod target;
mod text_model;

pub(crate) use call_grammar::XmlCalls;
pub use config::{LayerType, MoeConfig, TensorLayout, TextConfig};
pub(crate) use convert::{description, directory};
pub(crate) use facts::facts;
pub(crate) use implied::implied;
pub(crate) use names::{SPLIT, names};
pub(crate) use reply::XmlReply;
pub use target::Target;

pub use crate::kv::DeltaNetMatrices;
pub use crate::nn::DeltaNetConfig;
