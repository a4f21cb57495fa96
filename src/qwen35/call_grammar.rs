//! Grammars of calls, for constraints: `<function=NAME>` with a `<parameter=KEY>` per argument,
//! under the tool's JSON schema.
//!
//! A string is written without quotes: a lexeme up to the parameter's end tag, which neither an end tag nor the
//! end of a call is in. All other values are JSON.

use serde_json::{Map, Value, json};

use crate::Result;
use crate::chat::{
    CallSyntax, JsonRule, MAX_DEPTH, Refused, Rules, TYPES, Tool, argument, constants, count, has_only, literal,
    of_type,
};
use crate::constraint::{references, refuses};
use crate::tokenizer::Tokenizer;

/// Calls between the tags `<tool_call>` and `</tool_call>`, if these are tokens.
pub(crate) struct XmlCalls {
    tokens: [u32; 2],
}

/// What ends a value.
const END: &str = r#""\n</parameter>\n""#;
/// Texts without end tags.
const NO_TAG: &str = r"~/(?s:.*)<\/(parameter|tool_call)>(?s:.*)/";

impl XmlCalls {
    pub(crate) fn new(tokenizer: &Tokenizer) -> Option<Self> {
        let tokens = [tokenizer.id("<tool_call>")?, tokenizer.id("</tool_call>")?];
        Some(Self { tokens })
    }
}

impl CallSyntax for XmlCalls {
    fn tokens(&self) -> [u32; 2] {
        self.tokens
    }

    fn separator(&self) -> &'static str {
        r#""\n""#
    }

    /// As Python's `json.dumps` writes it, and so the template.
    fn json_options(&self) -> Value {
        json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "})
    }

    fn call(&self, tool: &Tool, rules: &mut Rules) -> Result<String> {
        let mut arguments = Arguments { rules, tool: &tool.name, root: &tool.parameters, visited: 0 };
        let arguments = arguments.all(&tool.parameters, 0)?;
        let begin = literal(&format!("\n<function={}>\n", tool.name));
        Ok(format!("{begin} {arguments} {}", literal("</function>\n")))
    }

    fn free_call(&self, tool: &Tool) -> String {
        format!("{} (<[^{}]>)*", literal(&format!("\n<function={}>\n", tool.name)), self.tokens[1])
    }
}

struct Arguments<'a> {
    rules: &'a mut Rules,
    tool: &'a str,
    root: &'a Value,
    /// Schemas visited: cases may refer to the same ones again and again.
    visited: usize,
}

/// Maximum number of schemas visited for a tool.
const MAX_SCHEMAS: usize = 10_000;

/// A value that a schema allows, after its parameter's tag.
enum Case {
    /// Any text.
    Text,
    /// Texts, as a rule that includes the end tag.
    Texts(String),
    Json(Value),
}

