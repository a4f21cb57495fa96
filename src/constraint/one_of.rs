//! Whether the cases of every `oneOf` exclude each other, which makes it an `anyOf`. llguidance does not compare cases
//! that are references.

use serde_json::{Map, Value};

use super::references::lookup;

type Fields = Map<String, Value>;

/// Limit of schemas, and pairs of schemas and constants, that are looked at.
const STEPS: usize = 1 << 18;

/// Limit of schemas that hold for one case.
const BESIDE: usize = 16;

/// Whether a document has a `oneOf`, and no value matches two cases of one.
pub(super) fn are_exclusive(root: &Value) -> bool {
    let (mut lists, mut cases) = (Vec::new(), Cases { root, steps: STEPS });
    collect(root, &mut lists);
    !lists.is_empty() && lists.into_iter().all(|list| cases.are_exclusive(list))
}

/// Adds what looks like a `oneOf` in a value, a schema or not.
fn collect<'a>(value: &'a Value, lists: &mut Vec<&'a [Value]>) {
    match value {
        Value::Array(list) => list.iter().for_each(|value| collect(value, lists)),
        Value::Object(fields) => {
            lists.extend(fields.get("oneOf").and_then(Value::as_array).map(Vec::as_slice));
            fields.values().for_each(|value| collect(value, lists));
        }
        _ => {}
    }
}

struct Cases<'a> {
    root: &'a Value,
    /// Left of [`STEPS`]. Without any, no cases exclude each other.
    steps: usize,
}

impl<'a> Cases<'a> {
    /// Whether each two of a list exclude each other.
    fn are_exclusive(&mut self, list: &'a [Value]) -> bool {
        let cases: Vec<_> = list.iter().map(|case| self.beside(case)).collect();
        cases.iter().enumerate().all(|(at, case)| cases[..at].iter().all(|other| self.exclude(case, other)))
    }

