//! GGUF, the file format of llama.cpp: metadata, a directory of tensors, and the tensors, in one file or several.
//!
//! The files are mapped, not read: metadata arrays and tensors are borrowed from the map. Opening a file validates the whole
//! header (lengths against the available bytes, tensor offsets against the file, names for duplicates) and allocates only for
//! keys and tensors, never by an array's declared length.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little-endian.

mod byte_level;
mod config;
mod cursor;
mod header;
mod keys;
mod metadata;
pub(crate) mod names;
mod sampling;
mod scales;
mod split;
mod tokenizer;
mod types;
mod writer;

pub use config::{assistant_config, suppressed_tokens, target_config};
pub(crate) use config::{eos_token_ids, refuse_unsupported, rows};
pub use header::TensorInfo;
pub(crate) use keys::{Keys, truth};
pub use metadata::{Array, Value, ValueType};
pub use names::{gguf_names, hugging_face_name};
pub use sampling::sampling_defaults;
pub use tokenizer::{check_tokenizer, tokenizer};
pub use types::GgmlType;
pub use writer::{GgufWriter, MetadataValue, TensorWriter};

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::nn::{Bytes, MappedFile, Source};
use crate::placeholder::refuse_placeholder;
use crate::{Error, Result, family};
use header::{Header, Slot};
use names::{Names, nextn_block};

/// The smallest header: magic, version, two counts.
const MIN_FILE: u64 = 24;

/// A tensor, borrowed from the map.
#[derive(Clone)]
pub struct GgufTensor {
    /// The id of its type, known to [`GgmlType::from_id`].
    pub type_id: u32,
    /// Dimensions, outermost first: a matrix is `(outputs, inputs)`.
    pub shape: Vec<usize>,
    /// Its blocks, row after row.
    pub bytes: Bytes,
}

/// An opened checkpoint: one GGUF file, or all files of a split one.
pub struct Gguf {
    parts: Vec<Part>,
    version: u32,
    metadata: BTreeMap<String, Slot>, // of the first file
    tensors: Vec<TensorInfo>,
    index: BTreeMap<String, usize>, // into `tensors`
    names: OnceLock<Names>,         // set once all files are open
}

/// A file and its contents.
struct Part {
    path: PathBuf,
    bytes: Arc<dyn Source>,
}

impl Part {
    fn open(path: &Path) -> Result<Self> {
        // Checked before opening: opening a pipe would block.
        let meta = std::fs::metadata(path).map_err(Error::io(path))?;
        if meta.is_dir() {
            return Err(Error::file(path, "is a directory; use a .gguf file in it"));
        }
        if !meta.is_file() {
            return Err(Error::file(path, "is not a regular file, so it cannot be mapped; copy it to disk"));
        }
        if meta.len() < MIN_FILE {
            let problem = format!("is {} bytes long, too short for GGUF; download it again", meta.len());
            return Err(Error::file(path, problem));
        }
        let part = Self { path: path.to_owned(), bytes: Arc::new(MappedFile::open(path)?) };
        refuse_placeholder(path, part.bytes()).map(|()| part)
    }

    fn bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }
}