impl Arguments<'_> {
    /// All arguments, in the order of the schema.
    fn all(&mut self, schema: &Value, depth: usize) -> Result<String> {
        let none = Map::new();
        let fields = schema.as_object().unwrap_or(&none);
        if let Some(place) = fields.get("$ref").and_then(Value::as_str).filter(|_| has_only(fields, &["$ref"]))
            && let Some(schema) = references::lookup(self.root, place).filter(|_| depth < MAX_DEPTH)
        {
            return self.all(schema, depth + 1);
        }
        if !has_only(fields, &["type", "properties", "required", "additionalProperties"]) {
            self.refuse("its arguments have keywords besides properties, required and additionalProperties")?;
        }
        let properties = fields.get("properties").and_then(Value::as_object).unwrap_or(&none);
        let is_open = fields.get("additionalProperties").is_none_or(|others| *others != Value::Bool(false));
        if properties.is_empty() && is_open {
            let value = self.value(fields.get("additionalProperties").unwrap_or(&Value::Bool(true)))?;
            return Ok(self.rules.rule(&format!("(\"<parameter=\" /[^<>\\n]+/ \">\\n\" {value})*")));
        }
        let required: Vec<&str> =
            fields.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let unnamed = required.iter().filter(|name| !properties.contains_key(**name));
        let unnamed: Vec<_> = unnamed.map(|name| ((*name).to_owned(), Value::Bool(true))).collect();
        let mut all = String::new();
        for (name, schema) in properties.iter().chain(unnamed.iter().map(|(name, schema)| (name, schema))) {
            let is_required = required.contains(&name.as_str());
            // A name that its tag cannot have.
            if name.is_empty() || name.contains(['>', '\n']) {
                if is_required {
                    return Err(argument(&format!("{}: no call can have the argument {name:?}", self.tool)));
                }
                continue;
            }
            let value = self.value(schema)?;
            let parameter = self.rules.rule(&format!("{} {value}", literal(&format!("<parameter={name}>\n"))));
            all += &parameter;
            all += if is_required { " " } else { "? " };
        }
        Ok(all)
    }

    /// A value and its end tag.
    fn value(&mut self, schema: &Value) -> Result<String> {
        let mut cases = Vec::new();
        self.cases(schema, 0, &mut cases)?;
        if cases.iter().any(|case| matches!(case, Case::Text)) {
            return Ok(self.text("/(?s:.*)/"));
        }
        let mut rules = Vec::new();
        for case in cases {
            match case {
                Case::Text => {}
                Case::Texts(rule) => rules.push(rule),
                Case::Json(schema) => {
                    let json = self.json(schema);
                    rules.push(format!("{json} {END}"));
                }
            }
        }
        Ok(self.rules.rule(&rules.join(" | ")))
    }

    fn json(&mut self, mut schema: Value) -> String {
        loop {
            match self.rules.json(&schema, self.root) {
                JsonRule::Part(part) => return part,
                JsonRule::Reduced(reduced) => schema = reduced,
            }
        }
    }

    /// The rule of texts that match `terms`, and their end tag.
    fn text(&mut self, terms: &str) -> String {
        let name = self.rules.name();
        self.rules.define(&name.to_uppercase(), &format!("{terms} & {NO_TAG}"));
        self.rules.define(&format!("{name}[suffix={END}]"), &name.to_uppercase());
        name
    }

    fn cases(&mut self, schema: &Value, depth: usize, cases: &mut Vec<Case>) -> Result<()> {
        if !self.may_be_text(schema, depth) {
            cases.push(Case::Json(schema.clone()));
            return Ok(());
        }
        let Some(fields) = schema.as_object() else {
            cases.push(Case::Text);
            return Ok(());
        };
        if depth == MAX_DEPTH || self.visited >= MAX_SCHEMAS {
            self.refuse("an argument's schema refers to too many others")?;
            cases.push(Case::Text);
            return Ok(());
        }
        if let Some(place) = fields.get("$ref").and_then(Value::as_str).filter(|_| has_only(fields, &["$ref"]))
            && let Some(schema) = references::lookup(self.root, place)
        {
            return self.cases(schema, depth + 1, cases);
        }
        if let Some(Value::Array(of)) = fields.get("anyOf").filter(|_| has_only(fields, &["anyOf"])) {
            return of.iter().try_for_each(|schema| self.cases(schema, depth + 1, cases));
        }
        if let Some(Value::Array(kinds)) = fields.get("type")
            && (1..=TYPES).contains(&kinds.len())
        {
            let schemas: Vec<_> = kinds.iter().filter_map(|kind| of_type(fields, kind.as_str())).collect();
            return schemas.iter().try_for_each(|schema| self.cases(schema, depth + 1, cases));
        }
        let kind = fields.get("type").and_then(Value::as_str);
        if let (None, Some(Value::Array(values))) = (kind, fields.get("enum"))
            && has_only(fields, &["enum"])
            && let (texts, others) = values.iter().cloned().partition::<Vec<_>, _>(Value::is_string)
            && !others.is_empty()
        {
            cases.push(Case::Json(json!({"enum": others})));
            return self.cases(&json!({"enum": texts}), depth + 1, cases);
        }
        if let Some(texts) = constants(fields).filter(|_| has_only(fields, &["type", "enum", "const"])) {
            let texts = texts.iter().filter(|text| !text.contains("</parameter>") && !text.contains("</tool_call>"));
            let texts: Vec<_> = texts.map(|text| literal(&format!("{text}\n</parameter>\n"))).collect();
            cases.push(Case::Texts(self.rules.rule(&texts.join(" | "))));
            return Ok(());
        }
        if kind.is_some() {
            let case = self.string(fields)?;
            cases.push(case);
            return Ok(());
        }
        if !has_only(fields, &[]) {
            self.refuse("a string is not JSON in a call, and an argument that may be one has keywords without a type")?;
        }
        cases.push(Case::Text);
        Ok(())
    }

    /// Whether a schema may allow strings.
    fn may_be_text(&mut self, schema: &Value, depth: usize) -> bool {
        let Some(fields) = schema.as_object() else { return *schema != Value::Bool(false) };
        self.visited += 1;
        if depth == MAX_DEPTH || self.visited >= MAX_SCHEMAS {
            return true;
        }
        fields.iter().all(|(key, value)| match (key.as_str(), value) {
            ("type", Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
            ("type", kind) => kind == "string",
            ("const", value) => value.is_string(),
            ("enum", Value::Array(values)) => values.iter().any(Value::is_string),
            ("anyOf" | "oneOf", Value::Array(of)) => of.iter().any(|schema| self.may_be_text(schema, depth + 1)),
            ("allOf", Value::Array(of)) => of.iter().all(|schema| self.may_be_text(schema, depth + 1)),
            ("$ref", Value::String(place)) => {
                references::lookup(self.root, place).is_none_or(|schema| self.may_be_text(schema, depth + 1))
            }
            _ => true,
        })
    }

    fn string(&mut self, fields: &Map<String, Value>) -> Result<Case> {
        let lengths = [count(fields, "minLength", Some(0)), count(fields, "maxLength", None)];
        let known = has_only(fields, &["type", "minLength", "maxLength", "pattern"]);
        let pattern = fields.get("pattern").map(|pattern| {
            let is_refused = self.rules.refused == Refused::Widened && refuses(&json!({"pattern": pattern}));
            pattern.as_str().filter(|_| !is_refused).and_then(whole_text)
        });
        let ([Some(least), Some(most)], true, None | Some(Some(_))) = (lengths, known, &pattern) else {
            self.refuse("a string has a format, keywords beside constants, or a pattern with | outside of groups")?;
            return Ok(Case::Text);
        };
        let least = least.unwrap_or(0);
        let mut terms = match (least, most, pattern.is_some()) {
            (0, None, true) => Vec::new(),
            (0, None, false) => return Ok(Case::Text),
            (least, None, _) => vec![format!("/(?s:.{{{least},}})/")],
            (least, Some(most), _) => vec![format!("/(?s:.{{{least},{most}}})/")],
        };
        terms.extend(pattern.flatten().map(|pattern| format!("/{pattern}/")));
        Ok(Case::Texts(self.text(&terms.join(" & "))))
    }

    /// # Errors
    /// If schemas may not be widened.
    fn refuse(&self, problem: &str) -> Result<()> {
        match self.rules.refused {
            Refused::Widened => Ok(()),
            Refused::Error => Err(argument(&format!("{}: {problem}", self.tool))),
        }
    }
}

