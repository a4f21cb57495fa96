//! An opened checkpoint: its files and their tensors.

use std::collections::HashSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use super::fields::Fields;
use super::gguf::{self, Gguf, GgufTensor};
use super::head_names::HEADS;
use super::placeholder::BEGINNING;
use super::tensor::{RawTensor, TensorType, tensor_type};
use super::{safetensors, unsupported};
use crate::{Error, Result};

/// An opened checkpoint. Files are mapped, not read.
pub struct Checkpoint {
    pub(super) path: PathBuf,
    pub(super) files: Files,
    pub(super) config: &'static [&'static str], // path of the field of config.json that describes it; empty: the whole file
    pub(super) has_own_head: OnceLock<bool>,    // see `unties_head`
}

pub(super) enum Files {
    /// Hugging Face's layout: a directory with `config.json` and one `model.safetensors`, or several shards with
    /// `model.safetensors.index.json`.
    HuggingFace(safetensors::Tensors),
    /// llama.cpp's.
    Gguf(Box<Gguf>),
}

/// The first bytes of a regular file: some stores have GGUF files under names without an extension.
fn beginning(path: &Path) -> Result<Vec<u8>> {
    let file = std::fs::File::open(path).map_err(Error::io(path))?;
    let mut bytes = Vec::new();
    file.take(BEGINNING as u64).read_to_end(&mut bytes).map_err(Error::io(path))?;
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
            unsupported::refuse_directory(path)?;
            Files::HuggingFace(safetensors::Tensors::open(path)?)
        } else {
            let beginning = if meta.is_file() { beginning(path)? } else { Vec::new() };
            let is_gguf =
                path.extension().is_some_and(|extension| extension == "gguf") || beginning.starts_with(b"GGUF");
            if !is_gguf || unsupported::is_piece(path) {
                return Err(unsupported::other_file(path, &beginning));
            }
            let gguf = Gguf::open(path)?;
            unsupported::refuse_other_kind(&gguf)?;
            gguf.refuse_second_names()?;
            Files::Gguf(Box::new(gguf))
        };
        Ok(Self { path: path.to_owned(), files, config: &[], has_own_head: OnceLock::new() })
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

    /// Whether a tensor of shape `own` is the one that the configuration gives the shape `implied`: GGUF files drop
    /// dimensions of 1; of safetensors, only a number may be `[]` or `[1]`.
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

    /// Whether the checkpoint claims to be an assistant's: by `model_type` of config.json; a GGUF file by
    /// `general.architecture`, or by its tensors if that is the target's.
    ///
    /// # Errors
    /// If config.json is missing or malformed, or the GGUF file has no architecture.
    pub fn is_assistant(&self) -> Result<bool> {
        match &self.files {
            Files::HuggingFace(_) => Ok(self.model_type()?.ends_with("_assistant")),
            Files::Gguf(gguf) => gguf::is_assistant(gguf),
        }
    }

    /// The fields of config.json; only the assistant's if the checkpoint is a [`Checkpoint::inner_assistant`].
    pub(super) fn config(&self) -> Result<Fields> {
        let fields = Fields::read(self.path.join("config.json"))?;
        self.config.iter().try_fold(fields, |fields, name| fields.object(name))
    }

    /// The prefix of the text model's tensors.
    ///
    /// # Errors
    /// If there is no embedding under any known prefix.
    pub fn text_prefix(&self) -> Result<&'static str> {
        // Published checkpoints, text-only exports, an older nesting; GGUF files have no prefix.
        let prefixes = ["model.language_model.", "model.", "language_model.model.", "language_model.", ""];
        let found = prefixes.into_iter().find(|prefix| self.has(&format!("{prefix}embed_tokens.weight")));
        found.ok_or_else(|| {
            let other = self.names().into_iter().find(|name| name.ends_with("embed_tokens.weight"));
            let head = || HEADS.into_iter().find(|head| self.has(head));
            let why = match other {
                Some(name) => {
                    let name: String = name.chars().take(100).collect();
                    format!(
                        "there is {name}: save the model without the wrapper of training (torch.compile, PEFT, DDP)"
                    )
                }
                None => head().map_or("this is not a supported target".to_owned(), |head| {
                    format!("there is {head}: if the two are tied, save the model with save_pretrained")
                }),
            };
            let problem = format!("is missing, as is model.embed_tokens.weight; {why}");
            let tensor = "model.language_model.embed_tokens.weight".into();
            Error::Tensor { path: self.path.clone(), tensor, problem }
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

    /// Type and shape of the tensor `name` when loaded, from the headers; `None` if there is none.
    pub fn type_and_shape(&self, name: &str) -> Option<(TensorType, Vec<usize>)> {
        match &self.files {
            Files::HuggingFace(tensors) => tensors.type_and_shape(name),
            Files::Gguf(gguf) => {
                let (type_id, shape) = gguf.type_and_shape(name.strip_prefix("model.").unwrap_or(name))?;
                Some((tensor_type(type_id), shape))
            }
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
