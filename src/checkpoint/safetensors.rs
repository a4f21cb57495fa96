//! Safetensors: one file, or shards with an index.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use foretoken_kernels::ElementType;
use safetensors::{Dtype, SafeTensorError, SafeTensors};

use super::compressed::{self, Compressed};
use super::fields::{Fields, regular_file};
use super::tensor::{RawTensor, TensorType};
use super::unsupported::INSTEAD;
use crate::checkpoint::refuse_placeholder;
use crate::nn::{Bytes, MappedFile};
use crate::{Error, Result};

/// The tensors of all files of one checkpoint.
pub(super) struct Tensors {
    directory: PathBuf,
    files: Vec<PathBuf>,
    tensors: BTreeMap<String, RawTensor>,
    compressed: BTreeMap<String, Compressed>, // by matrix name
}

impl Tensors {
    pub(super) fn open(directory: &Path) -> Result<Self> {
        let index = directory.join("model.safetensors.index.json");
        let map = index.exists().then(|| WeightMap::read(&index)).transpose()?;
        let map = map.filter(|map| map.is_read(directory.join(WHOLE).is_file()));
        let files = map.as_ref().map_or_else(|| without_index(directory), |map| map.files(directory));
        let mut tensors = BTreeMap::new();
        for file in &files {
            read(file, &mut tensors)?;
        }
        map.map_or(Ok(()), |map| map.check(&tensors))?;
        let mut tensors = without_prefixes(directory, tensors)?;
        let compressed = compressed::collect(directory, &mut tensors)?;
        Ok(Self { directory: directory.to_owned(), files, tensors, compressed })
    }

    /// The tensors whose names begin with `prefix`, under the rest of their names.
    pub(super) fn under(&self, prefix: &str) -> Self {
        let own = |name: &String| name.strip_prefix(prefix).map(str::to_owned);
        Self {
            directory: self.directory.clone(),
            files: self.files.clone(),
            tensors: self.tensors.iter().filter_map(|(name, tensor)| Some((own(name)?, tensor.clone()))).collect(),
            compressed: self.compressed.iter().filter_map(|(name, of)| Some((own(name)?, of.clone()))).collect(),
        }
    }

    pub(super) fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// The names, sorted.
    pub(super) fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.tensors.keys().chain(self.compressed.keys()).cloned().collect();
        names.sort();
        names
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.compressed.contains_key(name)
    }

    /// Bytes of all tensors when loaded.
    pub(super) fn bytes(&self) -> u64 {
        let plain = self.tensors.values().map(|tensor| tensor.bytes.as_slice().len() as u64);
        plain.chain(self.compressed.values().map(|matrix| matrix.len_bytes() as u64)).sum()
    }

    /// Name, number of dimensions and bytes when loaded, of every tensor.
    pub(super) fn described(&self) -> impl Iterator<Item = (&str, usize, u64)> {
        let plain =
            self.tensors.iter().map(|(name, t)| (name.as_str(), t.shape.len(), t.bytes.as_slice().len() as u64));
        plain.chain(self.compressed.iter().map(|(name, matrix)| (name.as_str(), 2, matrix.len_bytes() as u64)))
    }

    /// Type and shape of the tensor `name` when loaded.
    pub(super) fn type_and_shape(&self, name: &str) -> Option<(TensorType, Vec<usize>)> {
        let plain = self.tensors.get(name).map(|tensor| (tensor.dtype, tensor.shape.clone()));
        plain.or_else(|| self.compressed.get(name).map(Compressed::type_and_shape))
    }

    /// Bytes of the tensor `name` when loaded.
    pub(super) fn len_bytes(&self, name: &str) -> Option<usize> {
        let plain = self.tensors.get(name).map(|tensor| tensor.bytes.as_slice().len());
        plain.or_else(|| self.compressed.get(name).map(Compressed::len_bytes))
    }

    /// The tensor `name`, or `None`. Compressed matrices are converted in memory.
    ///
    /// # Errors
    /// If its file has shrunk, or the tensors of a compressed matrix do not fit together.
    pub(super) fn get(&self, name: &str) -> Result<Option<RawTensor>> {
        if let Some(tensor) = self.tensors.get(name) {
            tensor.bytes.check_length()?;
            return Ok(Some(tensor.clone()));
        }
        let Some(matrix) = self.compressed.get(name) else { return Ok(None) };
        matrix.check_length()?;
        let error = |problem| Error::Tensor { path: self.directory.clone(), tensor: name.to_owned(), problem };
        matrix.load().map(Some).map_err(error)
    }
}

/// The file of an unsharded checkpoint.
const WHOLE: &str = "model.safetensors";

/// The file of a head for drafts that is not among the trunk's tensors.
pub(crate) const HEAD: &str = "mtp.safetensors";

/// The name of a tensor of the part that drafts without the prefixes of the model around it: `mtp.*`.
fn drafting_name(name: &str) -> &str {
    let nested =
        ["model.language_model.", "language_model.", "model."].iter().find_map(|prefix| name.strip_prefix(prefix));
    nested.filter(|name| name.starts_with("mtp.")).unwrap_or(name)
}

/// The tensors by [`drafting_name`].
///
/// # Errors
/// If two have the same.
fn without_prefixes(directory: &Path, tensors: BTreeMap<String, RawTensor>) -> Result<BTreeMap<String, RawTensor>> {
    let mut renamed = BTreeMap::new();
    for (tensor, bytes) in tensors {
        let name = drafting_name(&tensor);
        if renamed.insert(name.to_owned(), bytes).is_some() {
            let problem =
                format!("is {name}, which is there under another name as well; download the checkpoint again");
            return Err(Error::Tensor { path: directory.to_owned(), tensor, problem });
        }
    }
    Ok(renamed)
}

