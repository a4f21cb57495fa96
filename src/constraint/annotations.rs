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
    let fields = match schema {
        Value::Object(fields) => fields,
        // The older form of `items`.
        Value::Array(list) => return list.iter_mut().for_each(remove),
        _ => return,
    };
    // The order of the others, in which llguidance reads them, is kept.
    fields.retain(|key, value| match key.as_str() {
        "format" => value.as_str().is_none_or(|format| FORMATS.contains(&format)),
        "propertyNames" => !allows_all(value),
        _ => true,
    });
    for (key, value) in fields.iter_mut() {
        match value {
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => schemas.values_mut().for_each(remove),
            schema if LISTS.contains(&key.as_str()) || ONES.contains(&key.as_str()) => remove(schema),
            _ => {}
        }
    }
}

fn allows_all(names: &Value) -> bool {
    match names {
        Value::Object(names) => names.iter().all(|(key, value)| key == "type" && value == "string"),
        names => *names == Value::Bool(true),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_schemas_lose_annotations() {
        let mut schema = json!({
            "type": "object",
            "propertyNames": {"type": "string"},
            "properties": {
                "format": {"type": "string", "format": "cuid"},
                "day": {"type": "string", "format": "date"},
                "record": {"type": "object", "propertyNames": {"type": "string", "pattern": "^a"}},
                "list": {"type": "array", "items": [{"format": "int32"}]}
            },
            "allOf": [{"propertyNames": true}],
            "enum": [{"format": "cuid", "properties": {"a": {"format": "cuid"}}}]
        });
        remove(&mut schema);
        let want = json!({
            "type": "object",
            "properties": {
                "format": {"type": "string"},
                "day": {"type": "string", "format": "date"},
                "record": {"type": "object", "propertyNames": {"type": "string", "pattern": "^a"}},
                "list": {"type": "array", "items": [{}]}
            },
            "allOf": [{}],
            "enum": [{"format": "cuid", "properties": {"a": {"format": "cuid"}}}]
        });
        assert_eq!(schema, want);
    }
}
