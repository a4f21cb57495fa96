//! An opened GGUF checkpoint: its metadata and tensors.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rayon::prelude::*;

use super::header::{Header, Slot, TensorInfo};
use super::metadata::Value;
use super::names::{Names, nextn_block};
use super::types::GgmlType;
use crate::checkpoint::architecture::Architecture;
use crate::checkpoint::placeholder::refuse_placeholder;
use crate::nn::{Bytes, MappedFile, Source};
use crate::{Error, Result};

/// The smallest header: magic, version, two counts.
const MIN_FILE: u64 = 24;

/// A tensor, borrowed from the map.
#[derive(Clone)]
pub struct GgufTensor {
    /// The id of its type, known to [`GgmlType::from_id`](super::GgmlType::from_id).
    pub type_id: u32,
    /// Dimensions, outermost first: a matrix is `(outputs, inputs)`.
    pub shape: Vec<usize>,
    /// Its blocks, row after row.
    pub bytes: Bytes,
}

/// An opened checkpoint: one GGUF file, or all files of a split one.
pub struct Gguf {
    pub(super) parts: Vec<Part>,
    version: u32,
    metadata: BTreeMap<String, Slot>, // of the first file
    pub(super) tensors: Vec<TensorInfo>,
    pub(super) index: BTreeMap<String, usize>, // into `tensors`
    names: OnceLock<Names>,                    // set once all files are open
}

/// A file and its contents.
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) bytes: Arc<dyn Source>,
}

impl Part {
    pub(super) fn open(path: &Path) -> Result<Self> {
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

    pub(super) fn bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }
}

impl Gguf {
    /// The `file`-th file of a checkpoint, alone.
    ///
    /// # Errors
    /// If its header is malformed.
    pub(super) fn single(part: Part, file: usize) -> Result<Self> {
        let header = Header::read(part.bytes(), file).map_err(|problem| problem.of(&part.path))?;
        let Header { version, metadata, tensors } = header;
        let index = tensors.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Ok(Self { parts: vec![part], version, metadata, tensors, index, names: OnceLock::new() })
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

    /// Type and shape of the tensor that [`Gguf::weight`] returns.
    pub(crate) fn type_and_shape(&self, name: &str) -> Option<(u32, Vec<usize>)> {
        if let Some(info) = self.info_of_weight(name) {
            return Some((info.type_id, info.shape.clone()));
        }
        let (gate, _) = self.gate_up_infos(name)?;
        let mut shape = gate.shape.clone();
        if let [_, rows, _] = &mut shape[..] {
            *rows = rows.saturating_mul(2); // of an unknown type, whose shape the file's length does not bound
        }
        Some((gate.type_id, shape))
    }

    /// Bytes of the tensor that [`Gguf::weight`] returns; `None` if its type is unknown.
    pub(crate) fn len_bytes(&self, name: &str) -> Option<usize> {
        if let Some(info) = self.info_of_weight(name) {
            return info.len_bytes();
        }
        let (gate, up) = self.gate_up_infos(name)?;
        gate.len_bytes()?.checked_add(up.len_bytes()?)
    }

    /// The tensor names of the file's architecture.
    pub(crate) fn names(&self) -> &Names {
        self.names.get_or_init(|| {
            let architecture = self.metadata("general.architecture").and_then(|value| value.as_str());
            Architecture::of(architecture.unwrap_or_default())
                .names(nextn_block(self.tensors.iter().map(TensorInfo::name)))
        })
    }

    /// The Hugging Face name of the tensor `name`, without its prefix; `None` if it has none.
    pub(crate) fn hugging_face_name(&self, name: &str) -> Option<String> {
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

    /// Refuses two tensors for one weight, under names of several converters, or as a stack of experts and its
    /// parts: one of them would be ignored.
    ///
    /// # Errors
    /// If there are two.
    pub(crate) fn refuse_second_names(&self) -> Result<()> {
        for tensor in &self.tensors {
            let Some(name) = self.hugging_face_name(&tensor.name) else { continue };
            let parts = self.names().split_gate_up(&name).map(|(gate, up)| [gate, up]);
            let mut names = self.names().gguf(&name).into_iter().chain(parts.into_iter().flatten());
            if let Some(other) = names.find(|other| *other != tensor.name && self.info(other).is_some()) {
                let problem =
                    format!("is the same weight as {other}, and one of them would be ignored; convert the model again");
                return Err(self.error(&tensor.name, problem));
            }
        }
        Ok(())
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

    pub(super) fn gate_up_infos(&self, name: &str) -> Option<(&TensorInfo, &TensorInfo)> {
        let (gate, up) = self.names().split_gate_up(name)?;
        Some((self.info(&gate)?, self.info(&up)?))
    }

    /// `(experts, 2 * intermediate, hidden)` from `(experts, intermediate, hidden)` twice: each expert's gate rows,
    /// then its up rows. Rows are whole blocks in every type, so they can be copied as bytes.
    fn gate_up(&self, name: &str) -> Result<Option<GgufTensor>> {
        let Some((gate_info, up_info)) = self.gate_up_infos(name) else { return Ok(None) };
        let (gate, up) = (self.borrow(gate_info)?, self.borrow(up_info)?);
        let [experts, intermediate, hidden] = gate.shape[..] else {
            return Err(self.error(&gate_info.name, format!("has shape {:?}, must have 3 dimensions", gate.shape)));
        };
        if (gate.type_id, &gate.shape) != (up.type_id, &up.shape) {
            let [own, other] =
                [&up, &gate].map(|of| format!("{} of shape {:?}", GgmlType::name_of(of.type_id), of.shape));
            let problem = format!("is {own}, but {} is {other}", gate_info.name);
            let remedy = "use a file in which both are alike, or are one tensor (ffn_gate_up_exps)";
            return Err(self.error(&up_info.name, format!("{problem}; {remedy}")));
        }
        let (gate_bytes, up_bytes) = (gate.bytes.as_slice(), up.bytes.as_slice());
        let expert = gate_bytes.len() / experts; // not 0: dimensions are positive
        let mut joined = vec![0u8; gate_bytes.len() + up_bytes.len()];
        let parts = gate_bytes.par_chunks_exact(expert).zip(up_bytes.par_chunks_exact(expert));
        joined.par_chunks_exact_mut(2 * expert).zip(parts).for_each(|(joined, (gate, up))| {
            joined[..expert].copy_from_slice(gate);
            joined[expert..].copy_from_slice(up);
        });
        [&gate, &up].iter().for_each(|tensor| tensor.bytes.release_all());
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