    /// The schemas that hold for a value of `schema`: it, what it refers to and its `allOf`.
    fn beside(&mut self, schema: &'a Value) -> Vec<&'a Fields> {
        let (mut found, mut next) = (Vec::new(), vec![schema]);
        while let Some(schema) = next.pop() {
            let Value::Object(fields) = schema else { continue };
            if found.len() == BESIDE || !self.pay(1) {
                break;
            }
            found.push(fields);
            next.extend(fields.get("$ref").and_then(Value::as_str).and_then(|place| lookup(self.root, place)));
            next.extend(fields.get("allOf").and_then(Value::as_array).into_iter().flatten().take(BESIDE));
        }
        found
    }

    /// Whether no value matches two cases: by their types or constants, or by a required property of objects, which has
    /// other ones or is forbidden in one of them.
    fn exclude(&mut self, a: &[&'a Fields], b: &[&'a Fields]) -> bool {
        if self.differ(a, b) {
            return true;
        }
        let both = || a.iter().chain(b);
        if !both().any(|fields| fields.get("type").is_some_and(|kind| kind == "object")) {
            return false;
        }
        let required = both().filter_map(|fields| fields.get("required")?.as_array()).flatten();
        required.filter_map(Value::as_str).any(|name| {
            if !self.pay(a.len() + b.len()) {
                return false;
            }
            let [of_a, of_b] = [a, b].map(|case| self.property(case, name));
            both().any(|fields| forbids(fields, name)) || self.differ(&of_a, &of_b)
        })
    }

    /// The schemas that hold for a property.
    fn property(&mut self, case: &[&'a Fields], name: &str) -> Vec<&'a Fields> {
        let schemas = case.iter().filter_map(|fields| fields.get("properties")?.get(name));
        schemas.flat_map(|schema| self.beside(schema)).collect()
    }

    /// Whether no value has a type, or is a constant, of both.
    fn differ(&mut self, a: &[&Fields], b: &[&Fields]) -> bool {
        a.iter().any(|a| b.iter().any(|b| self.are_apart(a, b)))
    }

    fn are_apart(&mut self, a: &Fields, b: &Fields) -> bool {
        if !self.pay(size(a).saturating_mul(size(b))) {
            return false;
        }
        let have_no_equal = match (constants(a), constants(b)) {
            (Some(a), Some(b)) => a.iter().all(|a| b.iter().all(|b| is_other(a, b))),
            _ => false,
        };
        have_no_equal
            || match (kinds(a), kinds(b)) {
                (Some(a), Some(b)) => a.iter().all(|kind| !b.contains(kind)),
                _ => false,
            }
    }

    /// Takes `steps`; returns whether they were left.
    fn pay(&mut self, steps: usize) -> bool {
        let left = self.steps.checked_sub(steps);
        self.steps = left.unwrap_or(0);
        left.is_some()
    }
}

/// A bound on the types and constants in a schema's lists of them.
fn size(fields: &Fields) -> usize {
    ["type", "enum"].map(|key| fields.get(key).and_then(Value::as_array).map_or(1, |list| list.len() + 1)).iter().sum()
}

/// Whether no object has a property.
fn forbids(fields: &Fields, name: &str) -> bool {
    let is_closed = fields.get("additionalProperties") == Some(&Value::Bool(false));
    let is_named = fields.get("properties").is_some_and(|schemas| schemas.get(name).is_some());
    is_closed && !is_named && !fields.contains_key("patternProperties")
}

/// The values of `const` or `enum`.
fn constants(fields: &Fields) -> Option<&[Value]> {
    fields.get("const").map(std::slice::from_ref).or_else(|| Some(fields.get("enum")?.as_array()?.as_slice()))
}

/// Types, as named or as the constants have them; `None` if they are malformed or any.
fn kinds(fields: &Fields) -> Option<Vec<&str>> {
    match fields.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().map(kind).collect(),
        Some(of_all) => Some(vec![kind(of_all)?]),
        None => Some(constants(fields)?.iter().map(kind_of).collect()),
    }
}

/// A type's name, that of all numbers for integers.
fn kind(name: &Value) -> Option<&str> {
    name.as_str().map(|name| if name == "integer" { "number" } else { name })
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Whether two values are not equal, as far as that is known: numbers are equal whatever their notation.
fn is_other(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() != b.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => false,
        (a, b) => a != b,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn cases_exclude_each_other_by_types_and_constants() {
        let tagged = |tag: Value| json!({"type": "object", "properties": {"n": {}, "k": tag}, "required": ["n", "k"]});
        let closed = |name: &str| json!({"type": "object", "properties": {name: {}}, "required": [name], "additionalProperties": false});
        let definitions = json!({"a": tagged(json!({"const": "a"})), "b": tagged(json!({"enum": ["b", "c"]})),
            "bs": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "self": {"$ref": "#/$defs/self"}});
        let of = |cases: Value| are_exclusive(&json!({"items": {"oneOf": cases}, "$defs": definitions}));
        let reference = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
        for cases in [
            json!([]),
            json!([reference("a"), reference("b"), reference("bs"), {"type": ["integer", "null"]}]),
            json!([reference("a"), {"allOf": [reference("b")], "description": "x"}]),
            json!([reference("a"), {"properties": {"k": {"type": "integer"}}}]),
            json!([closed("x"), closed("y"), {"type": "null"}]),
            json!([{"const": "a"}, {"enum": ["b", 1]}, {"const": 2.0}, {"type": "array"}]),
        ] {
            assert!(of(cases.clone()), "{cases}");
        }
        for cases in [
            json!([reference("a"), reference("a")]),
            json!([reference("a"), reference("missing")]),
            json!([reference("self"), reference("self")]),
            json!([reference("b"), tagged(json!({"const": "c"}))]),
            json!([{"const": 1}, {"const": 1.0}]),
            json!([{"type": "integer"}, {"type": "number"}]),
            json!([{"const": [1]}, {"const": [1.0]}]),
            // Values that are no objects match both.
            json!([{"properties": {"k": {"const": 1}}, "required": ["k"]}, {"properties": {"k": {"const": 2}}}]),
            // An object without the property matches both.
            json!([{"type": "object", "properties": {"k": {"const": 1}}}, {"properties": {"k": {"const": 2}}}]),
            json!([{"type": "string"}, true]),
            json!([closed("x"), {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": false}]),
        ] {
            assert!(!of(cases.clone()), "{cases}");
        }
        assert!(!are_exclusive(&json!({"type": "string"})));
        // One that is not looked at to its end.
        let many: Vec<_> = (0..2000).map(|i| json!({"const": i})).collect();
        assert!(!of(json!(many)));
    }
}
