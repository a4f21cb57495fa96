//! JSON objects read field by field; every error names file and field.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fs::Metadata;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::spelling::misspelt;
use crate::checkpoint::refuse_placeholder;
use crate::{Error, Result};

/// Size limit of JSON configuration files (tokenizer files may be larger and are read elsewhere).
const MAX_BYTES: u64 = 64 << 20;

/// Limits above any model's: layouts, tables of angles and lists of names are allocated by these sizes before a tensor
/// could contradict them.
pub(crate) const MAX_LAYERS: usize = 1024;
pub(crate) const MAX_HEADS: usize = 1024;
pub(crate) const MAX_HEAD_DIM: usize = 8192;

/// The metadata of the regular file `path`: reading a pipe would wait for its writer, and a device may have no end.
///
/// # Errors
/// If it is missing, or is not a regular file; the error says what is `expected`.
pub(crate) fn regular_file(path: &Path, expected: &str) -> Result<Metadata> {
    let meta = std::fs::metadata(path).map_err(Error::io(path))?;
    if meta.is_file() {
        return Ok(meta);
    }
    let kind = if meta.is_dir() { "is a directory" } else { "is not a regular file" };
    Err(Error::file(path, format!("{kind}; {expected} is expected here")))
}

/// Whether `path` is a file or a link, even one to a file that is missing, as in an incomplete cache of the Hub: reading
/// that is an error, while a file that is optional may be absent.
pub(crate) fn is_present(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// The text of the file `path`, which has passed [`regular_file`].
///
/// # Errors
/// If it cannot be read, is a placeholder, or not UTF-8.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    refuse_placeholder(path, &bytes)?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Error::file(path, format!("is not UTF-8 from byte {at} on; save it as UTF-8, or download it again"))
    })
}

/// A JSON object, with the file and the nesting it was found in: what the models' configurations are read from
/// ([`TextConfig::target`](crate::gemma4::TextConfig::target)).
#[derive(Clone, Debug)]
pub struct Fields {
    path: PathBuf,
    nesting: String,
    object: Map<String, Value>,
    looked_for: RefCell<BTreeSet<String>>,
}

