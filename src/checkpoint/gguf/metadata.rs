//! Metadata values, read in place from the map.
//!
//! Arrays are not collected (a Gemma 4 tokenizer has 262 thousand tokens and 515 thousand merges): opening the file
//! scans them once, which validates every element and finds their end; afterwards they are borrowed.

use super::cursor::Cursor;

/// Maximum array nesting; each level costs a stack frame.
const MAX_NESTING: usize = 4;

/// The type of a metadata value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // self-explanatory names
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    pub(super) fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        const ALL: [ValueType; 13] = [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Minimum bytes of a value.
    fn min_bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::Bool => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 | Self::String => 8,
            Self::Array => 12,
        }
    }
}

/// A metadata value; strings and arrays borrow from the file.
#[derive(Clone, Copy, PartialEq)]
#[allow(missing_docs)] // self-explanatory names
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// An integer of any width that is not negative.
    pub fn as_u64(self) -> Option<u64> {
        match self {
            Self::U64(x) => Some(x),
            other => other.as_i64()?.try_into().ok(),
        }
    }

    /// An integer of any width.
    pub fn as_i64(self) -> Option<i64> {
        match self {
            Self::U8(x) => Some(x.into()),
            Self::U16(x) => Some(x.into()),
            Self::U32(x) => Some(x.into()),
            Self::U64(x) => x.try_into().ok(),
            Self::I8(x) => Some(x.into()),
            Self::I16(x) => Some(x.into()),
            Self::I32(x) => Some(x.into()),
            Self::I64(x) => Some(x),
            _ => None,
        }
    }

    /// A floating-point number. Writers narrow decimal values of config.json (1e-6) to f32: such a value is returned as
    /// the original decimal, not as the nearest f32.
    pub fn as_f64(self) -> Option<f64> {
        match self {
            Self::F32(x) => x.to_string().parse().ok(),
            Self::F64(x) => Some(x),
            _ => None,
        }
    }

    /// A boolean.
    pub fn as_bool(self) -> Option<bool> {
        if let Self::Bool(x) = self { Some(x) } else { None }
    }

    /// A string.
    pub fn as_str(self) -> Option<&'a str> {
        if let Self::String(x) = self { Some(x) } else { None }
    }

    /// An array.
    pub fn as_array(self) -> Option<Array<'a>> {
        if let Self::Array(x) = self { Some(x) } else { None }
    }
}

/// For error messages: one line, truncated.
impl std::fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::U8(x) => x.fmt(f),
            Self::I8(x) => x.fmt(f),
            Self::U16(x) => x.fmt(f),
            Self::I16(x) => x.fmt(f),
            Self::U32(x) => x.fmt(f),
            Self::I32(x) => x.fmt(f),
            Self::F32(x) => x.fmt(f),
            Self::Bool(x) => x.fmt(f),
            Self::String(text) => write!(f, "\"{}\"", shown(text)),
            Self::Array(array) => array.fmt(f),
            Self::U64(x) => x.fmt(f),
            Self::I64(x) => x.fmt(f),
            Self::F64(x) => x.fmt(f),
        }
    }
}

/// Text from a file, escaped and truncated for a one-line message.
pub(super) fn shown(text: &str) -> String {
    const LONGEST: usize = 100;
    let escaped: String = text.chars().take(LONGEST).flat_map(char::escape_debug).collect();
    if text.chars().nth(LONGEST).is_some() { escaped + "..." } else { escaped }
}

/// An array in the file.
#[derive(Clone, Copy, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// The type of its elements.
    pub fn element(self) -> ValueType {
        self.element
    }

    /// Its elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Its elements, first to last.
    pub fn iter(self) -> impl Iterator<Item = Value<'a>> {
        let mut cursor = Cursor::new(self.bytes);
        // Checked when the file was opened; a malformed element (the file changed) ends the iteration.
        (0..self.len).map_while(move |_| read(&mut cursor, self.element))
    }

    /// Its strings, or `None` if it is an array of something else.
    pub fn strings(self) -> Option<impl Iterator<Item = &'a str>> {
        (self.element == ValueType::String).then(|| self.iter().map_while(Value::as_str))
    }
}

impl std::fmt::Debug for Array<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "[{:?}; {}]", self.element, self.len)
    }
}

/// Skips one value, checking it.
pub(super) fn check(cursor: &mut Cursor<'_>, kind: ValueType) -> Result<(), String> {
    check_nested(cursor, kind, 0)
}

fn check_nested(cursor: &mut Cursor<'_>, kind: ValueType, nesting: usize) -> Result<(), String> {
    match kind {
        ValueType::String => cursor.string().map(drop),
        ValueType::Array => {
            if nesting == MAX_NESTING {
                return Err(format!("is an array nested more than {MAX_NESTING} deep"));
            }
            let id = cursor.u32()?;
            let element = ValueType::from_id(id).ok_or_else(|| format!("is an array of unknown type {id}"))?;
            let len = cursor.count(element.min_bytes())?;
            match element {
                ValueType::String | ValueType::Array => {
                    (0..len).try_for_each(|_| check_nested(cursor, element, nesting + 1))
                }
                // `count` checked that the product fits the remaining bytes.
                _ => check_fixed(element, cursor.take(len * element.min_bytes())?),
            }
        }
        _ => check_fixed(kind, cursor.take(kind.min_bytes())?),
    }
}

fn check_fixed(kind: ValueType, bytes: &[u8]) -> Result<(), String> {
    match kind == ValueType::Bool && bytes.iter().any(|byte| *byte > 1) {
        true => Err("contains a boolean that is neither 0 nor 1".into()),
        false => Ok(()),
    }
}

/// Reads a value that [`check`] has passed.
pub(super) fn read<'a>(cursor: &mut Cursor<'a>, kind: ValueType) -> Option<Value<'a>> {
    Some(match kind {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array()?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array()?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array()?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array()?)),
        ValueType::U32 => Value::U32(u32::from_le_bytes(cursor.array()?)),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array()?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array()?)),
        ValueType::U64 => Value::U64(u64::from_le_bytes(cursor.array()?)),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array()?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array()?)),
        ValueType::Bool => Value::Bool(u8::from_le_bytes(cursor.array()?) != 0),
        ValueType::String => Value::String(cursor.string().ok()?),
        ValueType::Array => {
            let start = cursor.at();
            check(cursor, ValueType::Array).ok()?;
            Value::Array(array(cursor.since(start)?)?)
        }
    })
}

/// Reads an array that spans all of `bytes`, without scanning its elements.
pub(super) fn array(bytes: &[u8]) -> Option<Array<'_>> {
    let mut cursor = Cursor::new(bytes);
    let element = ValueType::from_id(cursor.u32().ok()?)?;
    let len = cursor.count(element.min_bytes()).ok()?;
    Some(Array { element, len, bytes: cursor.rest() })
}
