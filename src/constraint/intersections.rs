//! Bounds on intersections of regular expressions, checked before llguidance's lexer runs. One
//! symbolic derivative of an intersection takes time that grows with the product of its terms'
//! alternatives, and fuel is counted only after it.

use std::collections::{HashMap, HashSet};

use llguidance::derivre::raw::ExprSet;
use llguidance::derivre::{ExprRef, RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Value};

use super::ConstraintLimits;
use super::references::lookup;
use super::schema::{SchemaProblem, first};

/// Keywords that make a regular expression for a string; both lengths make one.
const CONDITIONS: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];

/// Alternatives of one of llguidance's expressions for formats. Rounded up.
const OF_FORMAT: u64 = 8;

/// Expressions that are intersected.
#[derive(Clone, Copy)]
struct Terms {
    count: usize,
    /// Product over them of how many sets of bytes in one of them have a byte in common.
    alternatives: u64,
}

impl Terms {
    const NONE: Self = Self { count: 0, alternatives: 1 };

    fn and(self, other: Self) -> Self {
        let count = self.count.saturating_add(other.count);
        Self { count, alternatives: self.alternatives.saturating_mul(other.alternatives) }
    }

    fn max(self, other: Self) -> Self {
        Self { count: self.count.max(other.count), alternatives: self.alternatives.max(other.alternatives) }
    }

    /// # Errors
    /// The problem, if there are too many.
    fn check(self, limits: &ConstraintLimits) -> Result<(), String> {
        let Self { count, alternatives } = self;
        let mend = "merge the patterns, formats and lengths of allOf branches, or the terms of & and ~";
        if count > limits.intersected {
            let most = limits.intersected;
            return Err(format!("intersects {count} regular expressions, at most {most} are allowed; {mend}"));
        }
        if count > 1 && alternatives > limits.alternatives {
            let most = limits.alternatives;
            return Err(format!(
                "intersects {count} regular expressions with {alternatives} combinations of their alternatives, at most {most} \
                 are allowed; use fewer overlapping character classes in them, or {mend}"
            ));
        }
        Ok(())
    }
}

/// Checks the intersections in a compiled grammar, whose lexer has not run.
///
/// # Errors
/// The problem of the first that exceeds a limit.
pub(super) fn check_expressions(set: &ExprSet, limits: &ConstraintLimits) -> Result<(), String> {
    let mut known = HashMap::new();
    for id in (1..set.len() as u32).map(ExprRef::new) {
        if set.is_valid(id) && tag(set, id) == "And" {
            let alternatives = width(set, id, &mut known);
            Terms { count: set.get_args(id).len(), alternatives }.check(limits)?;
        }
    }
    Ok(())
}

/// Checks the conditions that a string may have to meet under `schema`. An upper bound: conditions in different
/// branches of an `allOf` count together, whatever values they are for.
///
/// # Errors
/// The problem of a smallest part that exceeds a limit.
pub(super) fn check_schema(schema: &Value, limits: &ConstraintLimits) -> Result<(), SchemaProblem> {
    let many = |fields: &Map<String, Value>| {
        let patterns = fields.get("patternProperties").and_then(Value::as_object).map_or(0, Map::len);
        let most = limits.pattern_properties;
        (patterns > most)
            .then(|| format!("has {patterns} patternProperties, at most {most} are allowed; merge some into one"))
    };
    if let Some(found) = first(schema, &many) {
        return Err(found);
    }
    let mut counter = Counter { root: schema, references: HashMap::new(), widths: HashMap::new() };
    let Err(mut problem) = counter.of(schema).check(limits) else { return Ok(()) };
    let (mut place, mut part) = (String::from("#"), schema);
    while let Some((key, child, of_child)) = children(part)
        .into_iter()
        .find_map(|(key, child)| counter.of(child).check(limits).err().map(|problem| (key, child, problem)))
    {
        place = format!("{place}/{key}");
        (part, problem) = (child, of_child);
    }
    Err(SchemaProblem { place, problem })
}

/// The values in a value, with their keys.
fn children(value: &Value) -> Vec<(String, &Value)> {
    match value {
        Value::Array(list) => list.iter().enumerate().map(|(at, part)| (at.to_string(), part)).collect(),
        Value::Object(fields) => fields.iter().map(|(key, part)| (key.clone(), part)).collect(),
        _ => Vec::new(),
    }
}

/// The kind of an expression; derivre does not export the type.
fn tag(set: &ExprSet, id: ExprRef) -> String {
    format!("{:?}", set.get_tag(id))
}

