//! GGUF, the file format of llama.cpp: metadata, a directory of tensors, and the tensors, in one file or several.
//!
//! The files are mapped, not read: metadata arrays and tensors are borrowed from the map. Opening a file validates the
//! whole header (lengths against the available bytes, tensor offsets against the file, names for duplicates) and
//! allocates only for keys and tensors, never by an array's declared length.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.

mod byte_level;
mod config;
mod cursor;
mod file;
mod fused_qkv;
mod header;
mod keys;
mod metadata;
pub(crate) mod names;
mod sampling;
mod scales;
mod split;
mod tokenizer;
pub(crate) mod types;
mod writer;

pub(crate) use crate::gemma4::gguf::is_assistant;
pub use crate::gemma4::gguf::{assistant_config, target_config};
pub use crate::gemma4::names::{gguf_names, hugging_face_name};
pub use config::suppressed_tokens;
pub(crate) use config::{ARCHITECTURE, MAX_IDS, architecture, eos_token_ids, only, refuse_unsupported, rows};
pub use file::{Gguf, GgufTensor};
pub use header::TensorInfo;
pub(crate) use keys::{Keys, truth};
pub use metadata::{Array, Value, ValueType};
pub(crate) use sampling::declare_sampling;
pub use sampling::sampling_defaults;
pub(crate) use split::split_part;
pub(crate) use tokenizer::check_tokens;
pub use tokenizer::{check_tokenizer, tokenizer};
pub use types::GgmlType;
pub use writer::{GgufWriter, MetadataValue, TensorWriter};
