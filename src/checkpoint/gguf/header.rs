//! One file's header: metadata and the directory of tensors, validated before use.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use super::cursor::Cursor;
use super::metadata::{self, Value, ValueType, shown};
use super::types::GgmlType;
use crate::Error;

/// Limits on keys and tensors, above any model's: they bound the memory that a hostile file can allocate.
const MAX_KEYS: usize = 1 << 16;
const MAX_TENSORS: usize = 1 << 18;
/// llama.cpp's limit on key names; its limit on tensor names is stricter.
const MAX_NAME: usize = (1 << 16) - 1;
const DEFAULT_ALIGNMENT: usize = 32;
/// Minimum bytes of a key-value pair and of a tensor description.
const MIN_PAIR: usize = 8 + 4 + 1;
const MIN_TENSOR: usize = 8 + 4 + 8 + 4 + 8;

/// Type and offset of a metadata value.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    kind: ValueType,
    range: Range<usize>,
}

impl Slot {
    /// The value; `None` only if the file changed since it was checked.
    pub(super) fn value<'a>(&self, file: &'a [u8]) -> Option<Value<'a>> {
        let bytes = file.get(self.range.clone())?;
        match self.kind {
            ValueType::Array => metadata::array(bytes).map(Value::Array),
            kind => metadata::read(&mut Cursor::new(bytes), kind),
        }
    }
}

/// A tensor's description. Its bytes are inside the file.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    pub(super) name: String,
    pub(super) type_id: u32,
    pub(super) shape: Vec<usize>,
    pub(super) file: usize,  // index of the file of a split checkpoint
    pub(super) start: usize, // from the beginning of that file
    pub(super) len: Option<usize>,
}

impl TensorInfo {
    /// Its name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its type; [`GgmlType::from_id`] has the sizes.
    pub fn type_id(&self) -> u32 {
        self.type_id
    }

    /// Its dimensions, outermost first (reversed in the file).
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its size in bytes; `None` if its type is unknown.
    pub fn len_bytes(&self) -> Option<usize> {
        self.len
    }
}

/// A parsed header.
pub(super) struct Header {
    pub(super) version: u32,
    pub(super) metadata: BTreeMap<String, Slot>,
    pub(super) tensors: Vec<TensorInfo>,
}

/// An error in a header.
pub(super) enum Problem {
    File(String),
    Key(String, String),
    Tensor(String, String),
}

impl Problem {
    pub(super) fn of(self, path: &Path) -> Error {
        let path = path.to_owned();
        match self {
            Self::File(problem) => Error::File { path, problem },
            Self::Key(field, problem) => Error::Config { path, field: shown(&field), problem },
            Self::Tensor(tensor, problem) => Error::Tensor { path, tensor: shown(&tensor), problem },
        }
    }
}

impl Header {
    /// Reads the header of the `file`-th file of a checkpoint.
    pub(super) fn read(bytes: &[u8], file: usize) -> Result<Self, Problem> {
        let mut cursor = Cursor::new(bytes);
        let version = preamble(&mut cursor).map_err(Problem::File)?;
        let counts = |problem| Problem::File(format!("the header {problem}; download the file again"));
        let tensor_count = cursor.count(MIN_TENSOR).map_err(counts)?;
        let key_count = cursor.count(MIN_PAIR).map_err(counts)?;
        if tensor_count > MAX_TENSORS || key_count > MAX_KEYS {
            let problem = format!("declares {tensor_count} tensors and {key_count} keys, more than any model has");
            return Err(Problem::File(problem));
        }
        let mut metadata = BTreeMap::new();
        for i in 0..key_count {
            let (key, slot) = pair(&mut cursor, i)?;
            if metadata.insert(key.to_owned(), slot).is_some() {
                return Err(Problem::Key(key.to_owned(), "occurs twice; convert the checkpoint again".into()));
            }
        }
        let alignment = alignment(&metadata, bytes)?;
        let mut tensors = Vec::new();
        let mut names = BTreeSet::new();
        for i in 0..tensor_count {
            let tensor = description(&mut cursor, file, i)?;
            if !names.insert(tensor.name.clone()) {
                return Err(Problem::Tensor(tensor.name, "occurs twice; convert the checkpoint again".into()));
            }
            tensors.push(tensor);
        }
        place(&mut tensors, cursor.at(), alignment, bytes.len())?;
        refuse_gaps(&tensors, alignment, bytes)?;
        Ok(Self { version, metadata, tensors })
    }
}

