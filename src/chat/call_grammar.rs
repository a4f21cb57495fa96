//! Grammars of Gemma 4's tool calls, for constraints: `call:NAME{key:value,..}` with arguments under the tool's JSON schema.
//!
//! Objects, arrays and strings are rules in the syntax of calls, with keys in the order in which templates write them. A part whose
//! keywords these rules do not know (`pattern`, `format`, `oneOf`, ..) is left to llguidance and written as JSON, which
//! [`call::parse`](super::call) reads as well; so are numbers and literals, which are the same in both.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::call::is_name;
use super::json::Json;
use crate::constraint::{references, refuses, rewrite};
use crate::{Error, Result};

/// What is done with parts of a tool's schema that llguidance cannot compile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Refused {
    /// They are in the grammar, which then cannot be compiled.
    Error,
    /// They lose the keywords that are not implemented, else all but their type, else that too.
    Widened,
}

/// A tool that may be called.
pub(super) struct Tool {
    pub name: String,
    pub parameters: Value,
}

impl Tool {
    pub fn of(tool: &Json) -> Result<Self> {
        let tool: Value = serde_json::from_str(&tool.to_string()).unwrap_or_default();
        let function = tool.get("function").unwrap_or(&tool);
        let name = function["name"].as_str().unwrap_or_default().to_owned();
        if !is_name(&name) {
            return Err(argument("a tool's name must be letters, digits, '_', '-', '.', ':' and '/'"));
        }
        let mut parameters = function.get("parameters").cloned().unwrap_or_else(|| json!({"properties": {}}));
        rewrite::document(&mut parameters);
        Ok(Self { name, parameters })
    }
}

pub(super) fn argument(problem: &str) -> Error {
    Error::argument("tools", problem)
}

/// Bytes of schemas in a grammar.
pub(super) const MAX_BYTES: usize = 1 << 18;

/// References within references that are followed.
const MAX_DEPTH: usize = 64;

/// Types of values in JSON Schema.
const TYPES: usize = 7;

