//! Makes a `oneOf` whose cases exclude each other an `anyOf`: llguidance does not compare cases that are references.

use serde_json::{Map, Value};

use super::references::lookup;

type Fields = Map<String, Value>;

/// Limit of steps: schemas, properties, pairs of constants, and 64 bytes of a name that are looked at.
const STEPS: usize = 1 << 18;

/// Limit of steps per byte of the document.
const STEPS_PER_BYTE: usize = 16;

/// Limit of schemas that hold for one case.
const BESIDE: usize = 16;

/// Levels of unions whose types are looked at.
const NESTED: usize = 4;

/// A draft of which `const` is no keyword. llguidance then ignores it if no other keyword is beside it.
const DRAFT_4: &str = "http://json-schema.org/draft-04/schema";

/// Types, as a set of bits.
type Kinds = u8;

const NULL: Kinds = 1;
const BOOLEAN: Kinds = 1 << 1;
const NUMBER: Kinds = 1 << 2;
const STRING: Kinds = 1 << 3;
const ARRAY: Kinds = 1 << 4;
const OBJECT: Kinds = 1 << 5;
const ANY: Kinds = (1 << 6) - 1;

/// The cases of the `oneOf`s of a document.
pub(super) struct Cases<'r> {
    root: &'r Value,
    has_const: bool,
    /// Left of the limit. Without any, no cases exclude each other.
    steps: usize,
}

/// What all values of a case meet.
struct Case<'a> {
    schemas: Vec<&'a Fields>,
    /// The constants of a schema each.
    constants: Vec<&'a [Value]>,
    /// An upper bound.
    kinds: Kinds,
}

impl<'r> Cases<'r> {
    pub fn new(root: &'r Value) -> Self {
        let text = root.to_string();
        let steps = text.len().saturating_mul(STEPS_PER_BYTE).min(STEPS);
        Self { root, has_const: !text.contains(DRAFT_4), steps }
    }

    /// Renames a schema's `oneOf` to `anyOf`, unless it has one, if no value matches two cases.
    pub fn rename(&mut self, fields: &mut Fields) {
        let Some(Value::Array(list)) = fields.get("oneOf") else { return };
        if fields.contains_key("anyOf") || !self.are_exclusive(list) {
            return;
        }
        for (key, value) in std::mem::take(fields) {
            fields.insert(if key == "oneOf" { "anyOf".into() } else { key }, value);
        }
    }

    /// Whether each two of a list exclude each other.
    fn are_exclusive(&mut self, list: &[Value]) -> bool {
        let cases: Vec<_> = list.iter().map(|case| self.case(vec![case], 0)).collect();
        cases.iter().enumerate().all(|(at, case)| cases[..at].iter().all(|other| self.exclude(case, other)))
    }

