//! Patterns for formats of which llguidance accepts invalid values: the year 0000, 29 February of
//! common years, and second 60.

use serde_json::{Map, Value, json};

const DATE: &str = concat!(
    "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-",
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
);
const TIME: &str =
    concat!(r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?", "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])");

/// Replaces a schema's `format` by a pattern, which goes to `allOf` if the schema has one of its own.
pub(super) fn restrict(fields: &mut Map<String, Value>) {
    let pattern = match fields.get("format").and_then(Value::as_str) {
        Some("date") => format!("^(?:{DATE})$"),
        Some("time") => format!("^(?:{TIME})$"),
        Some("date-time") => format!("^(?:{DATE}[tT]{TIME})$"),
        _ => return,
    };
    if fields.contains_key("pattern") {
        let beside = fields.entry("allOf").or_insert_with(|| json!([]));
        // llguidance refuses an `allOf` that is not a list.
        if let Value::Array(beside) = beside {
            beside.push(json!({"pattern": pattern}));
        }
    } else {
        fields.insert("pattern".into(), json!(pattern));
    }
    fields.retain(|key, _| key != "format");
}
