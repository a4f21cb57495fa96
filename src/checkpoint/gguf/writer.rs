//! Writes GGUF files: metadata and tensors are declared first, then the tensors' bytes follow in declaration order.
//!
//! Nothing is collected: arrays are written as they are iterated, tensors in pieces of any size. The file is written as
//! `NAME.partial`, and renamed when it is complete and synced; an existing file stays until then.

use std::collections::BTreeSet;
use std::path::Path;

use super::metadata::{Value, ValueType, shown};
use super::types::GgmlType;
use crate::checkpoint::partial::Partial;
use crate::{Error, Result};

const VERSION: u32 = 3;
const ALIGNMENT: u64 = 32;
/// Offset of the tensor count and the key count.
const COUNTS: u64 = 8;
/// llama.cpp rejects longer ones.
const MAX_KEY: usize = (1 << 16) - 1;
const MAX_TENSOR_NAME: usize = 63;

/// A type usable as metadata value or array element.
pub trait MetadataValue {
    /// Its type in the file.
    const TYPE: ValueType;

    /// Appends its bytes to `out`.
    fn encode(&self, out: &mut Vec<u8>);
}

macro_rules! numbers {
    ($($number:ty => $kind:ident),*) => {$(
        impl MetadataValue for $number {
            const TYPE: ValueType = ValueType::$kind;

            fn encode(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

numbers!(u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64);
numbers!(f32 => F32, f64 => F64);

impl MetadataValue for bool {
    const TYPE: ValueType = ValueType::Bool;

    fn encode(&self, out: &mut Vec<u8>) {
        out.push(u8::from(*self));
    }
}

impl MetadataValue for &str {
    const TYPE: ValueType = ValueType::String;

    fn encode(&self, out: &mut Vec<u8>) {
        (self.len() as u64).encode(out);
        out.extend_from_slice(self.as_bytes());
    }
}

impl MetadataValue for String {
    const TYPE: ValueType = ValueType::String;

    fn encode(&self, out: &mut Vec<u8>) {
        self.as_str().encode(out);
    }
}

/// A GGUF file whose metadata and tensors are being declared: little-endian, version 3, aligned to 32 bytes.
///
/// If dropped before [`TensorWriter::finish`], the partial file is removed.
///
/// ```
/// # use foretoken::checkpoint::gguf::{Gguf, GgufWriter};
/// # fn main() -> foretoken::Result<()> {
/// # let directory = tempfile::tempdir().expect("a directory");
/// # let path = directory.path().join("model.gguf");
/// let mut writer = GgufWriter::create(&path)?;
/// writer.value("general.architecture", "gemma4")?;
/// writer.array("tokenizer.ggml.tokens", (0..3).map(|id| format!("t{id}")))?;
/// writer.tensor("output_norm.weight", 0, &[2])?;
///
/// let mut tensors = writer.begin()?;
/// tensors.write("output_norm.weight", &1f32.to_le_bytes())?;
/// tensors.write("output_norm.weight", &2f32.to_le_bytes())?;
/// tensors.finish()?;
/// assert_eq!(Gguf::open(&path)?.info("output_norm.weight").map(|info| info.shape()), Some(&[2][..]));
/// # Ok(())
/// # }
/// ```
pub struct GgufWriter {
    out: Partial,
    keys: BTreeSet<String>,
    tensors: Vec<Declared>,
    names: BTreeSet<String>,
    scratch: Vec<u8>, // an encoded value
}

/// A declared tensor.
struct Declared {
    name: String,
    type_id: u32,
    shape: Vec<usize>, // outermost first
    len: u64,          // bytes
}

impl GgufWriter {
    /// Begins the file `path`. A partial file left by a killed process is replaced.
    ///
    /// # Errors
    /// If `path` is a directory or a device, or ends in a separator, its directory does not exist or cannot be written,
    /// or another process is writing the same file.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let mut out = Partial::create(path.as_ref())?;
        out.put(b"GGUF")?;
        out.put(&VERSION.to_le_bytes())?;
        out.put(&[0; 16])?; // the counts, written by `begin`
        let (keys, names) = (BTreeSet::new(), BTreeSet::new());
        Ok(Self { out, keys, tensors: Vec::new(), names, scratch: Vec::new() })
    }

    /// Declares a single value: a number, a boolean, a string.
    ///
    /// # Errors
    /// If the key was declared before or is invalid, or the disk is full.
    pub fn value<T: MetadataValue>(&mut self, key: &str, value: T) -> Result<()> {
        self.key(key, T::TYPE)?;
        self.element(value)
    }

    /// Declares an array, which is written as it is iterated.
    ///
    /// # Errors
    /// As [`GgufWriter::value`].
    pub fn array<T: MetadataValue>(&mut self, key: &str, values: impl IntoIterator<Item = T>) -> Result<()> {
        self.key(key, ValueType::Array)?;
        let at = self.array_head(T::TYPE, 0)?;
        let mut len = 0u64;
        for value in values {
            self.element(value)?;
            len += 1;
        }
        self.out.patch(at, &len.to_le_bytes())
    }

    /// Declares a value of another file, whatever its type. `general.alignment` and the keys of split files
    /// describe that other file and should not be copied.
    ///
    /// # Errors
    /// As [`GgufWriter::value`].
    pub fn copy(&mut self, key: &str, value: Value<'_>) -> Result<()> {
        self.key(key, type_of(value))?;
        self.copied(value)
    }

    /// Declares a tensor. `shape` has the outermost dimension first; `type_id` is known to [`GgmlType::from_id`].
    ///
    /// # Errors
    /// If the name was declared before or is too long for llama.cpp, the type is unknown, or the shape has no size.
    pub fn tensor(&mut self, name: &str, type_id: u32, shape: &[usize]) -> Result<()> {
        let error = |problem: String| Err(tensor_error(&self.out, name, problem));
        if name.is_empty() || name.len() > MAX_TENSOR_NAME {
            return error(format!("has a name of {} bytes, must have 1 to {MAX_TENSOR_NAME}; shorten it", name.len()));
        }
        let Some(known) = GgmlType::from_id(type_id) else {
            return error(format!("has unknown type {type_id}; use a ggml type"));
        };
        if !(1..=4).contains(&shape.len()) || shape.contains(&0) {
            return error(format!("has shape {shape:?}; use 1 to 4 dimensions, none of them 0"));
        }
        let inner = shape.last().copied().unwrap_or(1);
        let elements = shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size));
        let len = match elements.map(|elements| known.bytes(inner, elements)) {
            Some(Ok(len)) => len as u64,
            Some(Err(problem)) => return error(format!("{problem}; use another type")),
            None => return error(format!("has shape {shape:?}, which overflows; use smaller dimensions")),
        };
        if !self.names.insert(name.to_owned()) {
            return error("is declared twice; declare each tensor once".into());
        }
        self.tensors.push(Declared { name: name.to_owned(), type_id, shape: shape.to_vec(), len });
        Ok(())
    }

    /// Ends the declarations and begins the first tensor.
    ///
    /// # Errors
    /// If the disk is full.
    pub fn begin(mut self) -> Result<TensorWriter> {
        let mut offset = 0u64;
        for tensor in &self.tensors {
            self.scratch.clear();
            tensor.name.as_str().encode(&mut self.scratch);
            (tensor.shape.len() as u32).encode(&mut self.scratch);
            tensor.shape.iter().rev().for_each(|size| (*size as u64).encode(&mut self.scratch));
            tensor.type_id.encode(&mut self.scratch);
            offset.encode(&mut self.scratch);
            self.out.put(&self.scratch)?;
            // Saturated: larger than any disk.
            offset = offset.saturating_add(tensor.len).checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
        }
        let counts = [self.tensors.len() as u64, self.keys.len() as u64].map(u64::to_le_bytes);
        self.out.patch(COUNTS, counts.as_flattened())?;
        pad(&mut self.out)?;
        self.out.expect(self.out.len().saturating_add(offset));
        Ok(TensorWriter { out: self.out, tensors: self.tensors, current: 0, written: 0 })
    }

    fn key(&mut self, key: &str, kind: ValueType) -> Result<()> {
        if key.is_empty() || key.len() > MAX_KEY {
            let problem = format!("is a key of {} bytes, must have 1 to {MAX_KEY}", key.len());
            return Err(key_error(&self.out, key, problem));
        }
        if key == "general.alignment" {
            let problem = format!("is set by the writer, which aligns to {ALIGNMENT} bytes; omit it");
            return Err(key_error(&self.out, key, problem));
        }
        if !self.keys.insert(key.to_owned()) {
            return Err(key_error(&self.out, key, "is declared twice; declare each key once"));
        }
        self.element(key)?;
        self.element(kind as u32)
    }

    fn element<T: MetadataValue>(&mut self, value: T) -> Result<()> {
        self.scratch.clear();
        value.encode(&mut self.scratch);
        self.out.put(&self.scratch)
    }

    /// Returns the offset of the length.
    fn array_head(&mut self, element: ValueType, len: usize) -> Result<u64> {
        self.element(element as u32)?;
        let at = self.out.len();
        self.element(len as u64)?;
        Ok(at)
    }

    fn copied(&mut self, value: Value<'_>) -> Result<()> {
        match value {
            Value::U8(x) => self.element(x),
            Value::I8(x) => self.element(x),
            Value::U16(x) => self.element(x),
            Value::I16(x) => self.element(x),
            Value::U32(x) => self.element(x),
            Value::I32(x) => self.element(x),
            Value::U64(x) => self.element(x),
            Value::I64(x) => self.element(x),
            Value::F32(x) => self.element(x),
            Value::F64(x) => self.element(x),
            Value::Bool(x) => self.element(x),
            Value::String(x) => self.element(x),
            Value::Array(array) => {
                self.array_head(array.element(), array.len())?;
                array.iter().try_for_each(|value| self.copied(value))
            }
        }
    }
}

fn type_of(value: Value<'_>) -> ValueType {
    match value {
        Value::U8(_) => ValueType::U8,
        Value::I8(_) => ValueType::I8,
        Value::U16(_) => ValueType::U16,
        Value::I16(_) => ValueType::I16,
        Value::U32(_) => ValueType::U32,
        Value::I32(_) => ValueType::I32,
        Value::U64(_) => ValueType::U64,
        Value::I64(_) => ValueType::I64,
        Value::F32(_) => ValueType::F32,
        Value::F64(_) => ValueType::F64,
        Value::Bool(_) => ValueType::Bool,
        Value::String(_) => ValueType::String,
        Value::Array(_) => ValueType::Array,
    }
}

/// A GGUF file whose tensors are being written.
pub struct TensorWriter {
    out: Partial,
    tensors: Vec<Declared>,
    current: usize, // the current tensor
    written: u64,   // its bytes so far
}

impl TensorWriter {
    /// Bytes of all tensors, without metadata and padding.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().fold(0u64, |sum, tensor| sum.saturating_add(tensor.len))
    }

    /// Appends `bytes` to the tensor `name`. Tensors are written in declaration order, each in any number of
    /// parts: rows of whole blocks, little-endian.
    ///
    /// # Errors
    /// If the previous tensor is incomplete, another one is next, `bytes` is too long, or the disk is full.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        if self.tensors.get(self.current).is_some_and(|tensor| tensor.name != name && tensor.len == self.written) {
            (self.current, self.written) = (self.current + 1, 0);
        }
        let Some(tensor) = self.tensors.get(self.current) else {
            return Err(tensor_error(&self.out, name, "comes after the last tensor; declare it first"));
        };
        if tensor.name != name {
            let expected = match self.written {
                0 => format!("must come after {}; write tensors in declaration order", shown(&tensor.name)),
                written => format!("begins after {written} of the {} bytes of {}", tensor.len, shown(&tensor.name)),
            };
            return Err(tensor_error(&self.out, name, expected));
        }
        let (written, len) = (self.written.saturating_add(bytes.len() as u64), tensor.len);
        if written > len {
            let problem = format!("has {written} bytes, but its type and shape have {len}; declare what is written");
            return Err(tensor_error(&self.out, name, problem));
        }
        self.out.put(bytes)?;
        self.written = written;
        if written == len { pad(&mut self.out) } else { Ok(()) }
    }

    /// Syncs the file and renames it, replacing an existing file.
    ///
    /// # Errors
    /// If a tensor is not complete, or the disk is full.
    pub fn finish(self) -> Result<()> {
        let done = self.current + usize::from(self.tensors.get(self.current).is_some_and(|t| t.len == self.written));
        if let Some(tensor) = self.tensors.get(done) {
            let written = if done == self.current { self.written } else { 0 };
            let problem = format!("has {written} of its {} bytes; write all before finishing the file", tensor.len);
            return Err(tensor_error(&self.out, &tensor.name, problem));
        }
        self.out.publish()
    }
}

fn pad(out: &mut Partial) -> Result<()> {
    let padding = out.len().next_multiple_of(ALIGNMENT) - out.len();
    out.put(&[0; ALIGNMENT as usize][..padding as usize])
}

fn tensor_error(out: &Partial, name: &str, problem: impl Into<String>) -> Error {
    Error::Tensor { path: out.path().to_owned(), tensor: shown(name), problem: problem.into() }
}

fn key_error(out: &Partial, key: &str, problem: impl Into<String>) -> Error {
    Error::Config { path: out.path().to_owned(), field: shown(key), problem: problem.into() }
}