impl Fields {
    /// Reads the object that makes up the file `path`.
    ///
    /// # Errors
    /// If the file is missing, too large for a configuration, or not a JSON object.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let meta = regular_file(path, "a JSON file")?;
        if meta.len() > MAX_BYTES {
            return Err(Error::file(path, format!("is {} bytes long, too long for a configuration", meta.len())));
        }
        let text = read_text(path)?;
        match serde_json::from_str(text.trim_start_matches('\u{feff}')) {
            Ok(Value::Object(object)) => {
                let (path, nesting, looked_for) = (path.to_owned(), String::new(), RefCell::default());
                Ok(Self { path, nesting, object, looked_for })
            }
            Ok(_) => Err(Error::file(path, "is not a JSON object; download it again")),
            Err(e) => {
                let number = ["NaN", "Infinity"].into_iter().find(|number| text.contains(number));
                let remedy = number.map_or("correct it, or download it again".to_owned(), |number| {
                    format!("{number} is not a JSON number; write null")
                });
                Err(Error::file(path, format!("is not valid JSON: {e}; {remedy}")))
            }
        }
    }

    /// The same for a file that is optional: `None` if it is not [present](is_present).
    ///
    /// # Errors
    /// As [`Fields::read`].
    pub(crate) fn read_if_present(path: impl AsRef<Path>) -> Result<Option<Self>> {
        is_present(path.as_ref()).then(|| Self::read(path)).transpose()
    }

    /// The names of all fields.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.object.keys().map(String::as_str)
    }

    /// The value of a field; absent and `null` are the same.
    pub(crate) fn get(&self, name: &str) -> Option<&Value> {
        self.looked_for.borrow_mut().insert(name.to_owned());
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Refuses an unknown field whose name differs in one place from an absent one.
    ///
    /// # Errors
    /// If there is one.
    pub(crate) fn refuse_misspelt(&self) -> Result<()> {
        let looked_for = self.looked_for.borrow();
        match misspelt(&looked_for, &self.names().collect()) {
            None => Ok(()),
            Some((name, absent)) => {
                let (name, problem) = (
                    name.escape_debug().to_string(),
                    format!("is not a known field; did you mean {absent}, which is missing?"),
                );
                Err(self.error(&name, format!("{problem} Correct the name, or download the file again")))
            }
        }
    }

    /// A nested object.
    ///
    /// # Errors
    /// If it is missing or not an object.
    pub(crate) fn object(&self, name: &str) -> Result<Self> {
        self.optional_object(name)?.ok_or_else(|| self.error(name, "is missing"))
    }

    /// A nested object, or `None` if it is absent.
    ///
    /// # Errors
    /// If it is not an object.
    pub(crate) fn optional_object(&self, name: &str) -> Result<Option<Self>> {
        let nested = |object: &Map<_, _>| Self {
            path: self.path.clone(),
            nesting: format!("{}{name}.", self.nesting),
            object: object.clone(),
            looked_for: RefCell::default(),
        };
        self.typed(name, "an object", |value| value.as_object().map(nested))
    }

    /// A positive size; if absent the default, and without a default an error.
    ///
    /// # Errors
    /// If it is not a positive integer below 2^31 (so that products of two sizes cannot overflow).
    pub(crate) fn size(&self, name: &str, default: Option<usize>) -> Result<usize> {
        match self.optional_size(name)?.or(default) {
            Some(0) => Err(self.error(name, "is 0")),
            Some(size) => Ok(size),
            None => Err(self.error(name, "is missing")),
        }
    }

    /// A positive size of at most `limit`; `default` if it is absent.
    ///
    /// # Errors
    /// As [`Fields::size`], or if it is above `limit`.
    pub(crate) fn size_up_to(&self, name: &str, default: usize, limit: usize) -> Result<usize> {
        match self.size(name, Some(default))? {
            size if size > limit => Err(self.error(name, format!("is {size}, must be at most {limit}"))),
            size => Ok(size),
        }
    }

    /// A size that may be zero, or `None` if it is absent.
    ///
    /// # Errors
    /// If it is not an integer from 0 to 2^31.
    pub(crate) fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        self.typed(name, "an integer from 0 to 2147483647", |value| {
            value.as_u64().filter(|size| *size < 1 << 31).map(|size| size as usize)
        })
    }

    /// A finite number, or `None` if it is absent.
    ///
    /// # Errors
    /// If it is not a finite number.
    pub(crate) fn optional_number(&self, name: &str) -> Result<Option<f64>> {
        self.typed(name, "a number", |value| value.as_f64().filter(|x| x.is_finite()))
    }

    /// A boolean; absent is `false`.
    ///
    /// # Errors
    /// If it is something else.
    pub(crate) fn flag(&self, name: &str) -> Result<bool> {
        Ok(self.optional_flag(name)?.unwrap_or(false))
    }

    /// A boolean, or `None` if it is absent.
    ///
    /// # Errors
    /// If it is something else.
    pub(crate) fn optional_flag(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    /// A string.
    ///
    /// # Errors
    /// If it is missing or something else.
    pub(crate) fn string(&self, name: &str) -> Result<String> {
        self.optional_string(name)?.ok_or_else(|| self.error(name, "is missing"))
    }

    /// A string, or `None` if it is absent.
    ///
    /// # Errors
    /// If it is something else.
    pub(crate) fn optional_string(&self, name: &str) -> Result<Option<String>> {
        self.typed(name, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// A list of strings, or `None` if it is absent.
    ///
    /// # Errors
    /// If it is something else.
    pub(crate) fn optional_strings(&self, name: &str) -> Result<Option<Vec<String>>> {
        self.typed(name, "a list of strings", |value| {
            value.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
        })
    }

    /// Token ids: one, a list of them, or none if the field is absent; -1 stands for none.
    ///
    /// # Errors
    /// If it is something else.
    pub fn token_ids(&self, name: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let is_id = |value: &&Value| value.as_i64() != Some(-1);
        let ids = self.typed(name, "a token id or a list of them", |value| match value {
            Value::Array(items) => items.iter().filter(is_id).map(id).collect(),
            value => Some(value).filter(is_id).map_or(Some(Vec::new()), |value| id(value).map(|id| vec![id])),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// An error about a field.
    pub(crate) fn error(&self, name: &str, problem: impl Into<String>) -> Error {
        Error::Config { path: self.path.clone(), field: format!("{}{name}", self.nesting), problem: problem.into() }
    }

    /// An error about a field whose value is not implemented.
    pub(crate) fn unsupported(&self, name: &str, problem: impl Into<String>) -> Error {
        let what = format!("{}{name}", self.nesting);
        Error::Unsupported { path: Some(self.path.clone()), what, problem: problem.into() }
    }

    fn typed<'a, T>(&'a self, name: &str, kind: &str, read: impl FnOnce(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            let mut shown = value.to_string();
            if shown.len() > 60 {
                let cut = (0..=57).rev().find(|i| shown.is_char_boundary(*i)).unwrap_or(0);
                shown.truncate(cut);
                shown.push_str("...");
            }
            self.error(name, format!("is {shown}, must be {kind}"))
        })
    }
}
