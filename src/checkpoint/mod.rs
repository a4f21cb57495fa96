//! Checkpoints: named tensors and a configuration, from safetensors or GGUF.

mod architecture;
mod compressed;
mod configuration;
pub mod convert;
mod expected;
mod facts;
mod fields;
mod files;
mod find_assistants;
mod generation;
pub mod gguf;
mod head_names;
mod inner_assistant;
mod load_options;
mod loader;
mod model_name;
mod ordering;
mod other_models;
mod partial;
mod placeholder;
pub mod quantize;
mod recode;
mod safetensors;
mod separate_experts;
mod spelling;
mod step_bytes;
mod tensor;
mod unsupported;
mod unsupported_tensors;

pub(crate) use architecture::Architecture;
pub(crate) use configuration::ConfigSource;
pub(crate) use expected::{Expected, Implied, Kind};
pub use facts::{OwnDrafter, TargetFacts};
pub use fields::Fields;
pub(crate) use fields::{MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, is_present, read_text, regular_file};
pub use files::Checkpoint;
#[cfg(feature = "hub")]
pub(crate) use find_assistants::is_assistants_name;
pub use find_assistants::{FoundAssistants, find_assistants};
pub use generation::GenerationTokens;
pub(crate) use head_names::is_head;
pub(crate) use inner_assistant::is_inner_assistants;
pub use load_options::{LoadOptions, Progress};
pub use loader::StepCost;
pub(crate) use loader::{Loader, TableUse, WeightUse};
pub use model_name::model_name;
pub(crate) use ordering::token_ordering;
pub(crate) use other_models::{NameOf, not_implemented, other_model, without_text};
pub(crate) use partial::Partial;
pub(crate) use placeholder::refuse_placeholder;
pub(crate) use recode::survey;
#[cfg(feature = "hub")]
pub(crate) use safetensors::{HEAD, weights};
pub(crate) use step_bytes::is_unread;
pub use tensor::{RawTensor, TensorType};
pub(crate) use unsupported_tensors::is_unneeded;
