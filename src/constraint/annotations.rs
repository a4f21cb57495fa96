//! Keywords of JSON schemas that restrict nothing, and that llguidance refuses.

use serde_json::Value;

/// Formats that llguidance knows. JSON Schema has all others as annotations.
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];

/// Keywords whose values are maps of schemas, arrays of schemas, and schemas.
const MAPS: [&str; 5] = ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
const LISTS: [&str; 4] = ["prefixItems", "allOf", "anyOf", "oneOf"];
const ONES: [&str; 4] = ["items", "additionalProperties", "not", "contains"];

/// Removes unknown formats, and `propertyNames` that allow every name.
pub(crate) fn remove(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    if fields.get("format").and_then(Value::as_str).is_some_and(|format| !FORMATS.contains(&format)) {
        fields.remove("format");
    }
    let allows_all = |names: &Value| match names {
        Value::Object(names) => names.iter().all(|(key, value)| key == "type" && value == "string"),
        names => *names == Value::Bool(true),
    };
    if fields.get("propertyNames").is_some_and(allows_all) {
        fields.remove("propertyNames");
    }
    for (key, value) in fields.iter_mut() {
        match value {
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => schemas.values_mut().for_each(remove),
            Value::Array(schemas) if LISTS.contains(&key.as_str()) => schemas.iter_mut().for_each(remove),
            schema if ONES.contains(&key.as_str()) => remove(schema),
            _ => {}
        }
    }
}