/// Magic and version.
fn preamble(cursor: &mut Cursor<'_>) -> Result<u32, String> {
    match cursor.take(4) {
        Ok(b"GGUF") => {}
        Ok(b"FUGG") => return Err("is a big-endian GGUF file; convert it with gguf-convert-endian".into()),
        _ => return Err("is not a GGUF file (it does not begin with \"GGUF\"); download it again".into()),
    }
    let version = cursor.u32().map_err(|problem| format!("the header {problem}; download the file again"))?;
    match version {
        2 | 3 => Ok(version),
        _ if matches!(version.swap_bytes(), 1..=3) => {
            Err("is a big-endian GGUF file; convert it with gguf-convert-endian".into())
        }
        _ => Err(format!("has GGUF version {version}, supported are 2 and 3; convert the checkpoint again")),
    }
}

fn pair<'a>(cursor: &mut Cursor<'a>, index: usize) -> Result<(&'a str, Slot), Problem> {
    let unnamed = |problem| Problem::File(format!("metadata key {index} {problem}; download the file again"));
    let key = cursor.string().map_err(unnamed)?;
    let problem = |problem: String| Problem::Key(key.to_owned(), format!("{problem}; download the file again"));
    if key.len() > MAX_NAME {
        return Err(problem(format!("is a key of {} bytes", key.len())));
    }
    let id = cursor.u32().map_err(problem)?;
    let kind = ValueType::from_id(id).ok_or_else(|| problem(format!("has a value of unknown type {id}")))?;
    let start = cursor.at();
    metadata::check(cursor, kind).map_err(problem)?;
    Ok((key, Slot { kind, range: start..cursor.at() }))
}

fn alignment(metadata: &BTreeMap<String, Slot>, bytes: &[u8]) -> Result<usize, Problem> {
    let key = "general.alignment";
    let Some(slot) = metadata.get(key) else { return Ok(DEFAULT_ALIGNMENT) };
    match slot.value(bytes) {
        Some(Value::U32(alignment)) if alignment.is_power_of_two() => Ok(alignment as usize),
        Some(value) => {
            let problem = format!("is {value:?}, must be a power of two (U32); convert the checkpoint again");
            Err(Problem::Key(key.into(), problem))
        }
        None => Err(Problem::Key(key.into(), "cannot be read; the file is changing".into())),
    }
}

/// A tensor's description; its `start` is still relative to the data section.
fn description(cursor: &mut Cursor<'_>, file: usize, index: usize) -> Result<TensorInfo, Problem> {
    let unnamed = |problem| Problem::File(format!("the name of tensor {index} {problem}; download the file again"));
    let name = cursor.string().map_err(unnamed)?.to_owned();
    let problem = |problem: String| Problem::Tensor(name.clone(), format!("{problem}; download the file again"));
    if name.len() > MAX_NAME {
        return Err(problem(format!("has a name of {} bytes", name.len())));
    }
    let dimensions = cursor.u32().map_err(problem)?;
    if dimensions > 4 {
        return Err(problem(format!("has {dimensions} dimensions, more than 4")));
    }
    let mut shape = Vec::with_capacity(dimensions as usize);
    for _ in 0..dimensions {
        let size = cursor.u64().map_err(problem)?;
        match usize::try_from(size) {
            Ok(size) if size > 0 => shape.push(size),
            _ => return Err(problem(format!("has a dimension of {size}"))),
        }
    }
    shape.reverse();
    if shape.is_empty() {
        shape.push(1); // a scalar
    }
    let type_id = cursor.u32().map_err(problem)?;
    let offset = cursor.u64().map_err(problem)?;
    let start = usize::try_from(offset).map_err(|_| problem(format!("is at offset {offset}")))?;
    Ok(TensorInfo { name, type_id, shape, file, start, len: None })
}

