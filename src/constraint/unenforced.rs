//! Refuses parts of JSON schemas that llguidance accepts but does not enforce.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// The problem of an object in a schema that has such a keyword.
pub(super) fn problem(fields: &Map<String, Value>) -> Option<String> {
    let constants = fields.get("const").into_iter().chain(fields.get("enum").filter(|values| values.is_array()));
    constants.filter_map(rounded).next().or_else(|| below_integers(fields)).or_else(|| repeated(fields))
}

/// 2^63. llguidance converts the bounds of integers, and integer constants, to signed 64-bit integers, and takes their
/// absolute values.
const BEYOND_INTEGERS: f64 = 9_223_372_036_854_775_808.0;

/// The problem of a constant that has an integer that is not a 64-bit float, or a number of [`BEYOND_INTEGERS`].
fn rounded(constant: &Value) -> Option<String> {
    match constant {
        Value::Array(list) => list.iter().find_map(rounded),
        Value::Object(fields) => fields.values().find_map(rounded),
        Value::Number(number) => {
            let float = number.as_f64()?;
            if float.abs() >= BEYOND_INTEGERS {
                return Some(format!("has the constant {number}, of 2^63 or above; use a string, or at most 2^53"));
            }
            (float as i64 != number.as_i64()?).then(|| {
                format!("has the constant {number}, which is not a 64-bit float; use a string, or at most 2^53")
            })
        }
        _ => None,
    }
}

/// The problem of a schema for numbers of -2^63 or below.
fn below_integers(fields: &Map<String, Value>) -> Option<String> {
    ["maximum", "exclusiveMaximum"].into_iter().find_map(|key| {
        let bound = fields.get(key)?;
        (bound.as_f64()? <= -BEYOND_INTEGERS).then(|| format!("has {key} {bound}; it must be above -2^63"))
    })
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
