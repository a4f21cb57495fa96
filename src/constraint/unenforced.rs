//! Refuses parts of JSON schemas that llguidance accepts but does not enforce.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// The problem of an object in a schema that has such a keyword.
pub(super) fn problem(fields: &Map<String, Value>) -> Option<String> {
    let constants = fields.get("const").into_iter().chain(fields.get("enum").filter(|values| values.is_array()));
    constants.filter_map(rounded).next().or_else(|| repeated(fields))
}

/// From this number on, 2^64, serde_json reads integers as floats, which may differ from them.
const BEYOND_INTEGERS: f64 = u64::MAX as f64;

/// The problem of a constant that has an integer that is not a 64-bit float, or may not be one.
fn rounded(constant: &Value) -> Option<String> {
    match constant {
        Value::Array(list) => list.iter().find_map(rounded),
        Value::Object(fields) => fields.values().find_map(rounded),
        Value::Number(number) if number.is_f64() => {
            let is_beyond = number.as_f64()?.abs() >= BEYOND_INTEGERS;
            is_beyond
                .then(|| format!("has the constant {number}, beyond 64-bit integers; use a string, or at most 2^53"))
        }
        Value::Number(number) => {
            let exact = number.as_i64().map(i128::from).or(number.as_u64().map(i128::from))?;
            let float = number.as_f64()?;
            (float as i128 != exact).then(|| {
                format!("has the constant {number}, which is not a 64-bit float; use a string, or at most 2^53")
            })
        }
        _ => None,
    }
}

/// The problem of an object that could reach its `minProperties` by repeating a name.
fn repeated(fields: &Map<String, Value>) -> Option<String> {
    let least = fields.get("minProperties")?.as_u64()?;
    let required = fields.get("required").and_then(Value::as_array).into_iter().flatten();
    let required = required.collect::<HashSet<_>>().len() as u64;
    let patterns = fields.get("patternProperties").and_then(Value::as_object);
    let is_open = fields.get("additionalProperties") != Some(&Value::Bool(false));
    let has_names = is_open || patterns.is_some_and(|patterns| !patterns.is_empty());
    (has_names && least.saturating_sub(required) > 1).then(|| {
        format!(
            "has minProperties {least} and {required} required properties; at most one more is supported if their names are free, \
             as a name could come twice; require more of them"
        )
    })
}
