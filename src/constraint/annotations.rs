//! Keywords of JSON schemas that restrict nothing, and that llguidance refuses or misreads.

use serde_json::{Map, Value};

/// Formats that llguidance knows. JSON Schema has all others as annotations.
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];

/// Removes a schema's `format` if it is unknown, `propertyNames` that allow every name,
/// `uniqueItems` that are not asked for, and `additionalItems` without a list of `items`.
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

fn allows_all(names: &Value) -> bool {
    match names {
        Value::Object(names) => names.iter().all(|(key, value)| key == "type" && value == "string"),
        names => *names == Value::Bool(true),
    }
}

/// Moves `additionalItems` after the list of `items`: llguidance reads the keywords before and after one like `allOf`
/// apart, and ignores `additionalItems` alone.
pub(super) fn join_items(fields: &mut Map<String, Value>) {
    let Some(others) = fields.get("additionalItems").cloned() else { return };
    for (key, value) in std::mem::take(fields) {
        match key.as_str() {
            "additionalItems" => {}
            "items" => {
                fields.insert(key, value);
                fields.insert("additionalItems".into(), others.clone());
            }
            _ => drop(fields.insert(key, value)),
        }
    }
}
