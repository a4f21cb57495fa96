//! The fields of a request's JSON object, taken one by one. A field that no route takes is an error that names it.

use serde_json::{Map, Value};

use crate::api_error::{ApiError, Result};

/// An object whose fields are taken by name. `null` is the same as absent.
pub(crate) struct Fields {
    values: Map<String, Value>,
    /// Prepended to names in errors: empty, or `messages[0].`.
    prefix: String,
    /// Bytes of the body whose object it is; 0 of a nested one.
    pub body_bytes: usize,
}

impl Fields {
    /// The object in a request's body.
    ///
    /// # Errors
    /// If it is not valid JSON, or not an object.
    pub fn parse(body: &[u8]) -> Result<Self> {
        let malformed = |e: serde_json::Error| {
            // serde_json's message would repeat the client's text.
            let place = format!("line {}, column {}", e.line(), e.column());
            ApiError::field("body", format!("invalid JSON ({:?} error at {place})", e.classify()))
        };
        match serde_json::from_slice(body).map_err(malformed)? {
            Value::Object(values) => Ok(Self { values, prefix: String::new(), body_bytes: body.len() }),
            other => Err(mismatch("body", &other, "an object")),
        }
    }

    /// The object `value`, which is the field `name`.
    ///
    /// # Errors
    /// If it is not an object.
    pub fn of(value: Value, name: &str) -> Result<Self> {
        match value {
            Value::Object(values) => Ok(Self { values, prefix: format!("{name}."), body_bytes: 0 }),
            other => Err(mismatch(name, &other, "an object")),
        }
    }

    /// The objects in `list`, which is the field `name`. Each is an error if it is not an object.
    pub fn each(list: Vec<Value>, name: String) -> impl Iterator<Item = Result<Self>> {
        list.into_iter().enumerate().map(move |(i, value)| Self::of(value, &format!("{name}[{i}]")))
    }