/// Keywords that llguidance does not implement.
const UNIMPLEMENTED: [&str; 16] = [
    "$dynamicRef",
    "$recursiveRef",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "maxContains",
    "minContains",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Keywords of JSON Schema that say something about values.
const KEYWORDS: [&str; 43] = [
    "$dynamicRef",
    "$recursiveRef",
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxContains",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minContains",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
    "uniqueItems",
];

/// Rules of a grammar in Lark's syntax. Methods give what stands for a schema in another rule.
pub(super) struct Rules {
    pub text: String,
    count: usize,
    /// The token around strings.
    quote: u32,
    /// The rules of what is referred to, by its place in the tool's schema.
    references: HashMap<String, String>,
    /// Of schemas that are left to llguidance. Each has a copy of the definitions that it refers to.
    json_bytes: usize,
    /// References that are being followed.
    depth: usize,
    /// Of the tool whose rules are being written.
    refused: Refused,
}

impl Rules {
    pub fn new(quote: u32) -> Self {
        let (text, references) = (String::new(), HashMap::new());
        Self { text, count: 0, quote, references, json_bytes: 0, depth: 0, refused: Refused::Error }
    }

    /// The arguments of a tool.
    pub fn of_tool(&mut self, tool: &Tool, refused: Refused) -> String {
        self.references.clear();
        self.refused = refused;
        self.arguments(&tool.parameters)
    }

    /// The rule `name`: JSON under `schema`, a text of its own.
    pub fn of_json(&mut self, name: &str, schema: &Value) {
        let json = schema.to_string();
        self.json_bytes += json.len();
        self.define(name, &format!("%json {json}"));
    }

    fn rule(&mut self, body: &str) -> String {
        let name = self.name();
        self.define(&name, body)
    }

    fn name(&mut self) -> String {
        self.count += 1;
        format!("r{}", self.count)
    }

    fn define(&mut self, name: &str, body: &str) -> String {
        self.text += &format!("{name}: {body}\n");
        name.to_owned()
    }

    /// An object under a tool's schema.
    fn arguments(&mut self, schema: &Value) -> String {
        match schema {
            Value::Object(fields) if !fields.contains_key("type") && !fields.contains_key("$ref") => {
                let mut typed = fields.clone();
                typed.insert("type".into(), json!("object"));
                let typed = Value::Object(typed);
                self.value(&typed, &typed)
            }
            schema => self.value(schema, schema),
        }
    }

    /// Whether the grammar is larger than it may be, so that no more is written.
    pub fn is_full(&self) -> bool {
        self.json_bytes.max(self.text.len()) > MAX_BYTES
    }

    /// A value under `schema`, which is a part of `root`.
    fn value(&mut self, schema: &Value, root: &Value) -> String {
        if self.is_full() {
            return String::new();
        }
        let Value::Object(fields) = schema else { return self.json(schema, root) };
        let has_only = |allowed: &[&str]| {
            fields.keys().all(|key| allowed.contains(&key.as_str()) || !KEYWORDS.contains(&key.as_str()))
        };
        let kind = fields.get("type").and_then(Value::as_str);
        let quote = self.quote;
        if let Some(place) = fields.get("$ref").and_then(Value::as_str).filter(|_| has_only(&["$ref"])) {
            return match self.reference(place, root) {
                Some(name) => name,
                None => self.json(schema, root),
            };
        }
        if let Some(Value::Array(cases)) = fields.get("anyOf").filter(|_| has_only(&["anyOf"]))
            && !cases.is_empty()
        {
            let cases: Vec<_> = cases.iter().map(|case| self.value(case, root)).collect();
            return self.rule(&cases.join(" | "));
        }
        if let Some(Value::Array(kinds)) = fields.get("type")
            && (1..=TYPES).contains(&kinds.len())
        {
            let distinct = kinds.iter().enumerate().filter(|(i, kind)| !kinds[..*i].contains(kind));
            let cases: Vec<_> = distinct.filter_map(|(_, kind)| of_type(fields, kind.as_str())).collect();
            if !cases.is_empty() {
                let cases: Vec<_> = cases.iter().map(|case| self.value(case, root)).collect();
                return self.rule(&cases.join(" | "));
            }
        }
        if matches!(kind, None | Some("string"))
            && has_only(&["type", "enum", "const"])
            && let Some(strings) = constants(fields)
        {
            let case = |text: &&str| match text.is_empty() {
                true => format!("<[{quote}]> <[{quote}]>"),
                false => format!("<[{quote}]> {} <[{quote}]>", literal(text)),
            };
            return self.rule(&strings.iter().map(case).collect::<Vec<_>>().join(" | "));
        }
        let rule = match kind {
            Some("string") if has_only(&["type", "minLength", "maxLength"]) => self.string(fields),
            Some("array")
                if has_only(&["type", "items", "minItems", "maxItems"])
                    && !fields.get("items").is_some_and(Value::is_array) =>
            {
                self.array(fields, root)
            }
            Some("object") if has_only(&["type", "properties", "required", "additionalProperties"]) => {
                self.object(fields, root)
            }
            _ => None,
        };
        match rule {
            Some(name) => name,
            None => self.json(schema, root),
        }
    }

    /// JSON under `schema`, without white space.
    fn json(&mut self, schema: &Value, root: &Value) -> String {
        if self.is_full() {
            return String::new();
        }
        let whole = with_definitions(schema, root);
        if self.refused == Refused::Error || !refuses(&whole) {
            return self.json_part(whole);
        }
        // Compiling it took time, which is bounded by the bytes.
        self.json_bytes += whole.to_string().len();
        let Value::Object(fields) = schema else { return self.json_part(json!({})) };
        let mut fields = fields.clone();
        if UNIMPLEMENTED.iter().any(|key| fields.contains_key(*key)) {
            fields.retain(|key, _| !UNIMPLEMENTED.contains(&key.as_str()));
            return self.value(&Value::Object(fields), root);
        }
        fields.retain(|key, _| key == "type");
        // Arguments are an object.
        if std::ptr::eq(schema, root) {
            fields.insert("type".into(), json!("object"));
        }
        let kind = Value::Object(fields);
        let part = if refuses(&kind) { json!({}) } else { kind };
        self.json_part(part)
    }

    fn json_part(&mut self, mut schema: Value) -> String {
        schema["x-guidance"] = json!({"whitespace_flexible": false});
        let json = format!("%json {schema}");
        self.json_bytes += json.len();
        json
    }

    /// What stands at `place` in `root`; `None` if nothing does.
    fn reference(&mut self, place: &str, root: &Value) -> Option<String> {
        if let Some(name) = self.references.get(place) {
            return Some(name.clone());
        }
        let schema = references::lookup(root, place)?;
        if self.depth == MAX_DEPTH {
            return None;
        }
        let name = self.name();
        self.references.insert(place.to_owned(), name.clone());
        self.depth += 1;
        let body = self.value(schema, root);
        self.depth -= 1;
        Some(self.define(&name, &body))
    }

    /// `None` if its lengths are none.
    fn string(&mut self, fields: &Map<String, Value>) -> Option<String> {
        let (least, most) = (count(fields, "minLength", Some(0))?, count(fields, "maxLength", None)?);
        let quote = self.quote;
        let text = match (least, most) {
            (Some(0), None) => "TEXT?".into(),
            (_, Some(0)) => String::new(),
            (least, most) => {
                let least = least.unwrap_or(0);
                let most = most.map_or(String::new(), |most| most.to_string());
                let text = format!("/(?s:.{{{},{most}}})/", least.max(1));
                if least == 0 { format!("({text})?") } else { text }
            }
        };
        Some(self.rule(&format!("<[{quote}]> {text} <[{quote}]>")))
    }

    /// `None` if its lengths are none.
    fn array(&mut self, fields: &Map<String, Value>, root: &Value) -> Option<String> {
        let (least, most) = (count(fields, "minItems", Some(0))?, count(fields, "maxItems", None)?);
        let least = least.unwrap_or(0);
        if most == Some(0) && least == 0 {
            return Some("\"[\" \"]\"".into());
        }
        let item = self.value(fields.get("items").unwrap_or(&Value::Bool(true)), root);
        let item = self.rule(&item);
        let others = match (least.saturating_sub(1), most) {
            (_, Some(1)) => String::new(),
            (more, None) => format!("(\",\" {item}){{{more},}}"),
            (more, Some(most)) => format!("(\",\" {item}){{{more},{}}}", most - 1),
        };
        let items = format!("{item} {others}");
        let items = if least == 0 { format!("({items})?") } else { items };
        Some(self.rule(&format!("\"[\" {items} \"]\"")))
    }

    /// `None` if it has no properties but those that are not named.
    fn object(&mut self, fields: &Map<String, Value>, root: &Value) -> Option<String> {
        let none = Map::new();
        let properties = fields.get("properties").map_or(Some(&none), Value::as_object)?;
        let required: Vec<&str> = match fields.get("required") {
            None => Vec::new(),
            Some(names) => names.as_array()?.iter().map(Value::as_str).collect::<Option<_>>()?,
        };
        let is_open = fields.get("additionalProperties").is_none_or(|others| *others != Value::Bool(false));
        if required.iter().any(|name| !properties.contains_key(*name)) || (properties.is_empty() && is_open) {
            return None;
        }
        // The order of Jinja's `dictsort`.
        let mut sorted: Vec<_> = properties.iter().collect();
        sorted.sort_by_key(|(name, _)| name.to_lowercase());
        // From the last on: what may follow a first property, and what may be the first.
        let (mut behind, mut first) = (String::new(), String::new());
        for (name, schema) in sorted.into_iter().rev() {
            let value = self.value(schema, root);
            let property = self.rule(&format!("{} {value}", self.key(name)));
            let (rest, others) = (behind, first);
            (behind, first) = match required.contains(&name.as_str()) {
                true => (format!("\",\" {property} {rest}"), format!("{property} {rest}")),
                false if others.is_empty() => (format!("(\",\" {property})? {rest}"), format!("({property} {rest})?")),
                false => (format!("(\",\" {property})? {rest}"), format!("({property} {rest} | {others})")),
            };
            (behind, first) = (self.rule(&behind), self.rule(&first));
        }
        Some(self.rule(&format!("\"{{\" {first} \"}}\"")))
    }

    /// A key with its colon: bare if it can be read back so.
    fn key(&self, name: &str) -> String {
        let is_bare = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "_-.$@/".contains(c));
        match (is_bare, self.quote) {
            (true, _) => literal(&format!("{name}:")),
            (false, quote) if name.is_empty() => format!("<[{quote}]> <[{quote}]> \":\""),
            (false, quote) => format!("<[{quote}]> {} <[{quote}]> \":\"", literal(name)),
        }
    }
}

