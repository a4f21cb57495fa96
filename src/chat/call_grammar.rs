//! Grammars of Gemma 4's tool calls, for constraints: `call:NAME{key:value,..}` with arguments
//! under the tool's JSON schema.
//!
//! Objects, arrays and strings are rules in the syntax of calls, with keys in the order in which
//! templates write them. A part whose keywords these rules do not know (`pattern`, `format`, `allOf`, ..)
//! is left to llguidance and written as JSON, which
//! [`call::parse`](super::call) reads as well; so are numbers and literals, which are the same in both.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::channels::{Marker, marker};
use super::rules::{CallSyntax, JsonRule, MAX_DEPTH, Rules, TYPES, Tool, constants, count, has_only, literal, of_type};
use crate::Result;
use crate::constraint::references;
use crate::tokenizer::Tokenizer;

/// Calls between control tokens.
pub(crate) struct ChannelCalls {
    tokens: [u32; 2],
    /// The token around strings.
    quote: u32,
}

impl ChannelCalls {
    /// `None` if the tokenizer has no such tokens.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let [open, close, quote] = [Marker::OpenCall, Marker::CloseCall, Marker::Quote].map(|of| marker(tokenizer, of));
        Some(Self { tokens: [open?, close?], quote: quote? })
    }
}

impl CallSyntax for ChannelCalls {
    fn tokens(&self) -> [u32; 2] {
        self.tokens
    }

    fn separator(&self) -> &'static str {
        ""
    }

    fn json_options(&self) -> Value {
        json!({"whitespace_flexible": false})
    }

    fn call(&self, tool: &Tool, rules: &mut Rules) -> Result<String> {
        let mut arguments = Arguments { rules, quote: self.quote, references: HashMap::new(), depth: 0 };
        let arguments = arguments.all(&tool.parameters);
        Ok(format!("{} {arguments}", literal(&format!("call:{}", tool.name))))
    }

    fn free_call(&self, tool: &Tool) -> String {
        format!("{} \"{{\" (TEXT | <[{}]>)*", literal(&format!("call:{}", tool.name)), self.quote)
    }
}

/// Writes the rules of a tool's arguments. Methods return the item of a rule that matches a schema.
struct Arguments<'r> {
    rules: &'r mut Rules,
    quote: u32,
    /// The rules of `$ref` targets, by their places in the tool's schema.
    references: HashMap<String, String>,
    /// References that are being followed.
    depth: usize,
}

impl Arguments<'_> {
    /// An object under a tool's schema.
    fn all(&mut self, schema: &Value) -> String {
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

    /// A value under `schema`, which is a part of `root`.
    fn value(&mut self, schema: &Value, root: &Value) -> String {
        if self.rules.is_full() {
            return String::new();
        }
        let Value::Object(fields) = schema else { return self.json(schema, root) };
        let has_only = |allowed: &[&str]| has_only(fields, allowed);
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
            return self.rules.rule(&cases.join(" | "));
        }
        if let Some(Value::Array(kinds)) = fields.get("type")
            && (1..=TYPES).contains(&kinds.len())
        {
            let distinct = kinds.iter().enumerate().filter(|(i, kind)| !kinds[..*i].contains(kind));
            let cases: Vec<_> = distinct.filter_map(|(_, kind)| of_type(fields, kind.as_str())).collect();
            if !cases.is_empty() {
                let cases: Vec<_> = cases.iter().map(|case| self.value(case, root)).collect();
                return self.rules.rule(&cases.join(" | "));
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
            return self.rules.rule(&strings.iter().map(case).collect::<Vec<_>>().join(" | "));
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
        match self.rules.json(schema, root) {
            JsonRule::Part(part) => part,
            JsonRule::Reduced(schema) => self.value(&schema, root),
        }
    }

    /// A value under the schema at `place` in `root`; `None` if there is none, or references nest too deeply.
    fn reference(&mut self, place: &str, root: &Value) -> Option<String> {
        if let Some(name) = self.references.get(place) {
            return Some(name.clone());
        }
        let schema = references::lookup(root, place)?;
        if self.depth == MAX_DEPTH {
            return None;
        }
        let name = self.rules.name();
        self.references.insert(place.to_owned(), name.clone());
        self.depth += 1;
        let body = self.value(schema, root);
        self.depth -= 1;
        Some(self.rules.define(&name, &body))
    }

    /// `None` if its lengths are not counts.
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
        Some(self.rules.rule(&format!("<[{quote}]> {text} <[{quote}]>")))
    }

    /// `None` if its lengths are not counts, or exclude each other.
    fn array(&mut self, fields: &Map<String, Value>, root: &Value) -> Option<String> {
        let (least, most) = (count(fields, "minItems", Some(0))?, count(fields, "maxItems", None)?);
        let least = least.unwrap_or(0);
        if most.is_some_and(|most| most < least) {
            return None;
        }
        if most == Some(0) {
            return Some("\"[\" \"]\"".into());
        }
        let item = self.value(fields.get("items").unwrap_or(&Value::Bool(true)), root);
        let item = self.rules.rule(&item);
        let others = match (least.saturating_sub(1), most) {
            (_, Some(1)) => String::new(),
            (more, None) => format!("(\",\" {item}){{{more},}}"),
            (more, Some(most)) => format!("(\",\" {item}){{{more},{}}}", most - 1),
        };
        let items = format!("{item} {others}");
        let items = if least == 0 { format!("({items})?") } else { items };
        Some(self.rules.rule(&format!("\"[\" {items} \"]\"")))
    }

    /// `None` if a keyword is malformed, a required property has no schema, or others are allowed and none has one.
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
        // From the last property on: the rule of the rest after a written property, and of the rest before any.
        let (mut following, mut first) = (String::new(), String::new());
        for (name, schema) in sorted.into_iter().rev() {
            let value = self.value(schema, root);
            let property = self.rules.rule(&format!("{} {value}", self.key(name)));
            let (rest, others) = (following, first);
            (following, first) = match required.contains(&name.as_str()) {
                true => (format!("\",\" {property} {rest}"), format!("{property} {rest}")),
                false if others.is_empty() => (format!("(\",\" {property})? {rest}"), format!("({property} {rest})?")),
                false => (format!("(\",\" {property})? {rest}"), format!("({property} {rest} | {others})")),
            };
            (following, first) = (self.rules.rule(&following), self.rules.rule(&first));
        }
        Some(self.rules.rule(&format!("\"{{\" {first} \"}}\"")))
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
