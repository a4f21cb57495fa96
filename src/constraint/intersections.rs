//! How many regular expressions a grammar intersects. llguidance's lexer takes time that grows exponentially with them, and checks
//! its fuel only between states, so that they are counted before.

use std::collections::HashMap;

use serde_json::{Map, Value};

/// Keywords that make a regular expression for a string; both lengths make one.
const CONDITIONS: [&str; 4] = ["pattern", "format", "minLength", "maxLength"];

/// The most conditions that one string may have to meet under `schema`. An upper bound: conditions in different branches of an
/// `allOf` count together, whatever values they are for.
pub(super) fn of_schema(schema: &Value) -> usize {
    Counter { root: schema, all: conditions(schema), references: HashMap::new() }.of(schema)
}

/// The most that a grammar in Lark's syntax intersects: the terms of its `&` and `~`, or of a schema in it.
pub(super) fn of_lark(grammar: &str) -> usize {
    let (mut operators, mut in_schemas, mut rest) = (0, 0, grammar);
    while let Some(first) = rest.chars().next() {
        let until = |end: &str, from: usize| rest[from..].find(end).map_or(rest.len(), |at| from + at + end.len());
        let skipped = match first {
            '#' => until("\n", 1),
            '/' if rest.starts_with("//") => until("\n", 2),
            '"' | '/' => delimited(rest, first),
            '<' => token(rest).unwrap_or(1),
            '%' => match embedded(rest) {
                Some((schema, length)) => {
                    in_schemas = in_schemas.max(of_schema(&schema));
                    length
                }
                None => 1,
            },
            '&' | '~' => {
                operators += 1;
                1
            }
            other => other.len_utf8(),
        };
        rest = &rest[skipped..];
    }
    in_schemas.max(if operators > 0 { operators + 1 } else { 0 })
}

/// Bytes of the string or expression that `text` begins with.
fn delimited(text: &str, delimiter: char) -> usize {
    let mut escaped = false;
    for (at, character) in text.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            character if character == delimiter => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Bytes of the special token (`<name>`) that `text` begins with.
fn token(text: &str) -> Option<usize> {
    let end = 1 + text[1..].find(|c: char| c == '<' || c == '>' || c.is_whitespace())?;
    (end > 1 && text[end..].starts_with('>')).then_some(end + 1)
}

/// The JSON after a directive (`%json`) that `text` begins with, and the bytes of both.
fn embedded(text: &str) -> Option<(Value, usize)> {
    let directive = 1 + text[1..].find(|c: char| !c.is_ascii_alphanumeric())?;
    let mut values = serde_json::Deserializer::from_str(&text[directive..]).into_iter::<Value>();
    let value = values.next()?.ok()?;
    Some((value, directive + values.byte_offset()))
}

/// Conditions anywhere in a document.
fn conditions(value: &Value) -> usize {
    match value {
        Value::Array(list) => list.iter().map(conditions).sum(),
        Value::Object(fields) => own(fields) + fields.values().map(conditions).sum::<usize>(),
        _ => 0,
    }
}

fn own(fields: &Map<String, Value>) -> usize {
    let [pattern, format, least, most] = CONDITIONS.map(|key| fields.contains_key(key));
    usize::from(pattern) + usize::from(format) + usize::from(least || most)
}

struct Counter<'a> {
    root: &'a Value,
    /// Conditions of the document, for references that are not paths in it.
    all: usize,
    references: HashMap<&'a str, usize>,
}

impl<'a> Counter<'a> {
    fn of(&mut self, schema: &'a Value) -> usize {
        let Value::Object(fields) = schema else { return 0 };
        let (mut parts, mut merged) = (own(fields), 0usize);
        for (key, value) in fields {
            match (key.as_str(), value) {
                ("$defs" | "definitions" | "x-guidance" | "const" | "enum" | "default" | "examples", _) => {}
                ("$ref", Value::String(place)) => merged = merged.saturating_add(self.reference(place)),
                ("allOf", Value::Array(list)) => {
                    merged = list.iter().fold(merged, |sum, schema| sum.saturating_add(self.of(schema)));
                }
                ("oneOf", Value::Array(list)) => {
                    // Pairs are compared.
                    let mut counts: Vec<usize> = list.iter().map(|schema| self.of(schema)).collect();
                    counts.sort_unstable_by(|a, b| b.cmp(a));
                    merged = counts.iter().take(2).fold(merged, |sum, count| sum.saturating_add(*count));
                }
                ("anyOf", Value::Array(list)) => {
                    merged = merged.saturating_add(list.iter().map(|schema| self.of(schema)).max().unwrap_or(0));
                }
                ("not" | "if" | "then" | "else", schema) => merged = merged.saturating_add(self.of(schema)),
                ("patternProperties" | "dependentSchemas", Value::Object(schemas)) => {
                    merged = schemas.values().fold(merged, |sum, schema| sum.saturating_add(self.of(schema)));
                }
                ("properties", Value::Object(schemas)) => {
                    parts = schemas.values().map(|schema| self.of(schema)).fold(parts, usize::max);
                }
                (_, Value::Array(list)) => parts = list.iter().map(|schema| self.of(schema)).fold(parts, usize::max),
                (_, schema) => parts = parts.max(self.of(schema)),
            }
        }
        parts.saturating_add(merged)
    }

    /// The count of the schema at `place`, 0 within itself.
    fn reference(&mut self, place: &'a str) -> usize {
        if let Some(count) = self.references.get(place) {
            return *count;
        }
        let found = place.strip_prefix('#').filter(|path| !path.contains('%')).and_then(|path| self.root.pointer(path));
        let Some(schema) = found else { return self.all };
        self.references.insert(place, 0);
        let count = self.of(schema);
        self.references.insert(place, count);
        count
    }
}