/// Key of a tool's schema in a part that is compiled alone.
const WHOLE: &str = "document";

/// Keys of schemas for references.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// `schema` with what it refers to: the definitions of `root`, or all of it if it refers to other parts.
fn with_definitions(schema: &Value, root: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(fields) => Value::Object(fields.clone()),
        Value::Bool(false) => json!({"not": {}}),
        _ => json!({}),
    };
    if !schema.to_string().contains("\"$ref\"") {
        return schema;
    }
    let part = schema.clone();
    for definitions in DEFINITIONS {
        if let Some(of_root) = root.get(definitions) {
            schema[definitions] = of_root.clone();
        }
    }
    let mut has_others = false;
    references::each(&mut schema, &mut |place| {
        let mut keys = place.split('/');
        has_others |= keys.next() == Some("#") && keys.next().is_none_or(|key| !DEFINITIONS.contains(&key));
    });
    if !has_others {
        return schema;
    }
    let (mut part, mut whole) = (part, root.clone());
    references::move_inside(&mut part, WHOLE);
    references::move_inside(&mut whole, WHOLE);
    part[WHOLE] = whole;
    part
}

/// The schema `fields` for values of one of its types, `None` if none of its constants has it.
fn of_type(fields: &Map<String, Value>, kind: Option<&str>) -> Option<Value> {
    let is_of_type = |value: &Value| match (kind, value) {
        (Some("null"), Value::Null) | (Some("boolean"), Value::Bool(_)) | (Some("string"), Value::String(_)) => true,
        (Some("array"), Value::Array(_)) | (Some("object"), Value::Object(_)) => true,
        (Some("number"), Value::Number(_)) => true,
        (Some("integer"), Value::Number(number)) => number.as_f64().is_some_and(|number| number.fract() == 0.0),
        _ => false,
    };
    let mut fields = fields.clone();
    fields.insert("type".into(), json!(kind));
    if let Some(Value::Array(values)) = fields.get_mut("enum") {
        values.retain(is_of_type);
        if values.is_empty() {
            return None;
        }
    }
    let is_possible = fields.get("const").is_none_or(is_of_type);
    is_possible.then_some(Value::Object(fields))
}

/// The strings of `enum` or `const`; `None` if there are none, or other values.
fn constants(fields: &Map<String, Value>) -> Option<Vec<&str>> {
    match (fields.get("enum"), fields.get("const")) {
        (Some(Value::Array(cases)), None) if !cases.is_empty() => cases.iter().map(Value::as_str).collect(),
        (None, Some(Value::String(text))) => Some(vec![text]),
        _ => None,
    }
}

/// A count; `absent` if there is no such key, `None` if it is no count.
fn count(fields: &Map<String, Value>, key: &str, absent: Option<u64>) -> Option<Option<u64>> {
    match fields.get(key) {
        None => Some(absent),
        Some(value) => value.as_u64().map(Some),
    }
}

/// Text in Lark's syntax, which is that of JSON without the control character DEL.
pub(super) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