impl Gguf {
    /// Opens the file `path`. If it belongs to a split checkpoint (`NAME-00001-of-00003.gguf`), the others are opened as well;
    /// `path` may be any of them.
    ///
    /// # Errors
    /// If a file is missing, malformed, or of another version or byte order.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let part = Part::open(path)?;
        let header = Header::read(part.bytes(), 0).map_err(|problem| problem.of(path))?;
        let gguf = Self::single(part, header);
        if split::count(&gguf)? == 1 { Ok(gguf) } else { split::open(&gguf) }
    }

    /// Reads a checkpoint in memory.
    ///
    /// # Errors
    /// If it is malformed, or one part of a split checkpoint.
    pub fn from_bytes(bytes: Vec<u8>) -> Result<Self> {
        let part = Part { path: "(memory)".into(), bytes: Arc::new(bytes) };
        let header = Header::read(part.bytes(), 0).map_err(|problem| problem.of(&part.path))?;
        let gguf = Self::single(part, header);
        match split::count(&gguf)? {
            1 => Ok(gguf),
            count => Err(Error::file(gguf.path(), format!("is one of {count} files; open the first of them by path"))),
        }
    }

    fn single(part: Part, header: Header) -> Self {
        let index = header.tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        let Header { version, metadata, tensors } = header;
        Self { parts: vec![part], version, metadata, tensors, index, names: OnceLock::new() }
    }

    /// The file; for a split checkpoint the first.
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// The file, or the files of a split checkpoint.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.parts.iter().map(|part| part.path.as_path())
    }

    /// The format's version.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// A metadata value. Split checkpoints have them only in the first file.
    pub fn metadata(&self, key: &str) -> Option<Value<'_>> {
        self.metadata.get(key)?.value(self.parts[0].bytes())
    }

    /// The keys of all metadata, in alphabetical order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.metadata.keys().map(String::as_str)
    }

    /// All tensors, in file order.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.tensors.iter()
    }

    /// The description of the tensor with this name in the file.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(*self.index.get(name)?)
    }

    /// The tensor with this name in the file (`blk.3.attn_q.weight`), or `None`.
    ///
    /// # Errors
    /// If its type is unknown, or the file has shrunk.
    pub fn tensor(&self, name: &str) -> Result<Option<GgufTensor>> {
        self.info(name).map(|info| self.borrow(info)).transpose()
    }

    /// The tensor with this Hugging Face name, without its prefix (`layers.3.self_attn.q_proj.weight`), or `None`.
    ///
    /// If a file has the experts' gate and up projections separate, `experts.gate_up_proj` is assembled in memory.
    ///
    /// # Errors
    /// As [`Gguf::tensor`], or if gate and up do not fit together.
    pub fn weight(&self, name: &str) -> Result<Option<GgufTensor>> {
        match self.info_of_weight(name) {
            Some(info) => self.borrow(info).map(Some),
            None => self.gate_up(name),
        }
    }

    /// The tensor names of the file's architecture.
    pub(crate) fn names(&self) -> &Names {
        self.names.get_or_init(|| {
            let architecture = self.metadata("general.architecture").and_then(|value| value.as_str());
            family::names(architecture.unwrap_or_default(), nextn_block(self.tensors.iter().map(TensorInfo::name)))
        })
    }

    /// The Hugging Face name of the tensor `name`, without its prefix; `None` if it has none.
    pub(super) fn hugging_face_name(&self, name: &str) -> Option<String> {
        self.names().hugging_face(name)
    }

    /// Whether the file has the tensor with this Hugging Face name.
    pub fn has_weight(&self, name: &str) -> bool {
        self.info_of_weight(name).is_some() || self.gate_up_infos(name).is_some()
    }

    /// The description of the tensor with this Hugging Face name.
    pub fn info_of_weight(&self, name: &str) -> Option<&TensorInfo> {
        self.names().gguf(name).iter().find_map(|name| self.info(name))
    }

    fn borrow(&self, info: &TensorInfo) -> Result<GgufTensor> {
        let part = self.parts.get(info.file).unwrap_or(&self.parts[0]);
        let error = |problem: String| Error::Tensor { path: part.path.clone(), tensor: info.name.clone(), problem };
        let Some(len) = info.len else {
            let problem = format!("has type {}, which is unknown; use a file with another quantization", info.type_id);
            return Err(error(problem));
        };
        part.bytes.check_length()?;
        let bytes = Bytes::new(part.bytes.clone(), info.start..info.start + len)
            .ok_or_else(|| error("does not end inside the file; download the file again".into()))?;
        Ok(GgufTensor { type_id: info.type_id, shape: info.shape.clone(), bytes })
    }

    fn gate_up_infos(&self, name: &str) -> Option<(&TensorInfo, &TensorInfo)> {
        let (gate, up) = self.names().split_gate_up(name)?;
        Some((self.info(&gate)?, self.info(&up)?))
    }

    /// `(experts, 2 * intermediate, hidden)` from `(experts, intermediate, hidden)` twice: each expert's gate rows, then its up
    /// rows. Rows are whole blocks in every type, so they can be copied as bytes.
    fn gate_up(&self, name: &str) -> Result<Option<GgufTensor>> {
        let Some((gate_info, up_info)) = self.gate_up_infos(name) else { return Ok(None) };
        let (gate, up) = (self.borrow(gate_info)?, self.borrow(up_info)?);
        let [experts, intermediate, hidden] = gate.shape[..] else {
            return Err(self.error(&gate_info.name, format!("has shape {:?}, must have 3 dimensions", gate.shape)));
        };
        if (gate.type_id, &gate.shape) != (up.type_id, &up.shape) {
            let problem = format!("differs from {} in type or shape; quantize both alike", gate_info.name);
            return Err(self.error(&up_info.name, problem));
        }
        let (gate_bytes, up_bytes) = (gate.bytes.as_slice(), up.bytes.as_slice());
        let expert = gate_bytes.len() / experts; // not 0: dimensions are positive
        let mut joined = Vec::with_capacity(gate_bytes.len() + up_bytes.len());
        for (gate, up) in gate_bytes.chunks_exact(expert).zip(up_bytes.chunks_exact(expert)) {
            joined.extend_from_slice(gate);
            joined.extend_from_slice(up);
        }
        let shape = vec![experts, 2 * intermediate, hidden];
        Ok(Some(GgufTensor { type_id: gate.type_id, shape, bytes: Bytes::from(joined) }))
    }

    /// An error about a tensor.
    pub fn error(&self, tensor: &str, problem: impl Into<String>) -> Error {
        Error::Tensor { path: self.path().to_owned(), tensor: tensor.into(), problem: problem.into() }
    }

    /// An error about a metadata key.
    pub fn key_error(&self, key: &str, problem: impl Into<String>) -> Error {
        Error::Config { path: self.path().to_owned(), field: key.into(), problem: problem.into() }
    }
}
