//! Locates errors in a JSON schema.

use serde_json::{Map, Value, json};

use super::keywords::{LISTS, MAPS, ONES};
use super::merges;
use super::references::move_inside;

/// Key of the document while a part of it is compiled.
const INSIDE: &str = "document";

/// Limit in bytes of schemas compiled for a search.
const SEARCHED: usize = 4 << 20;

/// Bytes that a merged schema counts as: compiling them takes about as long.
const MERGED: usize = 16;

/// A part of a schema and what is wrong with it.
#[derive(Debug, PartialEq)]
pub(super) struct SchemaProblem {
    pub place: String, // `#/properties/age`
    pub problem: String,
}

impl SchemaProblem {
    /// A problem of the whole schema.
    pub fn of_root(problem: String) -> Self {
        Self { place: "#".into(), problem }
    }
}

/// The problem of the smallest part of `root` that `refuses` rejects. `problem` is that of the whole.
pub(super) fn locate(root: &Value, problem: String, refuses: impl Fn(Value) -> Option<String>) -> SchemaProblem {
    let (mut place, mut problem, mut part) = (String::from("#"), problem, root);
    let mut document = root.clone();
    if let Value::Object(fields) = &mut document {
        fields.remove("x-guidance");
    }
    move_inside(&mut document, INSIDE);
    let size = document.to_string().len().max(4 << 10);
    let merged = usize::try_from(merges::count(root)).unwrap_or(usize::MAX).saturating_mul(MERGED);
    let mut left = SEARCHED / size.saturating_add(merged);
    'deeper: loop {
        for (key, child) in children(part) {
            if left == 0 {
                break 'deeper;
            }
            left -= 1;
            let moved = format!("#/{INSIDE}{}/{key}", &place[1..]);
            // Only the reference matters: `document` is not a keyword, and `$schema` is one that says nothing.
            if let Some(of_child) = refuses(json!({"$schema": root.get("$schema"), "$ref": moved, INSIDE: document})) {
                place = format!("{place}/{key}");
                problem = of_child.replace(&format!("#/{INSIDE}"), "#");
                part = child;
                continue 'deeper;
            }
        }
        break;
    }
    SchemaProblem { place, problem }
}

/// The place in the document `source` of a place in what it was rewritten to, where a `oneOf` may be an `anyOf`.
pub(super) fn place_in(source: &str, place: &str) -> String {
    let document: Value = serde_json::from_str(source).unwrap_or_default();
    let (mut part, mut keys) = (Some(&document), vec!["#"]);
    for key in place.split('/').skip(1) {
        let is_renamed = |part: &Value| part.get("anyOf").is_none() && part.get("oneOf").is_some();
        let key = if key == "anyOf" && part.is_some_and(is_renamed) { "oneOf" } else { key };
        part = part.and_then(|part| match part {
            Value::Array(list) => list.get(key.parse::<usize>().ok()?),
            part => part.get(key),
        });
        keys.push(key);
    }
    keys.join("/")
}

/// The first object in `value`, a schema or not, that has a `problem`.
pub(super) fn first(value: &Value, problem: &impl Fn(&Map<String, Value>) -> Option<String>) -> Option<SchemaProblem> {
    // The path from the object up.
    fn find(value: &Value, problem: &impl Fn(&Map<String, Value>) -> Option<String>) -> Option<(Vec<String>, String)> {
        let below = |key: String, part| {
            let (mut path, problem) = find(part, problem)?;
            path.push(key);
            Some((path, problem))
        };
        match value {
            Value::Array(list) => list.iter().enumerate().find_map(|(at, part)| below(at.to_string(), part)),
            Value::Object(fields) => match problem(fields) {
                Some(problem) => Some((Vec::new(), problem)),
                None => fields.iter().find_map(|(key, part)| below(key.clone(), part)),
            },
            _ => None,
        }
    }
    let (mut path, problem) = find(value, problem)?;
    path.push("#".into());
    path.reverse();
    Some(SchemaProblem { place: path.join("/"), problem })
}

/// The subschemas, by path. llguidance does not follow references with an escaped `/`.
fn children(schema: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for key in MAPS {
        let children = schema[key].as_object().into_iter().flatten();
        found.extend(children.map(|(name, child)| (format!("{key}/{name}"), child, name.contains('/'))));
    }
    for key in LISTS {
        let children = schema[key].as_array().into_iter().flatten().enumerate();
        found.extend(children.map(|(i, child)| (format!("{key}/{i}"), child, false)));
    }
    found.extend(ONES.iter().filter_map(|key| Some((key.to_string(), schema.get(key)?, false))));
    // `false` alone allows no value, but a schema that contains it may.
    found.retain(|(_, child, escaped)| !escaped && **child != Value::Bool(false));
    found.into_iter().map(|(place, child, _)| (place, child)).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_search_compiles_few_schemas_that_merge_much() {
        let patterns: Map<_, _> = (0..64).map(|i| (format!("^{i}$"), json!({}))).collect();
        let schema = |keyword: &str| {
            json!({"$defs": {"p": {"patternProperties": patterns}}, keyword: vec![json!({"$ref": "#/$defs/p"}); 10],
                "properties": {"a": {}, "b": {}, "c": {}, "d": {}}})
        };
        let compiled = |schema: &Value| {
            let count = Cell::new(0);
            let refuses = |_| {
                count.set(count.get() + 1);
                None
            };
            assert_eq!(locate(schema, "it".into(), refuses), SchemaProblem::of_root("it".into()));
            count.get()
        };
        // The properties and the list's members.
        assert!(compiled(&schema("prefixItems")) >= 14);
        assert!(compiled(&schema("allOf")) <= 2);
    }
}
