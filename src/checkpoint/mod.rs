//! Checkpoints: named tensors and a configuration, from safetensors or GGUF.

mod compressed;
pub mod convert;
mod fields;
mod find_assistants;
mod generation;
pub mod gguf;
mod inner_assistant;
mod loader;
mod ordering;
mod partial;
pub mod quantize;
mod recode;
mod safetensors;
mod separate_experts;
mod spelling;
mod step_bytes;
mod unread;

pub use fields::Fields;
#[cfg(feature = "hub")]
pub(crate) use find_assistants::is_assistants_name;
pub use find_assistants::{FoundAssistants, find_assistants};
use gguf::{GgmlType, Gguf, GgufTensor};
pub(crate) use inner_assistant::is_inner_assistants;
pub(crate) use loader::WeightUse;
pub use loader::{LoadOptions, Loader, Progress, StepCost, TableUse};
pub(crate) use ordering::token_ordering;
pub(crate) use partial::Partial;
pub(crate) use recode::survey;
#[cfg(feature = "hub")]
pub(crate) use safetensors::weights;

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use foretoken_kernels::ElementType;
use foretoken_kernels::quant::WeightType;

use crate::gemma4::{AssistantConfig, TextConfig};
use crate::nn::Bytes;
use crate::placeholder::BEGINNING;
use crate::sampler::Sampling;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// The stored type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorType {
    /// Floating point.
    Float(ElementType),
    /// 64-bit integers.
    I64,
    /// 32-bit integers.
    I32,
    /// Blocks of quantized weights.
    Quantized(WeightType),
    /// A type of the file format that no kernel supports, by the format's name.
    Other(&'static str),
}

impl TensorType {
    /// The type's id in GGUF files; `None` if no kernel supports it.
    pub fn ggml_id(self) -> Option<u32> {
        Some(match self {
            Self::Float(ElementType::F32) => 0,
            Self::Float(ElementType::F16) => 1,
            Self::Float(ElementType::Bf16) => 30,
            Self::I64 => 27,
            Self::I32 => 26,
            Self::Quantized(weight_type) => weight_type.ggml_id(),
            Self::Other(_) => return None,
        })
    }

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Float(ElementType::F32) => "f32",
            Self::Float(ElementType::F16) => "f16",
            Self::Float(ElementType::Bf16) => "bf16",
            Self::I64 => "i64",
            Self::I32 => "i32",
            Self::Quantized(weight_type) => weight_type.name(),
            Self::Other(name) => name,
        }
    }
}

/// A tensor in a file: its type, its shape (outermost dimension first) and its bytes.
#[derive(Clone)]
pub struct RawTensor {
    /// Stored type.
    pub dtype: TensorType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Its bytes, little-endian, row-major.
    pub bytes: Bytes,
}

/// An opened checkpoint. Files are mapped, not read.
pub struct Checkpoint {
    path: PathBuf,
    files: Files,
    config: &'static [&'static str], // path of the field of config.json that describes it; empty: the whole file
}

enum Files {
    /// Hugging Face's layout: a directory with `config.json` and one `model.safetensors`, or several shards with
    /// `model.safetensors.index.json`.
    HuggingFace(safetensors::Tensors),
    /// llama.cpp's.
    Gguf(Box<Gguf>),
}

/// Where a configuration is.
pub(crate) enum ConfigSource<'a> {
    /// In config.json.
    Json(Fields),
    /// In metadata.
    Gguf(&'a Gguf),
}

/// End-of-generation tokens and suppressed tokens of a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GenerationTokens {
    /// End-of-generation tokens.
    pub end: Vec<u32>,
    /// Tokens that are never generated.
    pub suppressed: Vec<u32>,
}

/// The checkpoint is a directory.
pub(crate) struct NotGguf;

/// The first bytes of a regular file: some stores have GGUF files under names without an extension.
fn beginning(path: &Path) -> Result<Vec<u8>> {
    let file = std::fs::File::open(path).map_err(Error::io(path))?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::Read::take(file, BEGINNING as u64), &mut bytes)
        .map_err(Error::io(path))?;
    Ok(bytes)
}