    /// The case of `schemas`, which all hold, with what they refer to and their `allOf`, in `depth` unions.
    fn case<'a>(&mut self, mut schemas: Vec<&'a Value>, depth: usize) -> Case<'a>
    where
        'r: 'a,
    {
        let mut case = Case { schemas: Vec::new(), constants: Vec::new(), kinds: ANY };
        while let Some(schema) = schemas.pop() {
            let Value::Object(fields) = schema else { continue };
            let place = fields.get("$ref").and_then(Value::as_str);
            let lists = ["type", "enum", "anyOf", "oneOf"].into_iter().filter_map(|key| fields.get(key)?.as_array());
            let steps = 1 + lists.map(Vec::len).sum::<usize>() + place.map_or(0, str::len) / 64;
            if case.schemas.len() == BESIDE || !self.pay(steps) {
                break;
            }
            case.schemas.push(fields);
            case.constants.extend(self.constants(fields));
            case.kinds &= self.kinds(fields, depth);
            schemas.extend(place.and_then(|place| lookup(self.root, place)));
            schemas.extend(fields.get("allOf").and_then(Value::as_array).into_iter().flatten().take(BESIDE));
        }
        case
    }

    /// The types that a schema allows by its `type`, its constants and its unions.
    fn kinds(&mut self, fields: &Fields, depth: usize) -> Kinds {
        let mut kinds = match fields.get("type") {
            None => ANY,
            Some(Value::Array(names)) => any(names.iter().map(kind)),
            Some(name) => kind(name),
        };
        kinds &= self.constants(fields).map_or(ANY, |values| any(values.iter().map(kind_of)));
        let unions = ["anyOf", "oneOf"].into_iter().filter(|_| depth < NESTED);
        for cases in unions.filter_map(|key| fields.get(key)?.as_array()) {
            kinds &= any(cases.iter().map(|case| self.case(vec![case], depth + 1).kinds));
        }
        kinds
    }

    /// The values of `const` or `enum`.
    fn constants<'a>(&self, fields: &'a Fields) -> Option<&'a [Value]> {
        let constant = fields.get("const").filter(|_| self.has_const).map(std::slice::from_ref);
        constant.or_else(|| Some(fields.get("enum")?.as_array()?.as_slice()))
    }

    /// Whether no value matches two cases: by their types or constants, or by a required property of objects, which has
    /// other ones or is forbidden in one of them.
    fn exclude<'a>(&mut self, a: &Case<'a>, b: &Case<'a>) -> bool {
        if self.differ(a, b) {
            return true;
        }
        if a.kinds & b.kinds != OBJECT {
            return false;
        }
        let both = || a.schemas.iter().chain(&b.schemas);
        let mut required = both().filter_map(|fields| fields.get("required")?.as_array()).flatten().map(Value::as_str);
        required.any(|name| {
            let steps = (a.schemas.len() + b.schemas.len()) * (1 + name.map_or(0, str::len) / 64);
            if !self.pay(steps) {
                return false;
            }
            let Some(name) = name else { return false };
            let [of_a, of_b] = [a, b].map(|case| {
                let schemas = case.schemas.iter().filter_map(|fields| fields.get("properties")?.get(name));
                self.case(schemas.collect(), NESTED)
            });
            both().any(|fields| forbids(fields, name)) || self.differ(&of_a, &of_b)
        })
    }

    /// Whether no value has a type, or is a constant, of both.
    fn differ(&mut self, a: &Case<'_>, b: &Case<'_>) -> bool {
        let are_apart = |a: &[Value], b: &[Value]| a.iter().all(|a| b.iter().all(|b| is_other(a, b)));
        let mut pairs = a.constants.iter().flat_map(|of_a| b.constants.iter().map(move |of_b| (*of_a, *of_b)));
        self.pay(1)
            && (a.kinds & b.kinds == 0
                || pairs.any(|(a, b)| self.pay(a.len().saturating_mul(b.len())) && are_apart(a, b)))
    }

    /// Takes `steps`; returns whether they were left.
    fn pay(&mut self, steps: usize) -> bool {
        let left = self.steps.checked_sub(steps);
        self.steps = left.unwrap_or(0);
        left.is_some()
    }
}

/// Whether no object has a property.
fn forbids(fields: &Fields, name: &str) -> bool {
    let is_closed = fields.get("additionalProperties") == Some(&Value::Bool(false));
    let is_named = fields.get("properties").is_some_and(|schemas| schemas.get(name).is_some());
    is_closed && !is_named && !fields.contains_key("patternProperties")
}

fn any(kinds: impl Iterator<Item = Kinds>) -> Kinds {
    kinds.fold(0, |all, kinds| all | kinds)
}

/// A type of that name; any if there is none.
fn kind(name: &Value) -> Kinds {
    match name.as_str() {
        Some("null") => NULL,
        Some("boolean") => BOOLEAN,
        Some("number" | "integer") => NUMBER,
        Some("string") => STRING,
        Some("array") => ARRAY,
        Some("object") => OBJECT,
        _ => ANY,
    }
}

