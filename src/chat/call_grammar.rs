//! Grammars of Gemma 4's tool calls, for constraints: `call:NAME{key:value,..}` with arguments under the tool's JSON schema.
//!
//! Objects, arrays and strings are rules in the syntax of calls, with keys in the order in which templates write them. A part whose
//! keywords these rules do not know (`pattern`, `format`, `oneOf`, ..) is left to llguidance and written as JSON, which
//! [`call::parse`](super::call) reads as well; so are numbers and literals, which are the same in both.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::call::is_name;
use super::channels::{Marker, marker};
use super::json::Json;
use super::template::{ChatOptions, Thinking};
use crate::constraint::{Constraint, ConstraintLimits, annotations};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Which calls a reply has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CallChoice {
    /// One or more, of any tools, and no text.
    Required,
    /// One, of any tool, and no text.
    One,
    /// One, of the tool with this name, and no text.
    Named(String),
    /// Any text and calls; those of the tools with these names have arguments under their schemas.
    Strict(Vec<String>),
    /// One or more, of any tools, and no text; or JSON under this schema.
    OrJson(String),
}

impl Constraint {
    /// Replies to a prompt that was rendered with `options` have the calls that `choice` says, in Gemma 4's syntax, with arguments
    /// under the JSON schemas of the tools. Properties that a schema does not name are left out. A prompt with
    /// [`Thinking::On`] may be answered by reasoning first.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the tokenizer has no tokens of calls; [`Error::Argument`] if there is no tool, a tool has no name that a call can have, or none has the name in `choice`.
    pub fn tool_calls(tokenizer: &Tokenizer, options: &ChatOptions, choice: &CallChoice) -> Result<Self> {
        let id = |of| {
            marker(tokenizer, of).ok_or_else(|| Error::Unsupported {
                path: None,
                what: "tool calls".into(),
                problem: "the checkpoint's tokenizer has no tokens of Gemma 4's calls".into(),
            })
        };
        let [open, close, quote] = [id(Marker::OpenCall)?, id(Marker::CloseCall)?, id(Marker::Quote)?];
        let tools = options.tools.iter().map(Tool::of).collect::<Result<Vec<_>>>()?;
        if tools.is_empty() {
            return Err(refused("needs a tool"));
        }
        let named: Vec<&String> = match choice {
            CallChoice::Named(name) => vec![name],
            CallChoice::Strict(names) => names.iter().collect(),
            CallChoice::Required | CallChoice::One | CallChoice::OrJson(_) => {
                tools.iter().map(|tool| &tool.name).collect()
            }
        };
        if let Some(name) = named.iter().find(|name| tools.iter().all(|tool| tool.name != ***name)) {
            return Err(refused(&format!("there is no tool {name:?}")));
        }
        let reasoning =
            match (options.thinking, marker(tokenizer, Marker::OpenChannel), marker(tokenizer, Marker::CloseChannel)) {
                (Thinking::On, Some(open), Some(close)) => format!("(<[{open}]> TEXT? <[{close}]>)? "),
                _ => String::new(),
            };
        let mut rules =
            Rules { text: String::new(), count: 0, quote, references: HashMap::new(), json_bytes: 0, depth: 0 };
        let mut calls = Vec::new();
        for tool in &tools {
            let begin = literal(&format!("call:{}", tool.name));
            if named.contains(&&tool.name) {
                rules.references.clear();
                calls.push(format!("{begin} {}", rules.arguments(&tool.parameters)));
            } else if matches!(choice, CallChoice::Strict(_)) {
                calls.push(format!("{begin} \"{{\" (TEXT | <[{quote}]>)*"));
            }
        }
        if let CallChoice::OrJson(schema) = choice {
            let json = json_reply(schema)?.to_string();
            rules.json_bytes += json.len();
            rules.text += &format!("json: %json {json}\n");
        }
        if rules.is_full() {
            return Err(refused(&format!(
                "their schemas make a grammar of more than {MAX_BYTES} bytes; simplify them"
            )));
        }
        let start = match choice {
            CallChoice::Required => format!("{reasoning}call+"),
            CallChoice::One | CallChoice::Named(_) => format!("{reasoning}call"),
            CallChoice::Strict(_) => format!("(<[^{open}]> | call)*"),
            CallChoice::OrJson(_) => format!("{reasoning}(call+ | json)"),
        };
        let calls = calls.join(" | ");
        let text = &rules.text;
        Ok(Self::lark(format!("start: {start}\ncall: <[{open}]> ({calls}) <[{close}]>\nTEXT: /(?s:.+)/\n{text}")))
    }
}