impl Checkpoint {
    /// Opens the checkpoint in directory `path`, or the GGUF file `path`, whatever its extension.
    ///
    /// # Errors
    /// If `path` is neither, or a file is missing or malformed.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let meta = std::fs::metadata(path).map_err(Error::io(path))?;
        let files = if meta.is_dir() {
            unread::refuse_directory(path)?;
            Files::HuggingFace(safetensors::Tensors::open(path)?)
        } else {
            let beginning = if meta.is_file() { beginning(path)? } else { Vec::new() };
            if path.extension().is_none_or(|extension| extension != "gguf") && !beginning.starts_with(b"GGUF") {
                return Err(unread::other_file(path, &beginning));
            }
            let gguf = Gguf::open(path)?;
            unread::refuse_other_kind(&gguf)?;
            Files::Gguf(Box::new(gguf))
        };
        Ok(Self { path: path.to_owned(), files, config: &[] })
    }

    /// The directory or file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The GGUF file; `None` for a directory of safetensors.
    pub fn gguf(&self) -> Option<&Gguf> {
        match &self.files {
            Files::HuggingFace(_) => None,
            Files::Gguf(gguf) => Some(gguf),
        }
    }

    /// Whether a tensor of shape `own` is the one that the configuration gives the shape `implied`: GGUF files drop dimensions of
    /// 1; of safetensors, only a number may be `[]` or `[1]`.
    pub(crate) fn is_shape(&self, own: &[usize], implied: &[usize]) -> bool {
        let significant = |shape: &[usize]| shape.iter().copied().filter(|size| *size != 1).collect::<Vec<_>>();
        let drops_ones = self.gguf().is_some() || significant(implied).is_empty();
        own == implied || (drops_ones && significant(own) == significant(implied))
    }

    /// The files with its tensors.
    pub fn files(&self) -> Vec<PathBuf> {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.files().to_vec(),
            Files::Gguf(gguf) => gguf.files().map(Path::to_owned).collect(),
        }
    }

    /// The configuration of a target.
    ///
    /// # Errors
    /// If it is missing, malformed, of another model, or needs something that is not implemented.
    pub fn target_config(&self) -> Result<TextConfig> {
        match &self.files {
            Files::HuggingFace(_) => {
                let fields = self.config()?;
                unread::refuse_quantized(&fields, self, unread::Experts::Stacked)?;
                TextConfig::target(&fields)
            }
            Files::Gguf(gguf) => {
                let config = gguf::target_config(gguf)?;
                unread::refuse_types(self).map(|()| config)
            }
        }
    }

    /// The kind of model: `model_type` of config.json, `general.architecture` of a GGUF file; empty if absent.
    ///
    /// # Errors
    /// If config.json is missing or malformed.
    pub fn model_type(&self) -> Result<String> {
        match &self.files {
            Files::HuggingFace(_) => Ok(self.config()?.optional_string("model_type")?.unwrap_or_default()),
            Files::Gguf(gguf) => {
                let name = gguf.metadata("general.architecture").and_then(|name| name.as_str());
                Ok(name.unwrap_or_default().to_owned())
            }
        }
    }

    /// The configuration's source, for families other than Gemma 4.
    ///
    /// # Errors
    /// If it is missing or malformed, or the weights have an unsupported quantization.
    pub(crate) fn config_source(&self) -> Result<ConfigSource<'_>> {
        match &self.files {
            Files::HuggingFace(_) => {
                let fields = self.config()?;
                unread::refuse_quantized(&fields, self, unread::Experts::Apart)?;
                Ok(ConfigSource::Json(fields))
            }
            Files::Gguf(gguf) => unread::refuse_types(self).map(|()| ConfigSource::Gguf(gguf)),
        }
    }

    /// The configuration of an assistant.
    ///
    /// # Errors
    /// As [`Checkpoint::target_config`].
    pub fn assistant_config(&self) -> Result<AssistantConfig> {
        match &self.files {
            Files::HuggingFace(_) => {
                let fields = self.config()?;
                unread::refuse_quantized(&fields, self, unread::Experts::Stacked)?;
                AssistantConfig::read(&fields)
            }
            Files::Gguf(gguf) => {
                let config = gguf::assistant_config(gguf)?;
                unread::refuse_types(self).map(|()| config)
            }
        }
    }

    /// End-of-generation and suppressed tokens from `generation_config.json` or metadata.
    ///
    /// # Errors
    /// If `generation_config.json` or a metadata key is malformed.
    pub fn generation_tokens(&self) -> Result<GenerationTokens> {
        match &self.files {
            Files::HuggingFace(_) => generation::tokens(&self.path),
            Files::Gguf(gguf) => Ok(GenerationTokens { end: Vec::new(), suppressed: gguf::suppressed_tokens(gguf)? }),
        }
    }

    /// The publisher's sampling parameters, from `generation_config.json` or metadata; `None` if there are none, they are greedy,
    /// or need a sampler that is not implemented (with a warning).
    ///
    /// # Errors
    /// If one is malformed or out of its range.
    pub fn sampling_defaults(&self) -> Result<Option<Sampling>> {
        match &self.files {
            Files::HuggingFace(_) => generation::sampling(&self.path),
            Files::Gguf(gguf) => gguf::sampling_defaults(gguf),
        }
    }

    /// The tokenizer, whose ids must be below `vocab_size`; `None` if the checkpoint has none. For a GGUF file it is the file's
    /// own, compared id by id with a tokenizer.json next to it if there is one; without its own, it is that one.
    ///
    /// # Errors
    /// If it is malformed, an id is outside the model's vocabulary, or the two differ.
    pub fn tokenizer(&self, vocab_size: usize) -> Result<Option<Tokenizer>> {
        match &self.files {
            Files::HuggingFace(_) => {
                let path = self.path.join("tokenizer.json");
                if path.exists() { Tokenizer::read(&path, vocab_size).map(Some) } else { Ok(None) }
            }
            Files::Gguf(gguf) => {
                let beside = self.path.with_file_name("tokenizer.json");
                let beside = beside.exists().then(|| Tokenizer::read(&beside, vocab_size)).transpose()?;
                let Some(own) = gguf::tokenizer(gguf)? else { return Ok(beside) };
                if let Some(beside) = &beside {
                    gguf::check_tokenizer(gguf, beside.inner())?;
                }
                Tokenizer::new(own, &self.path, vocab_size).map(Some)
            }
        }
    }

    /// A text of a GGUF file's metadata; `Err` if this is not a GGUF file.
    pub(crate) fn gguf_text(&self, key: &str) -> Result<Option<&str>, NotGguf> {
        match &self.files {
            Files::HuggingFace(_) => Err(NotGguf),
            Files::Gguf(gguf) => Ok(gguf.metadata(key).and_then(|value| value.as_str())),
        }
    }

    /// The token whose id is a GGUF file's metadata value `key`; an error value says that this is not a GGUF file.
    pub(crate) fn gguf_token(&self, key: &str) -> Result<Option<&str>, NotGguf> {
        let Files::Gguf(gguf) = &self.files else { return Err(NotGguf) };
        let id = gguf.metadata(key).and_then(|value| value.as_u64()).and_then(|id| usize::try_from(id).ok());
        let Some(gguf::Value::Array(tokens)) = gguf.metadata("tokenizer.ggml.tokens") else { return Ok(None) };
        Ok(id.and_then(|id| tokens.iter().nth(id)?.as_str()))
    }

    /// The prefix of the text model's tensors.
    ///
    /// # Errors
    /// If there is no embedding under any known prefix.
    pub fn text_prefix(&self) -> Result<&'static str> {
        // Published checkpoints, text-only exports, an older nesting; GGUF files have no prefix.
        let prefixes = ["model.language_model.", "model.", "language_model.model.", "language_model.", ""];
        let found = prefixes.into_iter().find(|prefix| self.has(&format!("{prefix}embed_tokens.weight")));
        found.ok_or_else(|| Error::Tensor {
            path: self.path.clone(),
            tensor: "model.language_model.embed_tokens.weight".into(),
            problem: "is missing, as is model.embed_tokens.weight; this is not a supported target".into(),
        })
    }

    /// The names of all tensors, Hugging Face's if there is one.
    pub fn names(&self) -> Vec<String> {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.names(),
            Files::Gguf(gguf) => {
                // Separate gate and up projections of experts are one tensor.
                let joined = |own: &str| {
                    own.replace("ffn_gate_exps.", "ffn_gate_up_exps.").replace("ffn_up_exps.", "ffn_gate_up_exps.")
                };
                let name = |own: &str| gguf.hugging_face_name(own).or_else(|| gguf.hugging_face_name(&joined(own)));
                let mut seen = HashSet::new();
                let names =
                    gguf.tensors().map(|tensor| name(tensor.name()).unwrap_or_else(|| tensor.name().to_owned()));
                names.filter(|name| seen.insert(name.clone())).collect()
            }
        }
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.bytes(),
            Files::Gguf(gguf) => gguf.tensors().filter_map(|tensor| tensor.len_bytes()).map(|len| len as u64).sum(),
        }
    }

    /// Whether there is a tensor `name`.
    pub fn has(&self, name: &str) -> bool {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.has(name),
            Files::Gguf(gguf) => gguf.has_weight(name),
        }
    }

    /// The tensor `name`, or `None`.
    ///
    /// # Errors
    /// If it cannot be read: an unknown type, a file that has shrunk.
    pub fn get(&self, name: &str) -> Result<Option<RawTensor>> {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.get(name),
            Files::Gguf(gguf) => {
                // Assistants' tensors are requested by their safetensors prefix.
                let tensor = gguf.weight(name.strip_prefix("model.").unwrap_or(name))?;
                let raw = |t: GgufTensor| RawTensor { dtype: tensor_type(t.type_id), shape: t.shape, bytes: t.bytes };
                Ok(tensor.map(raw))
            }
        }
    }
}

/// The tensor type of a ggml type id.
fn tensor_type(ggml_id: u32) -> TensorType {
    let floats = [ElementType::F32, ElementType::F16, ElementType::Bf16].map(TensorType::Float);
    let simple = floats.into_iter().chain([TensorType::I32, TensorType::I64]);
    let quantized = || WeightType::from_ggml_id(ggml_id).map(TensorType::Quantized);
    let other = || TensorType::Other(GgmlType::from_id(ggml_id).map_or("an unknown type", |known| known.name));
    simple.into_iter().find(|known| known.ggml_id() == Some(ggml_id)).or_else(quantized).unwrap_or_else(other)
}