fn kind_of(value: &Value) -> Kinds {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(_) => NUMBER,
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
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
            "bs": {"type": "array", "items": {"$ref": "#/$defs/b"}}, "self": {"$ref": "#/$defs/self"},
            "union": {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            "unions": {"anyOf": [{"$ref": "#/$defs/unions"}, {"$ref": "#/$defs/unions"}]}});
        let of = |cases: Value| is_renamed(&json!({"oneOf": cases, "$defs": definitions}));
        let reference = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
        for cases in [
            json!([]),
            json!([reference("a"), reference("b"), reference("bs"), {"type": ["integer", "null"]}]),
            json!([reference("a"), {"allOf": [reference("b")], "description": "x"}]),
            json!([reference("a"), {"properties": {"k": {"type": "integer"}}}]),
            json!([closed("x"), closed("y"), {"type": "null"}]),
            json!([reference("union"), {"anyOf": [{"type": "null"}, reference("bs")]}]),
            json!([{"const": "a"}, {"enum": ["b", 1]}, {"const": 2.0}, {"type": "array"}]),
        ] {
            assert!(of(cases.clone()), "{cases}");
        }
        for cases in [
            json!([reference("a"), reference("a")]),
            json!([reference("a"), reference("missing")]),
            json!([reference("self"), reference("self")]),
            json!([reference("unions"), {"type": "null"}]),
            json!([reference("union"), reference("a")]),
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
        // Unions of what is no schema are looked at as well.
        let long = json!({"$defs": {"u": {"anyOf": vec![0; 1 << 17]}}, "oneOf": vec![reference("u"); 40]});
        let mut looked_at = Cases::new(&long);
        assert!(!looked_at.are_exclusive(long["oneOf"].as_array().expect("a list")) && looked_at.steps == 0);
        // One that is not looked at to its end.
        let many: Vec<_> = (0..2000).map(|i| json!({"const": i})).collect();
        assert!(!of(json!(many)));
        let case = |i: u32| {
            json!({"type": "object", "properties": {"x": {}, "y": {}, "z": {}, "kind": {"const": i}},
                "required": ["x", "y", "z", "kind"]})
        };
        let definitions: Map<_, _> = (0..100).map(|i| (format!("c{i}"), case(i))).collect();
        let cases: Vec<_> = definitions.keys().map(|name| reference(name)).collect();
        assert!(is_renamed(&json!({"oneOf": cases, "$defs": definitions})));
    }

    #[test]
    fn constants_are_those_of_the_draft() {
        for (draft, constant, want) in [
            ("http://json-schema.org/draft-04/schema#", "const", false),
            ("http://json-schema.org/draft-04/schema", "const", false),
            ("http://json-schema.org/draft-04/schema#", "enum", true),
            ("http://json-schema.org/draft-07/schema#", "const", true),
        ] {
            let case = |text: &str| json!({constant: if constant == "enum" { json!([text]) } else { json!(text) }});
            let schema = json!({"$schema": draft, "oneOf": [case("a"), case("b")]});
            assert_eq!(is_renamed(&schema), want, "{schema}");
        }
    }

    #[test]
    fn long_names_and_lists_take_steps() {
        let long = "x".repeat(4096);
        for required in [json!(vec!["a"; 5000]), json!(vec![1; 100_000])] {
            let schema = json!({"$defs": {"o": {"type": "object", "required": required,
                "properties": {"a": {"$ref": format!("#/{long}")}}}}});
            let mut cases = Cases::new(&schema);
            let reference = json!({"$ref": "#/$defs/o"});
            assert!(!cases.are_exclusive(&[reference.clone(), reference]));
            assert_eq!(cases.steps, 0);
        }
    }

    /// Whether the `oneOf` of a document is renamed, and keeps its place.
    fn is_renamed(root: &Value) -> bool {
        let mut fields = root.as_object().expect("an object").clone();
        let keys = |fields: &Fields| fields.keys().map(|key| key.replace("anyOf", "oneOf")).collect::<Vec<_>>();
        let before = keys(&fields);
        Cases::new(root).rename(&mut fields);
        assert_eq!(keys(&fields), before);
        fields.contains_key("anyOf")
    }
}
