//! Keywords of JSON schemas that restrict nothing, and that llguidance refuses or misreads.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::keywords::is_keyword;

/// Formats that llguidance knows. JSON Schema has all others as annotations.
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];

/// Removes a schema's `format` if it is unknown, `propertyNames` that allow every name, `uniqueItems` that are not
/// asked for, and `additionalItems` without a list of `items`.
pub(super) fn remove(fields: &mut Map<String, Value>) {
    let has_list = fields.get("items").is_some_and(Value::is_array);
    // The order of the others, in which llguidance reads them, is kept.
    fields.retain(|key, value| match key.as_str() {
        "format" => value.as_str().is_none_or(|format| FORMATS.contains(&format)),
        "propertyNames" => !allows_all(value),
        "uniqueItems" => *value != Value::Bool(false),
        // With it, llguidance ignores `prefixItems`.
        "additionalItems" => has_list,
        _ => true,
    });
}

/// Removes words that are no keywords, unless they are `in_references`. Beside a `$ref`, llguidance takes them for
/// schemas of their own, which it does not merge with a schema that refers to itself.
pub(super) fn remove_words(fields: &mut Map<String, Value>, in_references: &HashSet<String>) {
    fields.retain(|key, _| is_keyword(key) || in_references.contains(key));
}

fn allows_all(names: &Value) -> bool {
    match names {
        Value::Object(names) => names.iter().all(|(key, value)| key == "type" && value == "string"),
        names => *names == Value::Bool(true),
    }
}

/// Moves `additionalItems` after the list of `items`, and `additionalProperties` after `patternProperties`: llguidance
/// reads the keywords before and after one like `allOf` apart.
pub(super) fn join(fields: &mut Map<String, Value>) {
    for (others, named) in [("additionalItems", "items"), ("additionalProperties", "patternProperties")] {
        if !fields.contains_key(named) {
            continue;
        }
        let Some(mut of_others) = fields.get_mut(others).map(Value::take) else { continue };
        for (key, value) in std::mem::take(fields) {
            let is_named = key == named;
            if key != others {
                fields.insert(key, value);
            }
            if is_named {
                fields.insert(others.into(), of_others.take());
            }
        }
    }
}
