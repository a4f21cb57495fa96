//! Typed access to the metadata of one architecture, so that every error names file and key.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::file::Gguf;
use super::metadata::{Value, shown};
use crate::checkpoint::spelling::misspelt;
use crate::{Error, Result};

/// The keys `{prefix}.*`; names that begin with a known section (`tokenizer.`, `general.`) are used unchanged.
pub(crate) struct Keys<'a> {
    gguf: &'a Gguf,
    prefix: &'a str,
    looked_for: RefCell<BTreeSet<String>>,
}

impl<'a> Keys<'a> {
    pub(crate) fn new(gguf: &'a Gguf, prefix: &'a str) -> Self {
        Self { gguf, prefix, looked_for: RefCell::default() }
    }

    pub(crate) fn gguf(&self) -> &'a Gguf {
        self.gguf
    }

    fn full(&self, key: &str) -> String {
        match key.starts_with("tokenizer.") || key.starts_with("general.") {
            true => key.to_owned(),
            false => format!("{}.{key}", self.prefix),
        }
    }

    pub(crate) fn value(&self, key: &str) -> Option<Value<'a>> {
        let full = self.full(key);
        let value = self.gguf.metadata(&full);
        self.looked_for.borrow_mut().insert(full);
        value
    }

    /// Refuses a key that was not looked for and differs in one place from one that is absent.
    ///
    /// # Errors
    /// If there is one.
    pub(crate) fn refuse_misspelt(&self) -> Result<()> {
        let looked_for = self.looked_for.borrow();
        match misspelt(&looked_for, &self.gguf.keys().collect()) {
            None => Ok(()),
            Some((name, absent)) => {
                let problem =
                    format!("is not a known key; did you mean {absent}, which is missing? Download the file again");
                Err(self.gguf.key_error(&shown(name), problem))
            }
        }
    }

    pub(crate) fn error(&self, key: &str, problem: impl Into<String>) -> Error {
        self.gguf.key_error(&self.full(key), problem)
    }

    /// An error about a key whose value is not implemented.
    pub(crate) fn unsupported(&self, key: &str, problem: impl Into<String>) -> Error {
        let path = Some(self.gguf.path().to_owned());
        Error::Unsupported { path, what: self.full(key), problem: problem.into() }
    }

    pub(crate) fn missing(&self, key: &str) -> Error {
        self.error(key, "is missing; convert the checkpoint again")
    }

    pub(crate) fn typed<T>(
        &self,
        key: &str,
        kind: &str,
        read: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        read(value)
            .map(Some)
            .ok_or_else(|| self.error(key, format!("is {value:?}, must be {kind}; convert the checkpoint again")))
    }

    /// A size that may be zero, below 2^31 so that products of two sizes cannot overflow.
    pub(crate) fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "an integer from 0 to 2147483647", size)
    }

    /// A positive size.
    pub(crate) fn size(&self, key: &str) -> Result<usize> {
        match self.optional_size(key)? {
            Some(0) => Err(self.error(key, "is 0; convert the checkpoint again")),
            Some(size) => Ok(size),
            None => Err(self.missing(key)),
        }
    }

    /// A positive size of at most `limit`.
    pub(crate) fn size_up_to(&self, key: &str, limit: usize) -> Result<usize> {
        match self.size(key)? {
            size if size > limit => Err(self.error(key, format!("is {size}, must be at most {limit}"))),
            size => Ok(size),
        }
    }

    /// A positive, finite number.
    pub(crate) fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a positive number", |value| number(value).filter(|x| x.is_finite() && *x > 0.0))
    }

    /// A finite number, an integer or not.
    pub(crate) fn optional_number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", |value| number(value).filter(|x| x.is_finite()))
    }

    /// A positive, finite number; 0 means none, as in llama.cpp.
    pub(crate) fn positive_or_none(&self, key: &str) -> Result<Option<f64>> {
        match self.value(key).and_then(number) {
            Some(0.0) => Ok(None),
            _ => self.optional_positive(key),
        }
    }

    pub(crate) fn optional_bool(&self, key: &str) -> Result<Option<bool>> {
        // Some writers use an integer.
        let flag = |value: Value<'a>| value.as_u64().filter(|number| *number <= 1).map(|number| number == 1);
        self.typed(key, "true or false", |value| value.as_bool().or_else(|| flag(value)))
    }

    /// A name, of limited length.
    pub(crate) fn optional_str(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string of at most 100 bytes", |value| value.as_str().filter(|text| text.len() <= 100))
    }

    pub(crate) fn optional_token_id(&self, key: &str) -> Result<Option<u32>> {
        self.typed(key, "a token id", |value| value.as_u64().and_then(|id| u32::try_from(id).ok()))
    }

    /// Token ids: one, or an array of them, or none if the key is absent. At most `limit`.
    pub(crate) fn token_ids(&self, key: &str, limit: usize) -> Result<Vec<u32>> {
        let id = |value: Value<'_>| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids = self.typed(key, &format!("a token id or at most {limit} of them"), |value| match value {
            Value::Array(array) if array.len() > limit => None,
            Value::Array(array) => array.iter().map(id).collect(),
            value => id(value).map(|id| vec![id]),
        })?;
        Ok(ids.unwrap_or_default())
    }

    /// A positive size for each of `layers` layers: an array, or one for all.
    pub(crate) fn sizes(&self, key: &str, layers: usize) -> Result<Vec<usize>> {
        let positive = |value: Value<'_>| size(value).filter(|size| *size > 0);
        let sizes = self.typed(key, &format!("a positive integer or {layers} of them"), |value| match value {
            Value::Array(array) if array.len() != layers => None,
            Value::Array(array) => array.iter().map(positive).collect(),
            value => positive(value).map(|size| vec![size; layers]),
        })?;
        sizes.ok_or_else(|| self.missing(key))
    }

    /// A boolean per layer: booleans, or integers (0 is false).
    pub(crate) fn flags(&self, key: &str, layers: usize) -> Result<Vec<bool>> {
        let flags = self.typed(key, &format!("an array of {layers} truth values"), |value| {
            value.as_array().filter(|array| array.len() == layers)?.iter().map(truth).collect()
        })?;
        flags.ok_or_else(|| self.missing(key))
    }
}

/// A boolean, or a number: some writers have no arrays of booleans.
pub(crate) fn truth(value: Value<'_>) -> Option<bool> {
    value.as_bool().or_else(|| value.as_u64().map(|number| number != 0))
}

/// A number, an integer or not.
pub(super) fn number(value: Value<'_>) -> Option<f64> {
    value.as_f64().or_else(|| value.as_u64().map(|number| number as f64))
}

fn size(value: Value<'_>) -> Option<usize> {
    value.as_u64().filter(|size| *size < 1 << 31).map(|size| size as usize)
}
