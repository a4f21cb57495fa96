//! Keywords of JSON schemas that restrict nothing, and that llguidance refuses.

use serde_json::{Map, Value};

/// Formats that llguidance knows. JSON Schema has all others as annotations.
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];

/// Removes a schema's `format` if it is unknown, `propertyNames` that allow every name, and
/// `uniqueItems` that are not asked for.
pub(super) fn remove(fields: &mut Map<String, Value>) {
    // The order of the others, in which llguidance reads them, is kept.
    fields.retain(|key, value| match key.as_str() {
        "format" => value.as_str().is_none_or(|format| FORMATS.contains(&format)),
        "propertyNames" => !allows_all(value),
        "uniqueItems" => *value != Value::Bool(false),
        _ => true,
    });
}

fn allows_all(names: &Value) -> bool {
    match names {
        Value::Object(names) => names.iter().all(|(key, value)| key == "type" && value == "string"),
        names => *names == Value::Bool(true),
    }
}
