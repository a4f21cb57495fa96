//! Keywords of JSON schemas that restrict nothing, and that llguidance refuses or misreads.

use serde_json::{Map, Value};

/// Formats that llguidance knows. JSON Schema has all others as annotations.
const FORMATS: [&str; 11] =
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"];

/// Words of other vocabularies, like OpenAPI's. Beside a `$ref`, llguidance takes them for schemas of their own, which
/// it does not merge with a schema that refers to itself.
const WORDS: [&str; 6] = ["deprecated", "discriminator", "example", "externalDocs", "nullable", "xml"];

/// Removes a schema's `format` if it is unknown, `propertyNames` that allow every name, `uniqueItems` that are not
/// asked for, `additionalItems` without a list of `items`, and words that are no keywords.
pub(super) fn remove(fields: &mut Map<String, Value>) {
    let has_list = fields.get("items").is_some_and(Value::is_array);
    // The order of the others, in which llguidance reads them, is kept.
    fields.retain(|key, value| match key.as_str() {
        "format" => value.as_str().is_none_or(|format| FORMATS.contains(&format)),
        "propertyNames" => !allows_all(value),
        "uniqueItems" => *value != Value::Bool(false),
        // With it, llguidance ignores `prefixItems`.
        "additionalItems" => has_list,
        "x-guidance" => true,
        // What a reference may lead to stays.
        key if key.starts_with("x-") => value.is_object() || value.is_array(),
        key => !WORDS.contains(&key),
    });
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
        let Some(of_others) = fields.get(others).filter(|_| fields.contains_key(named)).cloned() else { continue };
        for (key, value) in std::mem::take(fields) {
            let is_named = key == named;
            if key != others {
                fields.insert(key, value);
            }
            if is_named {
                fields.insert(others.into(), of_others.clone());
            }
        }
    }
}
