//! A GGUF writer for tests: it writes anything, including invalid files.

#![allow(dead_code)] // each test binary uses a part

/// ggml's number for 32-bit floats.
pub const F32: u32 = 0;
/// ggml's number for 32-bit integers.
pub const I32: u32 = 26;

/// A metadata value: its type's number, and its bytes.
#[derive(Clone)]
pub struct Raw(pub u32, pub Vec<u8>);

pub fn string_bytes(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

pub fn u32_value(x: usize) -> Raw {
    Raw(4, (x as u32).to_le_bytes().to_vec())
}

pub fn f32_value(x: f64) -> Raw {
    Raw(6, (x as f32).to_le_bytes().to_vec())
}

pub fn bool_value(x: bool) -> Raw {
    Raw(7, vec![x.into()])
}

pub fn str_value(text: &str) -> Raw {
    Raw(8, string_bytes(text))
}

/// An array of `len` elements of type `element`, whose bytes are `elements`.
pub fn raw_array(element: u32, len: u64, elements: &[u8]) -> Raw {
    Raw(9, [&element.to_le_bytes()[..], &len.to_le_bytes(), elements].concat())
}

/// An array of values of one type.
pub fn array(values: &[Raw]) -> Raw {
    let element = values.first().map_or(4, |value| value.0);
    let bytes: Vec<u8> = values.iter().flat_map(|value| value.1.clone()).collect();
    raw_array(element, values.len() as u64, &bytes)
}

pub fn strings<T: AsRef<[u8]>>(texts: impl IntoIterator<Item = T>) -> Raw {
    let texts: Vec<_> = texts.into_iter().map(string_bytes).collect();
    raw_array(8, texts.len() as u64, &texts.concat())
}

/// A tensor to be written.
#[derive(Clone)]
pub struct Written {
    pub name: Vec<u8>,
    pub shape: Vec<u64>, // outermost first
    pub type_id: u32,
    pub bytes: Vec<u8>,
    pub offset: Option<u64>, // its declared offset, if not the actual one
}

/// A file being built.
#[derive(Clone)]
pub struct GgufFile {
    pub version: u32,
    pub alignment: usize,
    pub keys: Vec<(Vec<u8>, Raw)>,
    pub tensors: Vec<Written>,
}

impl GgufFile {
    pub fn new() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new() }
    }

    pub fn key(mut self, key: impl AsRef<[u8]>, value: Raw) -> Self {
        self.keys.push((key.as_ref().to_vec(), value));
        self
    }

    pub fn tensor(mut self, name: impl AsRef<[u8]>, shape: &[usize], type_id: u32, bytes: Vec<u8>) -> Self {
        let shape = shape.iter().map(|size| *size as u64).collect();
        self.tensors.push(Written { name: name.as_ref().to_vec(), shape, type_id, bytes, offset: None });
        self
    }

    pub fn floats(self, name: &str, shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.tensor(name, shape, F32, bytes)
    }

    /// The header, without the padding after it.
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            out.extend(string_bytes(key));
            out.extend(value.0.to_le_bytes());
            out.extend(&value.1);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            out.extend(string_bytes(&tensor.name));
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|size| out.extend(size.to_le_bytes()));
            out.extend(tensor.type_id.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
            offset = (offset + tensor.bytes.len() as u64).next_multiple_of(self.alignment as u64);
        }
        out
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&tensor.bytes);
        }
        out
    }
}