/// The regular expression, between slashes, of a whole text in which `pattern` is found; `None` if it has
/// alternatives outside of groups, or anchors in it.
fn whole_text(pattern: &str) -> Option<String> {
    let (mut inner, mut depth, mut in_class) = (String::new(), 0usize, false);
    let from_start = pattern.strip_prefix('^');
    let mut rest = from_start.unwrap_or(pattern).chars().peekable();
    let mut to_end = false;
    while let Some(c) = rest.next() {
        match c {
            '$' if !in_class && rest.peek().is_none() => to_end = true,
            '^' | '$' if !in_class => return None,
            '|' if depth == 0 && !in_class => return None,
            '(' if !in_class => depth += 1,
            ')' if !in_class => depth = depth.checked_sub(1)?,
            '[' => in_class = true,
            ']' => in_class = false,
            _ => {}
        }
        match c {
            '$' if !in_class => {} // the last
            '/' => inner.push_str("\\/"),
            '\n' => inner.push_str("\\n"),
            '\\' => inner.extend([c, rest.next()?]),
            // Negation is not an anchor.
            '[' => inner.extend([c].into_iter().chain(rest.next_if_eq(&'^'))),
            _ => inner.push(c),
        }
    }
    let any = |is_anchored: bool| if is_anchored { "" } else { "(?s:.*)" };
    (depth == 0).then(|| format!("{}{inner}{}", any(from_start.is_some()), any(to_end)))
}