fn refused(problem: &str) -> Error {
    Error::argument("tools", problem)
}

/// The schema of a reply that is not a call, with the white space that JSON has under other constraints.
fn json_reply(schema: &str) -> Result<Value> {
    let malformed = |e| Error::argument("constraint", format!("the schema is not valid JSON: {e}"));
    let mut schema: Value = serde_json::from_str(schema).map_err(malformed)?;
    annotations::remove(&mut schema);
    if schema == Value::Bool(true) {
        schema = json!({});
    }
    if let Value::Object(fields) = &mut schema {
        let most = ConstraintLimits::default().json_whitespace;
        let pattern = format!(r"[\x20\x0A\x0D\x09]{{1,{most}}}");
        fields.entry("x-guidance").or_insert_with(|| json!({"whitespace_pattern": pattern}));
    }
    Ok(schema)
}

/// A tool that may be called.
struct Tool {
    name: String,
    parameters: Value,
}

impl Tool {
    fn of(tool: &Json) -> Result<Self> {
        let tool: Value = serde_json::from_str(&tool.to_string()).unwrap_or_default();
        let function = tool.get("function").unwrap_or(&tool);
        let name = function["name"].as_str().unwrap_or_default().to_owned();
        if !is_name(&name) {
            return Err(refused("a tool's name must be letters, digits, '_', '-', '.', ':' and '/'"));
        }
        let mut parameters = function.get("parameters").cloned().unwrap_or_else(|| json!({"properties": {}}));
        annotations::remove(&mut parameters);
        Ok(Self { name, parameters })
    }
}

/// Bytes of schemas in a grammar.
const MAX_BYTES: usize = 1 << 18;

/// References within references that are followed.
const MAX_DEPTH: usize = 64;

/// Types of values in JSON Schema.
const TYPES: usize = 7;

/// Keywords of JSON Schema that say something about values.
const KEYWORDS: [&str; 40] = [
    "$dynamicRef",
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
    "type",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Rules of a grammar in Lark's syntax. Methods give what stands for a schema in another rule.
struct Rules {
    text: String,
    count: usize,
    /// The token around strings.
    quote: u32,
    /// The rules of what is referred to, by its place in the tool's schema.
    references: HashMap<String, String>,
    /// Of schemas that are left to llguidance. Each has a copy of the definitions that it refers to.
    json_bytes: usize,
    /// References that are being followed.
    depth: usize,
}

impl Rules {
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
    fn is_full(&self) -> bool {
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
            let mut cases = Vec::new();
            for (_, kind) in kinds.iter().enumerate().filter(|(i, kind)| !kinds[..*i].contains(kind)) {
                let mut case = schema.clone();
                case["type"] = kind.clone();
                cases.push(self.value(&case, root));
            }
            return self.rule(&cases.join(" | "));
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
            Some("array") if has_only(&["type", "items", "minItems", "maxItems"]) => self.array(fields, root),
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
        let mut schema = match schema {
            Value::Object(fields) => Value::Object(fields.clone()),
            Value::Bool(false) => json!({"not": {}}),
            _ => json!({}),
        };
        if schema.to_string().contains("\"$ref\"") {
            for definitions in ["$defs", "definitions"] {
                if let Some(of_root) = root.get(definitions) {
                    schema[definitions] = of_root.clone();
                }
            }
        }
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
        let schema = root.pointer(place.strip_prefix('#')?)?;
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
        if most == Some(0) {
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
fn literal(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}
