//! Rules of grammars for tool calls, and what the syntaxes of calls have in common.

use serde_json::{Map, Value, json};

use super::call::is_name;
use super::json::Json;
use crate::constraint::keywords::{IMPLEMENTED, UNIMPLEMENTED};
use crate::constraint::{allowed_escapes, references, refuses, rewrite};
use crate::{Error, Result};

/// What is done with parts of a tool's schema that llguidance cannot compile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// They are in the grammar, which then cannot be compiled.
    Error,
    /// They lose the keywords that are not implemented, else all but their type, else that too.
    Widened,
}

/// A tool that may be called.
pub(crate) struct Tool {
    pub name: String,
    pub parameters: Value,
}

impl Tool {
    pub fn of(tool: &Json) -> Self {
        let tool: Value = serde_json::from_str(&tool.to_string()).unwrap_or_default();
        let function = tool.get("function").unwrap_or(&tool);
        let name = function["name"].as_str().unwrap_or_default().to_owned();
        let given = function.get("parameters").filter(|schema| !schema.is_null()).cloned();
        let mut parameters = given.unwrap_or_else(|| json!({"properties": {}}));
        rewrite::document(&mut parameters);
        Self { name, parameters }
    }

    /// # Errors
    /// If a call cannot have its name.
    pub fn check_name(&self) -> Result<()> {
        match is_name(&self.name) {
            true => Ok(()),
            false => Err(argument("a tool's name must be letters, digits, '_', '-', '.', ':' and '/'")),
        }
    }
}

pub(crate) fn argument(problem: &str) -> Error {
    Error::argument("tools", problem)
}

/// Bytes of schemas in a grammar.
pub(crate) const MAX_BYTES: usize = 1 << 18;

/// References within references that are followed.
pub(crate) const MAX_DEPTH: usize = 64;

/// Types of values in JSON Schema.
pub(crate) const TYPES: usize = 7;

/// The syntax of a family's calls, in grammars.
pub(crate) trait CallSyntax {
    /// The tokens that begin and end a call.
    fn tokens(&self) -> [u32; 2];

    /// What is written between calls, as an item of a rule.
    fn separator(&self) -> &'static str;

    /// llguidance's options for JSON in arguments.
    fn json_options(&self) -> Value;

    /// A call between its tokens, with arguments under the tool's schema.
    ///
    /// # Errors
    /// If the schema cannot be written in this syntax.
    fn call(&self, tool: &Tool, rules: &mut Rules) -> Result<String>;

    /// A call between its tokens, with any arguments.
    fn free_call(&self, tool: &Tool) -> String;
}

/// Rules of a grammar in Lark's syntax.
pub(crate) struct Rules {
    pub text: String,
    /// Of the tool whose rules are being written.
    pub refused: Refused,
    count: usize,
    json_options: Value,
    /// Of schemas that are left to llguidance. Each has a copy of the definitions that it refers to.
    json_bytes: usize,
}

/// The item of a rule that matches JSON under a schema.
pub(crate) enum JsonRule {
    Part(String),
    /// It cannot be compiled; this schema lacks the keywords that are not implemented.
    Reduced(Value),
}

impl Rules {
    pub fn new(json_options: Value) -> Self {
        Self { text: String::new(), refused: Refused::Error, count: 0, json_options, json_bytes: 0 }
    }

    /// Defines the rule `name`: JSON under `schema`, a text of its own.
    pub fn of_json(&mut self, name: &str, schema: &Value) {
        let json = schema.to_string();
        self.json_bytes += json.len();
        self.define(name, &format!("%json {json}"));
    }

    pub fn rule(&mut self, body: &str) -> String {
        let name = self.name();
        self.define(&name, body)
    }

    pub fn name(&mut self) -> String {
        self.count += 1;
        format!("r{}", self.count)
    }

    pub fn define(&mut self, name: &str, body: &str) -> String {
        self.text += &format!("{name}: {body}\n");
        name.to_owned()
    }

    /// Whether the grammar is larger than it may be, so that no more is written.
    pub fn is_full(&self) -> bool {
        self.json_bytes.max(self.text.len()) > MAX_BYTES
    }

    /// JSON under `schema`, which is a part of `root`.
    pub fn json(&mut self, schema: &Value, root: &Value) -> JsonRule {
        if self.is_full() {
            return JsonRule::Part(String::new());
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
            return JsonRule::Reduced(Value::Object(fields));
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

    fn json_part(&mut self, mut schema: Value) -> JsonRule {
        let escapes = allowed_escapes(&schema);
        schema["x-guidance"] = self.json_options.clone();
        if let Some(escapes) = escapes {
            schema["x-guidance"]["json_allowed_escapes"] = json!(escapes);
        }
        let json = format!("%json {schema}");
        self.json_bytes += json.len();
        JsonRule::Part(json)
    }
}

/// Whether a schema has no keywords about values but `allowed`.
pub(crate) fn has_only(fields: &Map<String, Value>, allowed: &[&str]) -> bool {
    let is_keyword = |key: &&str| IMPLEMENTED.contains(key) || UNIMPLEMENTED.contains(key);
    fields.keys().map(String::as_str).filter(is_keyword).all(|key| allowed.contains(&key))
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
pub(crate) fn of_type(fields: &Map<String, Value>, kind: Option<&str>) -> Option<Value> {
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
pub(crate) fn constants(fields: &Map<String, Value>) -> Option<Vec<&str>> {
    match (fields.get("enum"), fields.get("const")) {
        (Some(Value::Array(cases)), None) if !cases.is_empty() => cases.iter().map(Value::as_str).collect(),
        (None, Some(Value::String(text))) => Some(vec![text]),
        _ => None,
    }
}

/// A count; `absent` if there is no such key, `None` if it is no count.
pub(crate) fn count(fields: &Map<String, Value>, key: &str, absent: Option<u64>) -> Option<Option<u64>> {
    match fields.get(key) {
        None => Some(absent),
        Some(value) => value.as_u64().map(Some),
    }
}

/// Text in Lark's syntax, which is that of JSON without the control character DEL.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
