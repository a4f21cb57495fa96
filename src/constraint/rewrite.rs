//! Rewrites JSON schemas to ones that llguidance enforces: every value that they allow, the original allows.

use std::collections::{BTreeMap, HashSet};

use serde_json::{Map, Value};

use super::keywords::{LISTS, MAPS, ONES};
use super::one_of::Cases;
use super::references::{Unescaped, is_too_deep, lookup_mut};
use super::{annotations, bounds, formats, patterns};
use crate::{Error, Result};

/// The rewritten document of a constraint's JSON schema.
///
/// # Errors
/// If it is not JSON.
pub(crate) fn parse(source: &str) -> Result<Value> {
    let malformed = |e| Error::argument("constraint", format!("the schema is not valid JSON: {e}"));
    let mut schema = serde_json::from_str(source).map_err(malformed)?;
    document(&mut schema);
    Ok(schema)
}

/// Rewrites a document: the schemas in it, and what they refer to.
pub(crate) fn document(root: &mut Value) {
    let (mut places, mut seen) = (vec![String::from("#")], HashSet::from([String::from("#")]));
    let (mut unescaped, mut schemas, mut keys) = (Unescaped::default(), Vec::new(), HashSet::new());
    while let Some(place) = places.pop() {
        let Some(part) = lookup_mut(root, &place) else { continue };
        let mut references = BTreeMap::new();
        each(part, &mut |fields| {
            annotations::remove(fields);
            annotations::join(fields);
            patterns::translate(fields);
            formats::restrict(fields);
            bounds::tighten(fields);
            references.extend(reference(fields).map(|reference| (reference.clone(), None)));
        });
        for (reference, plain) in &mut references {
            *plain = unescaped.of(root, reference);
        }
        if let Some(part) = lookup_mut(root, &place).filter(|_| references.values().any(Option::is_some)) {
            each(part, &mut |fields| {
                if let Some(reference) = reference(fields)
                    && let Some(Some(plain)) = references.get(reference)
                {
                    reference.clone_from(plain);
                }
            });
        }
        schemas.push(place);
        let targets = references.into_iter().map(|(reference, plain)| plain.unwrap_or(reference));
        for target in targets.filter(|target| !is_too_deep(target)) {
            keys.extend(target.split('/').map(String::from));
            if (unescaped.is_copy(&target) || !is_covered(&target, &seen)) && seen.insert(target.clone()) {
                places.push(target);
            }
        }
    }
    schemas.retain(|place| !may_be_data(place));
    simplify(root, &schemas, &keys);
}

/// Removes words and renames `oneOf` in the schemas at `places` of a document, but no keys that are `in_references`.
fn simplify(root: &mut Value, places: &[String], in_references: &HashSet<String>) {
    let whole = root.clone();
    let mut cases = Cases::new(&whole);
    for place in places {
        let Some(part) = lookup_mut(root, place) else { continue };
        each(part, &mut |fields| {
            annotations::remove_words(fields, in_references);
            if !in_references.contains("oneOf") {
                cases.rename(fields);
            }
        });
    }
}

/// Whether a place that is referred to as a schema may also be a constant, or a map of schemas.
fn may_be_data(place: &str) -> bool {
    let is_map = place.rsplit_once('/').is_some_and(|(_, key)| MAPS.contains(&key));
    is_map || place.split('/').any(|key| key == "const" || key == "enum")
}

/// Whether `place` is a schema within one at a place in `seen`.
fn is_covered(place: &str, seen: &HashSet<String>) -> bool {
    place.rmatch_indices('/').any(|(at, _)| is_schema(&place[at + 1..]) && seen.contains(&place[..at]))
}

/// Whether `path` leads from a schema to a schema in it.
fn is_schema(path: &str) -> bool {
    let mut keys = path.split('/');
    while let Some(key) = keys.next() {
        let is_many = MAPS.contains(&key) || LISTS.contains(&key);
        if !(ONES.contains(&key) || is_many && keys.next().is_some()) {
            return false;
        }
    }
    true
}

fn reference(fields: &mut Map<String, Value>) -> Option<&mut String> {
    match fields.get_mut("$ref") {
        Some(Value::String(reference)) => Some(reference),
        _ => None,
    }
}