/// How many sets of bytes in an expression have a byte in common, each as often as it occurs; of an
/// intersection, the product over its terms.
fn width(set: &ExprSet, id: ExprRef, known: &mut HashMap<ExprRef, u64>) -> u64 {
    if let Some(width) = known.get(&id) {
        return *width;
    }
    let (mut seen, mut parts) = (HashSet::new(), vec![id]);
    let (mut sets, mut others, mut has_bytes) = ([0u64; 256], 0u64, false);
    while let Some(part) = parts.pop() {
        match tag(set, part).as_str() {
            "And" if part == id => {
                others = set.get_args(id).iter().map(|term| width(set, *term, known)).fold(1, u64::saturating_mul);
            }
            "And" => others = others.saturating_add(width(set, part, known)),
            "ByteSet" => {
                let bytes = set.get(part);
                (0..=u8::MAX).zip(&mut sets).for_each(|(byte, count)| *count += u64::from(bytes.matches_byte(byte)));
            }
            // Its alternatives are disjoint.
            "Not" => others = others.saturating_add(1),
            kind => {
                // Single bytes are disjoint, too.
                has_bytes |= kind.starts_with("Byte") || kind == "RemainderIs";
                if seen.insert(part) {
                    parts.extend(set.get_args(part));
                }
            }
        }
    }
    let width = sets.into_iter().max().unwrap_or(0).saturating_add(u64::from(has_bytes));
    let width = width.saturating_add(others).max(1);
    known.insert(id, width);
    width
}

/// The width of a pattern; 1 if llguidance refuses it.
fn width_of(pattern: &str) -> u64 {
    let mut builder = RegexBuilder::new();
    let expression = builder.mk(&RegexAst::SearchRegex(regex_to_lark(pattern, "dw")));
    expression.map_or(1, |expression| width(builder.exprset(), expression, &mut HashMap::new()))
}

struct Counter<'a> {
    root: &'a Value,
    references: HashMap<&'a str, Terms>,
    /// Of patterns.
    widths: HashMap<&'a str, u64>,
}

impl<'a> Counter<'a> {
    /// The most conditions on one string under a schema, or one of several.
    fn of(&mut self, schema: &'a Value) -> Terms {
        let fields = match schema {
            Value::Object(fields) => fields,
            Value::Array(list) => return list.iter().map(|part| self.of(part)).fold(Terms::NONE, Terms::max),
            _ => return Terms::NONE,
        };
        let (mut parts, mut merged) = (self.own(fields), Terms::NONE);
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("$defs" | "definitions" | "x-guidance" | "const" | "enum" | "default" | "examples", _) => {}
                ("$ref", Value::String(place)) => merged = merged.and(self.reference(place)),
                ("allOf", Value::Array(list)) => {
                    merged = list.iter().fold(merged, |sum, schema| sum.and(self.of(schema)));
                }
                ("anyOf" | "oneOf" | "not" | "if" | "then" | "else", schema) => merged = merged.and(self.of(schema)),
                ("patternProperties" | "dependentSchemas", Value::Object(schemas)) => {
                    merged = schemas.values().fold(merged, |sum, schema| sum.and(self.of(schema)));
                }
                ("properties", Value::Object(schemas)) => {
                    parts = schemas.values().map(|schema| self.of(schema)).fold(parts, Terms::max);
                }
                (_, schema) => parts = parts.max(self.of(schema)),
            }
        }
        parts.and(merged)
    }

    /// The conditions of a schema itself.
    fn own(&mut self, fields: &'a Map<String, Value>) -> Terms {
        let [pattern, format, least, most] = CONDITIONS.map(|key| fields.get(key));
        let mut widths = Vec::new();
        if let Some(pattern) = pattern {
            let width = |pattern: &'a str| *self.widths.entry(pattern).or_insert_with(|| width_of(pattern));
            widths.push(pattern.as_str().map_or(1, width));
        }
        widths.extend(format.map(|_| OF_FORMAT));
        widths.extend(least.or(most).map(|_| 1));
        Terms { count: widths.len(), alternatives: widths.into_iter().fold(1, u64::saturating_mul) }
    }

    /// The conditions under the schema at `place`, none within itself.
    fn reference(&mut self, place: &'a str) -> Terms {
        if let Some(terms) = self.references.get(place) {
            return *terms;
        }
        self.references.insert(place, Terms::NONE);
        let terms = lookup(self.root, place).map_or(Terms::NONE, |schema| self.of(schema));
        self.references.insert(place, terms);
        terms
    }
}
