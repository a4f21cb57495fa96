//! Which escapes the strings under a JSON schema may contain.

use serde_json::Value;

/// All but `\u`, as llguidance's option `json_allowed_escapes`.
const SHORT: &str = "nrbtf\\\"";

/// The escapes under `schema` if not all: names that it leaves open differ from named ones by their text, so that `\u006e`
/// would be a second `n`. Control characters without a short escape cannot be written then.
pub(crate) fn allowed_escapes(schema: &Value) -> Option<&'static str> {
    (leaves_names_open(schema) && !needs_long_escapes(schema)).then_some(SHORT)
}

/// Whether a part of the schema names properties, or describes their names, and allows others.
fn leaves_names_open(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => {
            let is_open = fields.get("additionalProperties") != Some(&Value::Bool(false));
            let names = |key: &str| fields.get(key).and_then(Value::as_object).is_some_and(|names| !names.is_empty());
            let requires = fields.get("required").and_then(Value::as_array).is_some_and(|names| !names.is_empty());
            let has_open = (names("properties") || requires) && is_open || names("patternProperties");
            has_open || fields.values().any(leaves_names_open)
        }
        Value::Array(items) => items.iter().any(leaves_names_open),
        _ => false,
    }
}

/// Whether a text of the schema, a constant or a name, has a character that only `\u` writes.
fn needs_long_escapes(schema: &Value) -> bool {
    let needs = |text: &str| text.chars().any(|c| c.is_ascii_control() && !"\n\r\t\u{8}\u{c}".contains(c));
    match schema {
        Value::String(text) => needs(text),
        Value::Array(items) => items.iter().any(needs_long_escapes),
        Value::Object(fields) => fields.iter().any(|(name, value)| needs(name) || needs_long_escapes(value)),
        _ => false,
    }
}