/// Converts offsets in the data section to offsets in the file, and checks them.
fn place(tensors: &mut [TensorInfo], header: usize, alignment: usize, file_len: usize) -> Result<(), Problem> {
    for tensor in tensors {
        let problem = |problem: String| Err(Problem::Tensor(tensor.name.clone(), problem));
        let elements = tensor.shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        let Some(elements) = elements else {
            return problem(format!("has shape {:?}, which overflows; download the file again", tensor.shape));
        };
        if !tensor.start.is_multiple_of(alignment) {
            let text = format!("is at offset {}, not a multiple of the alignment {alignment}", tensor.start);
            return problem(format!("{text}; download the file again"));
        }
        let inner = tensor.shape.last().copied().unwrap_or(1);
        let len = match GgmlType::from_id(tensor.type_id).map(|known| known.bytes(inner, elements)) {
            Some(Ok(len)) => Some(len),
            Some(Err(text)) => return problem(text),
            None => None,
        };
        // The size of an unknown type is unknown: only its first byte is checked.
        let start = header.checked_next_multiple_of(alignment).and_then(|data| data.checked_add(tensor.start));
        let end = start.and_then(|start| start.checked_add(len.unwrap_or(1)));
        match (start, end) {
            (Some(start), Some(end)) if end <= file_len => (tensor.start, tensor.len) = (start, len),
            _ => {
                let text = format!("does not end inside the file of {file_len} bytes; download the file again");
                return problem(text);
            }
        }
    }
    Ok(())
}

/// Tensors must be contiguous, padded to the alignment, as in ggml's reader: a gap indicates a damaged type
/// or size. The size of an unknown type is unknown.
fn refuse_gaps(tensors: &[TensorInfo], alignment: usize, bytes: &[u8]) -> Result<(), Problem> {
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.start);
    let next = order.iter().skip(1).map(Some).chain([None]);
    for (tensor, next) in order.iter().zip(next) {
        let end = tensor.start + tensor.len.unwrap_or(1);
        let start = next.map_or(bytes.len(), |next| next.start);
        if let Some(next) = next.filter(|next| end > next.start) {
            let problem = format!("overlaps tensor {}; convert the checkpoint again", shown(&tensor.name));
            return Err(Problem::Tensor(next.name.clone(), problem));
        }
        if next.is_none() && tensor.len.is_some() {
            refuse_rest(&bytes[end..], end, alignment).map_err(Problem::File)?;
        } else if tensor.len.is_some() && start - end >= alignment {
            let problem =
                format!("is followed by {} bytes that belong to no tensor; download the file again", start - end);
            return Err(Problem::Tensor(tensor.name.clone(), problem));
        }
    }
    Ok(())
}

/// Maximum zeros after the last tensor: padding to a block or page of a store.
const MAX_PADDING: usize = 1 << 16;

/// Checks the `rest` of the file, from its byte `end` on, after the last tensor. llama.cpp ignores it, but it shows
/// that a size is damaged, or that files were joined.
fn refuse_rest(rest: &[u8], end: usize, alignment: usize) -> Result<(), String> {
    if rest.len() < alignment || (rest.len() <= MAX_PADDING && rest.iter().all(|byte| *byte == 0)) {
        return Ok(());
    }
    // The next multiple of the alignment if the file before it was padded.
    let joined = (0..alignment).any(|at| rest[at..].starts_with(b"GGUF"));
    Err(match joined {
        true => "is several GGUF files in one, whose others would be ignored; keep the parts of a split checkpoint apart, and \
                 use the first"
            .into(),
        false => format!("has {} bytes after the end of its last tensor, byte {end}; download it again", rest.len()),
    })
}
