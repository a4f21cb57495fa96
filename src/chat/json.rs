//! JSON values whose objects preserve key order, formatted like Python's `json.dumps`.

use std::fmt;

use minijinja::value::ValueKind;
use minijinja::{Error as TemplateError, Value};
use serde::Serialize;

use super::python::wrong;
use crate::{Error, Result};

/// A JSON value: the arguments of a tool call, the schema of a tool, a variable of a template.
/// Objects preserve key order, which templates output.
#[derive(Clone, Debug, PartialEq)]
pub struct Json(pub(crate) Value);

impl Json {
    /// Parses `text`.
    ///
    /// # Errors
    /// If it is not JSON, or nests more than 127 levels.
    pub fn parse(text: &str) -> Result<Self> {
        serde_json::from_str(text).map(Self).map_err(|e| Error::argument("JSON", format!("cannot be parsed: {e}")))
    }

    /// Serializes a value; a `serde_json::Value` has the key order that `serde_json` was built with.
    ///
    /// # Errors
    /// If its `Serialize` fails.
    pub fn of(value: &impl Serialize) -> Result<Self> {
        let text = serde_json::to_string(value);
        Self::parse(&text.map_err(|e| Error::argument("JSON", format!("cannot be serialized: {e}")))?)
    }

    /// The text of a string; `None` if it is not a string.
    pub fn as_str(&self) -> Option<&str> {
        self.0.as_str()
    }

    /// The items of a list.
    ///
    /// # Errors
    /// If it is not a list.
    pub fn into_list(self) -> Result<Vec<Self>> {
        match self.0.kind() {
            ValueKind::Seq => Ok(self.0.try_iter().into_iter().flatten().map(Self).collect()),
            kind => Err(Error::argument("JSON", format!("is a {kind}; a list is expected here"))),
        }
    }

    /// The fields of an object, in order.
    ///
    /// # Errors
    /// If it is not an object.
    pub fn into_fields(self) -> Result<Vec<(String, Self)>> {
        if !self.is_object() {
            return Err(Error::argument("JSON", format!("is a {}; an object is expected here", self.0.kind())));
        }
        let keys = self.0.try_iter().into_iter().flatten();
        let field = |key: Value| Some((key.as_str()?.to_owned(), Self(self.0.get_item(&key).ok()?)));
        Ok(keys.filter_map(field).collect())
    }

    /// A field of an object.
    pub fn field(&self, name: &str) -> Option<Self> {
        let value = self.0.get_item(&Value::from(name)).ok()?;
        (self.is_object() && !value.is_undefined()).then_some(Self(value))
    }

    /// Whether it is an object.
    pub(super) fn is_object(&self) -> bool {
        self.0.kind() == ValueKind::Map
    }
}

/// Compact JSON.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(&self.0).map_err(|_| fmt::Error)?)
    }
}

impl From<&str> for Json {
    /// The string itself, as a JSON string.
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<bool> for Json {
    fn from(value: bool) -> Self {
        Self(value.into())
    }
}

/// Maximum nesting: `dumps` is recursive.
const MAX_DEPTH: usize = 128;

/// The parameters of Python's `json.dumps`.
pub(super) struct Dumps {
    /// Escapes non-ASCII characters.
    pub ensure_ascii: bool,
    /// Indentation per level; `None` writes one line.
    pub indent: Option<String>,
    /// Between items, and between a key and its value.
    pub separators: (String, String),
    pub sort_keys: bool,
}

impl Dumps {
    /// The text of `value`.
    ///
    /// # Errors
    /// If a part of it is undefined or not a JSON value, or nests too deeply.
    pub fn dump(&self, value: &Value) -> Result<String, TemplateError> {
        let mut out = String::new();
        self.value(value, 0, &mut out)?;
        Ok(out)
    }

    fn value(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), TemplateError> {
        if depth > MAX_DEPTH {
            return Err(wrong(format!("tojson: nests more than {MAX_DEPTH} levels")));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let write = |key: &Value, out: &mut String| {
                    self.string(&key_text(key)?, out);
                    out.push_str(&self.separators.1);
                    self.value(&value.get_item(key)?, depth + 1, out)
                };
                self.items(['{', '}'], &keys, depth, out, write)?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items(['[', ']'], &items, depth, out, |item, out| self.value(item, depth + 1, out))?;
            }
            kind => return Err(wrong(format!("tojson: {kind} is not a JSON value"))),
        }
        Ok(())
    }

    fn items(
        &self,
        [open, close]: [char; 2],
        items: &[Value],
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(&Value, &mut String) -> Result<(), TemplateError>,
    ) -> Result<(), TemplateError> {
        out.push(open);
        for (i, item) in items.iter().enumerate() {
            out.push_str(if i > 0 { &self.separators.0 } else { "" });
            self.line(depth + 1, out);
            write(item, out)?;
        }
        if !items.is_empty() {
            self.line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && c > '~' => {
                    c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| out.push_str(&format!("\\u{unit:04x}")));
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

/// A key, in Python's format if it is not a string.
fn key_text(key: &Value) -> Result<String, TemplateError> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::None => Ok("null".into()),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.into()),
        ValueKind::Number => Ok(number(key)),
        kind => Err(wrong(format!("tojson: {kind} cannot be a key of an object"))),
    }
}

/// A number in the format of `json.dumps`.
fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if float.is_nan() => "NaN".into(),
        Ok(float) if float.is_infinite() => ["Infinity", "-Infinity"][usize::from(float < 0.0)].into(),
        _ => repr(value),
    }
}

/// A number in the format of Python's `repr`: the fewest digits that parse to the same number, with
/// an exponent below 1e-4 and from 1e16 on.
pub(super) fn repr(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if !float.is_finite() {
        return if float.is_nan() { "nan" } else { ["inf", "-inf"][usize::from(float < 0.0)] }.into();
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or_default() {
        -4..16 => format!("{float:?}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}