    /// The full name of a field.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.prefix)
    }

    /// An error of a field.
    pub fn error(&self, field: &str, problem: impl AsRef<str>) -> ApiError {
        ApiError::field(self.name(field), problem)
    }

    /// An error of a field whose value is not `what` (`a string`).
    pub fn mismatch(&self, field: &str, value: &Value, what: &str) -> ApiError {
        mismatch(&self.name(field), value, what)
    }

    /// # Errors
    /// If a field has `count` items (`token ids`), and these are more than `most`.
    pub fn check_count(&self, field: &str, count: usize, items: &str, most: usize) -> Result<()> {
        match count > most {
            true => Err(self.error(field, format!("has {count} {items}, at most {most} are allowed"))),
            false => Ok(()),
        }
    }

    /// Takes the field's value, of any type.
    pub fn value(&mut self, field: &str) -> Option<Value> {
        self.values.remove(field).filter(|value| !value.is_null())
    }

    /// The field's value, without taking it.
    pub fn peek(&self, field: &str) -> Option<&Value> {
        self.values.get(field).filter(|value| !value.is_null())
    }

    /// # Errors
    /// If it is not a number.
    pub fn number(&mut self, field: &str) -> Result<Option<f64>> {
        self.typed(field, "a number", |value| value.as_f64())
    }

    /// An integer, also one with a fraction of 0 (`16.0`).
    ///
    /// # Errors
    /// If it is not a 64-bit integer.
    pub fn integer(&mut self, field: &str) -> Result<Option<i128>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let integer = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
        match (integer, value.as_f64().filter(|float| float.fract() == 0.0)) {
            (Some(integer), _) => Ok(Some(integer)),
            (None, Some(float)) if (MIN_INTEGER..MAX_INTEGER).contains(&float) => Ok(Some(float as i128)),
            (None, Some(float)) => {
                let problem = format!("is {float:e}, must be an integer between {} and {}", i64::MIN, u64::MAX);
                Err(self.error(field, problem))
            }
            (None, None) => Err(self.mismatch(field, &value, "an integer")),
        }
    }

    /// # Errors
    /// If it is not an integer in `range`.
    pub fn count(&mut self, field: &str, range: std::ops::RangeInclusive<usize>) -> Result<Option<usize>> {
        let Some(given) = self.integer(field)? else { return Ok(None) };
        let (least, most) = (*range.start(), *range.end());
        match usize::try_from(given).ok().filter(|count| range.contains(count)) {
            Some(count) => Ok(Some(count)),
            None if most == usize::MAX => Err(self.error(field, format!("is {given}, must be at least {least}"))),
            None => Err(self.error(field, format!("is {given}, must be between {least} and {most}"))),
        }
    }

    /// # Errors
    /// If it is not a string.
    pub fn string(&mut self, field: &str) -> Result<Option<String>> {
        self.typed(field, "a string", |value| value.as_str().map(str::to_owned))
    }

    /// # Errors
    /// If it is absent, or not a string.
    pub fn required(&mut self, field: &str) -> Result<String> {
        self.string(field)?.ok_or_else(|| self.error(field, "is required"))
    }

    /// # Errors
    /// If it is not a boolean.
    pub fn flag(&mut self, field: &str) -> Result<Option<bool>> {
        self.typed(field, "a boolean", |value| value.as_bool())
    }

    /// # Errors
    /// If it is not an array.
    pub fn list(&mut self, field: &str) -> Result<Option<Vec<Value>>> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.mismatch(field, &other, "an array")),
        }
    }

    /// The strings of a field that is a string or an array of them, without empty ones.
    ///
    /// # Errors
    /// If it is neither, or has too many or too long strings.
    pub fn strings(&mut self, field: &str) -> Result<Vec<String>> {
        let mut strings = match self.value(field) {
            None => return Ok(Vec::new()),
            Some(Value::String(one)) => vec![one],
            Some(Value::Array(list)) => self.each_string(field, list)?,
            Some(other) => return Err(self.mismatch(field, &other, "a string or an array of strings")),
        };
        strings.retain(|string| !string.is_empty());
        self.check_count(field, strings.len(), "strings", MAX_STRINGS)?;
        match strings.iter().find(|string| string.len() > MAX_STRING_BYTES) {
            Some(string) => {
                let problem = format!("has a string of {} bytes, at most {MAX_STRING_BYTES} are allowed", string.len());
                Err(self.error(field, problem))
            }
            None => Ok(strings),
        }
    }

    /// The strings in `list`, which is the field `name`.
    ///
    /// # Errors
    /// If one is not a string.
    pub fn each_string(&self, name: &str, list: Vec<Value>) -> Result<Vec<String>> {
        let string = |(i, value): (usize, Value)| match value {
            Value::String(string) => Ok(string),
            other => Err(self.mismatch(&format!("{name}[{i}]"), &other, "a string")),
        };
        list.into_iter().enumerate().map(string).collect()
    }

    /// The token ids in `list`, which is the field `name`.
    ///
    /// # Errors
    /// If one is not a token id.
    pub fn token_ids(&self, name: &str, list: &[Value]) -> Result<Vec<u32>> {
        let id = |(i, value): (usize, &Value)| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.ok_or_else(|| self.mismatch(&format!("{name}[{i}]"), value, "a token id"))
        };
        list.iter().enumerate().map(id).collect()
    }

    /// # Errors
    /// If it is not an object.
    pub fn object(&mut self, field: &str) -> Result<Option<Self>> {
        let name = self.name(field);
        self.value(field).map(|value| Self::of(value, &name)).transpose()
    }

    /// The fields that were not taken, without those that are `null`.
    pub fn rest(self) -> impl Iterator<Item = (String, Value)> {
        self.values.into_iter().filter(|(_, value)| !value.is_null())
    }

    /// Takes fields that have no effect, whatever their values.
    pub fn ignore(&mut self, fields: &[&str]) {
        for field in fields {
            self.values.remove(*field);
        }
    }

    /// Takes a field that is supported with the values in `allowed` only.
    ///
    /// # Errors
    /// If it has another value.
    pub fn only(&mut self, field: &str, allowed: &[Value]) -> Result<()> {
        let Some(value) = self.value(field) else { return Ok(()) };
        let same = |other: &Value| match (value.as_f64(), other.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => value == *other,
        };
        if allowed.iter().any(same) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(Value::to_string).collect();
        let problem = match allowed.len() {
            0 => "is not supported; omit it".to_owned(),
            1 => format!("only {} is supported; omit it", allowed[0]),
            _ => format!("only {} are supported", allowed.join(", ")),
        };
        Err(self.error(field, problem).with_code("unsupported_parameter"))
    }

    /// # Errors
    /// If a field was not taken.
    pub fn end(self) -> Result<()> {
        match self.values.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((field, _)) => {
                let field: String = self.name(field).chars().take(MAX_NAME).filter(|c| !c.is_control()).collect();
                let problem = "unknown or unsupported field; remove it";
                Err(ApiError::field(field, problem).with_code("unsupported_parameter"))
            }
        }
    }

    fn typed<T>(&mut self, field: &str, what: &str, take: impl FnOnce(&Value) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match take(&value) {
            Some(taken) => Ok(Some(taken)),
            None => Err(self.mismatch(field, &value, what)),
        }
    }
}

/// Maximum number of strings in a field, and bytes of one: every token is compared with all of them.
const MAX_STRINGS: usize = 16;
const MAX_STRING_BYTES: usize = 1024;

/// Floating-point numbers from the first on and below the second are 64-bit integers.
const MIN_INTEGER: f64 = i64::MIN as f64;
const MAX_INTEGER: f64 = u64::MAX as f64;

/// Characters of an unknown field's name that an error repeats.
const MAX_NAME: usize = 64;

/// As [`Fields::mismatch`], of a full name. It has the value's type alone: values may be long, and are the client's.
pub(crate) fn mismatch(name: &str, value: &Value, what: &str) -> ApiError {
    let kind = match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(number) if number.is_f64() => "a fractional number",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    ApiError::field(name, format!("is {kind}, must be {what}"))
}