/// Calls `work` on a schema and on the schemas in it, if they are objects.
fn each(schema: &mut Value, work: &mut impl FnMut(&mut Map<String, Value>)) {
    let fields = match schema {
        Value::Object(fields) => fields,
        // The older form of `items`.
        Value::Array(list) => return list.iter_mut().for_each(|schema| each(schema, work)),
        _ => return,
    };
    work(fields);
    for (key, value) in fields.iter_mut() {
        match value {
            Value::Object(schemas) if MAPS.contains(&key.as_str()) => {
                schemas.values_mut().for_each(|schema| each(schema, work));
            }
            schema if LISTS.contains(&key.as_str()) || ONES.contains(&key.as_str()) => each(schema, work),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn rewritten(mut schema: Value) -> Value {
        document(&mut schema);
        schema
    }

    #[test]
    fn only_schemas_are_rewritten() {
        let schema = json!({
            "type": "object",
            "propertyNames": {"type": "string"},
            "properties": {
                "format": {"type": "string", "format": "cuid"},
                "day": {"type": "string", "format": "uuid"},
                "record": {"type": "object", "propertyNames": {"type": "string", "pattern": "^a"}},
                "list": {"type": "array", "items": [{"format": "int32"}], "additionalItems": {"format": "cuid"}, "uniqueItems": false},
                "tuple": {"prefixItems": [{"format": "cuid"}], "additionalItems": false},
                "set": {"uniqueItems": true, "items": {"pattern": "^[[a]$"}}
            },
            "allOf": [{"propertyNames": true}],
            "enum": [{"format": "cuid", "properties": {"a": {"format": "cuid"}}}]
        });
        let want = json!({
            "type": "object",
            "properties": {
                "format": {"type": "string"},
                "day": {"type": "string", "format": "uuid"},
                "record": {"type": "object", "propertyNames": {"type": "string", "pattern": "^a"}},
                "list": {"type": "array", "items": [{}], "additionalItems": {}},
                "tuple": {"prefixItems": [{}]},
                "set": {"uniqueItems": true, "items": {"pattern": r"^[\[a]$"}}
            },
            "allOf": [{}],
            "enum": [{"format": "cuid", "properties": {"a": {"format": "cuid"}}}]
        });
        assert_eq!(rewritten(schema), want);
    }

    #[test]
    fn words_are_removed_unless_references_lead_into_them() {
        for (schema, want) in [
            (
                json!({"$ref": "#/$defs/a", "enumNames": "x", "x-b": {"c": 1}, "nullable": true,
                    "$defs": {"a": {"properties": {"example": {"example": 1}}, "const": {"x": {"y": 1}}}}}),
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"example": {}}, "const": {"x": {"y": 1}}}}}),
            ),
            (
                json!({"$ref": "#/example/a", "example": {"a": {"type": "string", "xml": {}}, "b": 1}}),
                json!({"$ref": "#/example/a", "example": {"a": {"type": "string"}, "b": 1}}),
            ),
            (
                json!({"$defs": {"a": {"$ref": "#/oneOf/0"}}, "oneOf": [{"type": "string"}, {"type": "null"}], "xml": 1}),
                json!({"$defs": {"a": {"$ref": "#/oneOf/0"}}, "oneOf": [{"type": "string"}, {"type": "null"}]}),
            ),
            // Maps of schemas and constants that are referred to as schemas.
            (
                json!({"properties": {"a": {"$ref": "#/properties"}, "b": {"$ref": "#/const"}}, "const": {"c": 1}}),
                json!({"properties": {"a": {"$ref": "#/properties"}, "b": {"$ref": "#/const"}}, "const": {"c": 1}}),
            ),
        ] {
            assert_eq!(rewritten(schema), want);
        }
    }

    #[test]
    fn bounds_move_inward() {
        let largest = 9_223_372_036_854_774_784i64;
        for (bounds, want) in [
            (json!({"minimum": -3, "maximum": 2.5}), json!({"minimum": -3, "maximum": 2.5})),
            (json!({"minimum": i64::MIN, "maximum": u64::MAX}), json!({"minimum": -largest, "maximum": largest})),
            (json!({"minimum": -f64::MAX, "maximum": 1e300}), json!({"minimum": -largest, "maximum": largest})),
            (
                json!({"minimum": 9_007_199_254_740_993i64, "maximum": 9_007_199_254_740_997i64}),
                json!({"minimum": 9_007_199_254_740_994i64, "maximum": 9_007_199_254_740_996i64}),
            ),
            (json!({"exclusiveMinimum": 9_007_199_254_740_992i64}), json!({"minimum": 9_007_199_254_740_994i64})),
            (
                json!({"maximum": -9_007_199_254_740_999i64, "exclusiveMaximum": -9_007_199_254_740_993i64}),
                json!({"maximum": -9_007_199_254_741_000i64}),
            ),
            (json!({"exclusiveMinimum": 0, "maximum": 0.5}), json!({"exclusiveMinimum": 1e-9, "maximum": 0.5})),
            (
                json!({"exclusiveMaximum": 0.0, "minimum": -1e-12}),
                json!({"exclusiveMaximum": -5e-13, "minimum": -1e-12}),
            ),
            (json!({"type": "integer", "exclusiveMinimum": 0}), json!({"type": "integer", "exclusiveMinimum": 0})),
            (json!({"minimum": 3, "exclusiveMinimum": true}), json!({"minimum": 3, "exclusiveMinimum": 3.000000001})),
            (json!({"maximum": 3, "exclusiveMaximum": false}), json!({"maximum": 3})),
        ] {
            let moved = rewritten(bounds.clone());
            assert_eq!(moved, want, "{bounds}");
            assert_eq!(rewritten(moved), want, "{bounds}");
        }
    }

    #[test]
    fn schemas_are_in_their_keywords() {
        let seen = HashSet::from(["#".into(), "#/x/y".into()]);
        for place in ["#/$defs/a", "#/items/anyOf/0/properties/items", "#/x/y/not"] {
            assert!(is_covered(place, &seen), "{place}");
        }
        for place in ["#/$defs", "#/x/z", "#/components/schemas/a", "#/x/y/properties/a/x", "#/items/0/x"] {
            assert!(!is_covered(place, &seen), "{place}");
        }
        let referred = json!({"anyOf": [{"$ref": "#/x/a/b"}, {"$ref": "#/x/a"}], "x": {"a": {"format": "c", "b": {"format": "d"}}}});
        assert_eq!(rewritten(referred)["x"], json!({"a": {"b": {}}}));
    }

    /// A time quadratic in their number or their length would be hours.
    #[test]
    fn references_that_are_many_or_long_take_no_time() {
        let long = ["#/~0".to_owned() + &"/".repeat(1 << 20), "#".to_owned() + &"/items".repeat(1 << 18)];
        for schema in long.map(|reference| json!({"$ref": reference})) {
            assert!(rewritten(schema.clone()) == schema);
        }
        // Spellings of one that leads to more than is copied.
        let spelled = |spelling: u32| {
            let character = |i: u32| if spelling >> i & 1 == 1 { "%62" } else { "b" };
            format!("#/$defs/~1{}", (0..16).map(character).collect::<String>())
        };
        let many: Vec<Value> = (0..1 << 16).map(|spelling| json!({"$ref": spelled(spelling)})).collect();
        let schema = json!({"anyOf": many, "$defs": {"/bbbbbbbbbbbbbbbb": {"description": "x".repeat(2 << 20)}}});
        assert!(rewritten(schema.clone()) == schema);
    }

    #[test]
    fn references_lose_their_escapes() {
        let reference =
            |place: &str| rewritten(json!({"$ref": place, "a<b": 1, "c/d": {"e": {"format": "f"}}, "%7e": 2}));
        assert_eq!(reference("#/a%3cb")["$ref"], "#/a<b");
        assert_eq!(reference("#/missing~1")["$ref"], "#/missing~1");
        assert_eq!(reference("#/%257e")["$ref"], "#/$defs/_7e");
        let copied = reference("#/c~1d/e");
        assert_eq!((&copied["$ref"], &copied["$defs"]), (&json!("#/$defs/e"), &json!({"e": {}})));
    }
}