/// The files that are read without an index.
fn without_index(directory: &Path) -> Vec<PathBuf> {
    let head = Some(directory.join(HEAD)).filter(|head| head.is_file());
    std::iter::once(directory.join(WHOLE)).chain(head).collect()
}

/// The `weight_map` of an index.
struct WeightMap {
    fields: Fields,
    shards: BTreeMap<String, String>, // names of files, by tensor
}

impl WeightMap {
    fn read(index: &Path) -> Result<Self> {
        let index = Fields::read(index)?;
        let map = index.optional_object("weight_map")?;
        let fields = map.ok_or_else(|| index.error("weight_map", "is missing; download the index again"))?;
        let mut shards = BTreeMap::new();
        for tensor in fields.names() {
            let name = fields.string(tensor)?;
            // Shards are in the directory of the index; a path in an index could name any file.
            if Path::new(&name).file_name() != Some(name.as_ref()) {
                let remedy = "put the shard next to the index under the name in the index, or download both again";
                return Err(fields.error(tensor, format!("{name:?} is not a file name; {remedy}")));
            }
            shards.insert(tensor.to_owned(), name);
        }
        match shards.is_empty() {
            true => Err(index.error("weight_map", "lists no shard; download the index again")),
            false => Ok(Self { fields, shards }),
        }
    }

    /// Whether the shards are read: as in transformers, a whole file takes precedence over an index
    /// that does not list it.
    fn is_read(&self, has_whole: bool) -> bool {
        !has_whole || self.shards.values().any(|shard| shard == WHOLE)
    }

    /// The shards, without duplicates.
    fn files(&self, directory: &Path) -> Vec<PathBuf> {
        let names: BTreeSet<&String> = self.shards.values().collect();
        names.into_iter().map(|name| directory.join(name)).collect()
    }

    /// # Errors
    /// If a tensor is in none of the shards: optional modules would silently be missing.
    fn check(&self, tensors: &BTreeMap<String, RawTensor>) -> Result<()> {
        match self.shards.iter().find(|(tensor, _)| !tensors.contains_key(*tensor)) {
            None => Ok(()),
            Some((tensor, shard)) => {
                let problem = format!("neither {shard} nor another shard has this tensor; download both again");
                Err(self.fields.error(tensor, problem))
            }
        }
    }
}

/// The files to read of a checkpoint with an index, with or without a whole file.
#[cfg(feature = "hub")]
pub(crate) fn weights(directory: &Path, index: &Path, has_whole: bool) -> Result<Vec<PathBuf>> {
    let map = WeightMap::read(index)?;
    Ok(if map.is_read(has_whole) { map.files(directory) } else { without_index(directory) })
}

fn read(path: &Path, tensors: &mut BTreeMap<String, RawTensor>) -> Result<()> {
    let meta = regular_file(path, "a safetensors file")?;
    if meta.len() < 8 {
        return Err(Error::file(
            path,
            format!("is {} bytes long, too short for safetensors; download it again", meta.len()),
        ));
    }
    let map = Arc::new(MappedFile::open(path)?);
    refuse_placeholder(path, (*map).as_ref())?;
    refuse_other_format(path, (*map).as_ref())?;
    let (header, metadata) = SafeTensors::read_metadata((*map).as_ref()).map_err(|e| {
        let problem = match e {
            SafeTensorError::MetadataIncompleteBuffer => {
                format!("is {} bytes long, which is not the end of its last tensor", meta.len())
            }
            e => format!("is not valid safetensors ({e})"),
        };
        Error::file(path, format!("{problem}; download it again"))
    })?;
    for (name, info) in metadata.tensors() {
        let (start, end) = info.data_offsets;
        let range = 8 + header + start..8 + header + end;
        let bytes = Bytes::new(map.clone(), range)
            .ok_or_else(|| Error::file(path, format!("ends inside tensor {name}; download it again")))?;
        let tensor = RawTensor { dtype: tensor_type(info.dtype), shape: info.shape.clone(), bytes };
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(Error::file(path, format!("repeats tensor {name} of another shard; download all again")));
        }
    }
    Ok(())
}

/// Refuses a file of another format that was renamed.
fn refuse_other_format(path: &Path, bytes: &[u8]) -> Result<()> {
    let problem = if bytes.starts_with(b"GGUF") {
        "is a GGUF file under another name; use the file itself as the checkpoint, not its directory".to_owned()
    } else if bytes.starts_with(b"PK\x03\x04") {
        format!("is a PyTorch file under another name; {INSTEAD}")
    } else {
        return Ok(());
    };
    Err(Error::file(path, problem))
}

fn tensor_type(dtype: Dtype) -> TensorType {
    match dtype {
        Dtype::F32 => TensorType::Float(ElementType::F32),
        Dtype::F16 => TensorType::Float(ElementType::F16),
        Dtype::BF16 => TensorType::Float(ElementType::Bf16),
        Dtype::I64 => TensorType::I64,
        Dtype::I32 => TensorType::I32,
        Dtype::F8_E4M3 => TensorType::Other(compressed::FP8),
        Dtype::F8_E5M2 => TensorType::Other("F8_E5M2"),
        Dtype::U8 => TensorType::Other("U8"),
        Dtype::I8 => TensorType::Other("I8"),
        Dtype::F64 => TensorType::Other("F64"),
        _ => TensorType::Other("another type"),
    }
}
