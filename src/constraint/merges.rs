//! A bound on merged schemas. llguidance merges schemas that hold beside each other (`allOf`, `$ref` and a schema's own
//! keywords) into one, and copies them for each case of a union (`anyOf`, `oneOf`, `enum`) beside them.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::ConstraintLimits;
use super::keywords::ANNOTATIONS;
use super::references::lookup;

/// Types of JSON.
const KINDS: usize = 6;

/// Schemas that are merged in the time in which it is checked that no name matches both of two patterns.
const SCHEMAS_PER_PAIR: u64 = 10;

/// A schema with what it refers to.
#[derive(Clone, Copy)]
struct Size {
    /// Schemas in it.
    nodes: u64,
    /// Cases that may be merged with one part of another schema: the most along a path from it to a part.
    cases: u64,
    /// Its `patternProperties`.
    patterns: u64,
}

impl Size {
    const ONE: Self = Self { nodes: 1, cases: 1, patterns: 0 };

    /// Both hold.
    fn and(self, other: Self) -> Self {
        let own = self.nodes.saturating_mul(other.cases);
        let nodes = own.saturating_add(other.nodes.saturating_mul(self.cases));
        let patterns = self.patterns.saturating_add(other.patterns);
        Self { nodes, cases: self.cases.saturating_mul(other.cases), patterns }
    }

    /// One of both holds.
    fn or(self, other: Self) -> Self {
        let (nodes, cases) = (self.nodes.saturating_add(other.nodes), self.cases.saturating_add(other.cases));
        Self { nodes, cases, patterns: self.patterns.max(other.patterns) }
    }
}

/// Checks how many schemas a document's merged schemas have.
///
/// # Errors
/// The problem of the document, if there are too many.
pub(super) fn check(schema: &Value, limits: &ConstraintLimits) -> Result<(), String> {
    let (merged, most) = (count(schema), limits.merged_schemas);
    if merged > most {
        return Err(format!(
            "merges up to {merged} schemas, at most {most} are allowed; combine fewer cases by allOf, or beside other keywords"
        ));
    }
    Ok(())
}

/// How many schemas a document's merged schemas have; a pair of merged patterns counts as [`SCHEMAS_PER_PAIR`].
pub(super) fn count(schema: &Value) -> u64 {
    let mut sizes = Sizes { root: schema, references: HashMap::new(), merged: 0 };
    sizes.of(schema);
    sizes.merged
}

struct Sizes<'a> {
    root: &'a Value,
    references: HashMap<&'a str, Size>,
    /// Nodes of what was merged. Parts of it that are merged themselves count again.
    merged: u64,
}

impl<'a> Sizes<'a> {
    /// The size of a schema, or of another value.
    fn of(&mut self, schema: &'a Value) -> Size {
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Bool(_) => return Size::ONE,
            _ => return Size { nodes: 0, ..Size::ONE },
        };
        let mut beside = Vec::from_iter(self.own(fields));
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("allOf", Value::Array(list)) => beside.extend(list.iter().map(|part| self.of(part))),
                ("anyOf" | "oneOf", Value::Array(list)) => {
                    beside.extend(list.iter().map(|case| self.of(case)).reduce(Size::or));
                }
                ("enum", Value::Array(list)) => {
                    let values = list.len().max(1) as u64;
                    beside.push(Size { nodes: values, cases: values, ..Size::ONE });
                }
                ("const", _) => beside.push(Size::ONE),
                ("$ref", Value::String(place)) => beside.push(self.reference(place)),
                _ => {}
            }
        }
        let merged = beside.iter().copied().reduce(Size::and).unwrap_or(Size::ONE);
        if beside.len() > 1 && merged.cases > 1 {
            self.merged = self.merged.saturating_add(merged.nodes);
        }
        let pairs = merged.patterns.saturating_mul(merged.patterns.saturating_sub(1)) / 2;
        let times = (beside.len() as u64).saturating_sub(1).saturating_mul(merged.cases);
        self.merged = self.merged.saturating_add(pairs.saturating_mul(times).saturating_mul(SCHEMAS_PER_PAIR));
        merged
    }

    /// The keywords of a schema that are about its parts or its type, if it has any.
    fn own(&mut self, fields: &'a Map<String, Value>) -> Option<Size> {
        let (mut nodes, mut cases, mut is_any) = (0u64, 1, true);
        for (key, value) in fields {
            let parts: Vec<Size> = match (key.as_str(), value) {
                ("allOf" | "anyOf" | "oneOf" | "enum" | "const" | "$ref" | "type", _) => continue,
                ("$defs" | "definitions", Value::Object(schemas)) => {
                    // Merged where they are referred to; checked here.
                    for schema in schemas.values() {
                        self.of(schema);
                    }
                    continue;
                }
                (key, _) if ANNOTATIONS.contains(&key) => continue,
                ("properties" | "patternProperties", Value::Object(schemas)) => {
                    schemas.values().map(|schema| self.of(schema)).collect()
                }
                (_, Value::Array(list)) => list.iter().map(|schema| self.of(schema)).collect(),
                (_, schema) => vec![self.of(schema)],
            };
            is_any = false;
            nodes = parts.iter().fold(nodes, |sum, part| sum.saturating_add(part.nodes));
            cases = parts.iter().map(|part| part.cases).fold(cases, u64::max);
        }
        // Schemas of different types merge to nothing, so that types are cases only if the list repeats them.
        let kinds = match fields.get("type") {
            Some(Value::Array(kinds)) if kinds.len() > KINDS => kinds.len() as u64,
            None if is_any => return None,
            _ => 1,
        };
        let patterns = fields.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len) as u64;
        Some(Size {
            nodes: nodes.saturating_add(1).saturating_mul(kinds),
            cases: cases.saturating_mul(kinds),
            patterns,
        })
    }

    /// The schema at `place`; within itself, one that says nothing.
    fn reference(&mut self, place: &'a str) -> Size {
        if let Some(size) = self.references.get(place) {
            return *size;
        }
        self.references.insert(place, Size::ONE);
        let size = lookup(self.root, place).map_or(Size::ONE, |schema| self.of(schema));
        self.references.insert(place, size);
        size
    }
}
