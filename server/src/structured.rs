//! Structured output: the fields that request it, and their constraints.

use foretoken::{CompiledConstraint, Constraint, Engine};
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::call_format::CallFormat;
use crate::compiler::Compilers;
use crate::fields::{Fields, kind};

type Result<T> = std::result::Result<T, ApiError>;

/// What an answer must match.
#[derive(Default)]
pub(crate) enum Structured {
    /// Any text.
    #[default]
    Text,
    /// A constraint, which a field of the request has.
    Constraint(Constraint, String),
    /// Calls of tools.
    Calls(Box<CallFormat>),
}

impl Structured {
    /// Takes the fields of `/completion` and of OpenAI's older routes: `response_format`, llama.cpp's `json_schema` and
    /// `grammar`, vLLM's `structured_outputs` and the `guided_*` before it.
    ///
    /// # Errors
    /// If one is malformed, or several request a format.
    pub fn of_request(fields: &mut Fields) -> Result<Self> {
        let mut all = vec![Self::response_format(fields)?];
        fields.ignore(&["guided_decoding_backend"]);
        Self::take(fields, &FIELDS, &mut all)?;
        if let Some(mut outputs) = fields.object("structured_outputs")? {
            outputs.ignore(&["disable_fallback"]);
            outputs.only("disable_any_whitespace", &[json!(false)])?;
            outputs.only("disable_additional_properties", &[json!(false)])?;
            Self::take(&mut outputs, &STRUCTURED_OUTPUTS, &mut all)?;
            outputs.end()?;
        }
        let mut formats = all.into_iter().filter(|format| !matches!(format, Self::Text));
        match (formats.next(), formats.next()) {
            (Some(Self::Constraint(_, first)), Some(Self::Constraint(_, second))) => {
                Err(ApiError::field(second, format!("cannot be combined with {first}")))
            }
            (format, _) => Ok(format.unwrap_or_default()),
        }
    }

    fn take(fields: &mut Fields, named: &[(&str, Take)], all: &mut Vec<Self>) -> Result<()> {
        for (name, take) in named {
            let taken = take(fields, name)?;
            all.extend(taken.map(|constraint| Self::Constraint(constraint, fields.name(name))));
        }
        Ok(())
    }

    /// Takes OpenAI's `response_format`: text, any JSON object, or JSON that matches a schema, whether `strict` or not.
    fn response_format(fields: &mut Fields) -> Result<Self> {
        let Some(format) = fields.object("response_format")? else { return Ok(Self::default()) };
        Self::format(format, |format| {
            let mut named = format.object("json_schema")?.ok_or_else(|| format.error("json_schema", "is required"))?;
            let own = Self::named_schema(&mut named)?;
            named.end()?;
            Ok(own)
        })
    }

    /// Takes the field `text` of responses, whose `format` has the schema's fields next to its type.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn text_format(fields: &mut Fields) -> Result<(Self, Value)> {
        let plain = json!({"type": "text"});
        let Some(mut text) = fields.object("text")? else { return Ok((Self::default(), plain)) };
        text.ignore(&["verbosity"]);
        let echoed = text.peek("format").cloned().unwrap_or(plain);
        let own = match text.object("format")? {
            Some(format) => Self::format(format, Self::named_schema)?,
            None => Self::default(),
        };
        text.end()?;
        Ok((own, echoed))
    }

    /// A format by its type; `named` takes the fields of `json_schema`.
    fn format(mut format: Fields, named: impl FnOnce(&mut Fields) -> Result<Self>) -> Result<Self> {
        let own = match format.string("type")?.as_deref() {
            Some("text") => Self::default(),
            // llama.cpp's format has a schema as well.
            Some("json_object") => match format.value("schema") {
                None => Self::Constraint(Constraint::json_object(), format.name("type")),
                Some(schema) => Self::of_schema(schema, format.name("schema"))?,
            },
            Some("json_schema") => named(&mut format)?,
            Some(_) => return Err(format.error("type", "must be one of text, json_object, json_schema")),
            None => return Err(format.error("type", "is required: text, json_object or json_schema")),
        };
        format.end()?;
        Ok(own)
    }

    /// Takes a schema, with its name.
    fn named_schema(fields: &mut Fields) -> Result<Self> {
        fields.ignore(&["name", "description"]);
        fields.flag("strict")?;
        let schema = fields.value("schema").ok_or_else(|| fields.error("schema", "is required"))?;
        Self::of_schema(schema, fields.name("schema"))
    }

    /// Takes Anthropic's `output_config`. Its `effort` is ignored.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn output_config(fields: &mut Fields) -> Result<Self> {
        let Some(mut config) = fields.object("output_config")? else { return Ok(Self::default()) };
        config.ignore(&["effort"]);
        let mut own = Self::default();
        if let Some(mut format) = config.object("format")? {
            format.only("type", &[json!("json_schema")])?;
            let schema = format.value("schema").ok_or_else(|| format.error("schema", "is required"))?;
            own = Self::of_schema(schema, format.name("schema"))?;
            format.end()?;
        }
        config.end()?;
        Ok(own)
    }

    /// The field that has it, for errors; empty of any text.
    pub fn field(&self) -> &str {
        match self {
            Self::Text => "",
            Self::Constraint(_, field) => field,
            Self::Calls(calls) => calls.field(),
        }
    }

    fn of_schema(schema: Value, field: String) -> Result<Self> {
        Ok(Self::Constraint(json_schema(&schema, &field)?, field))
    }

    /// The compiled constraint, which the generations hold.
    ///
    /// # Errors
    /// 400 with the place in the schema, or those of [`Compilers::compile`].
    pub async fn compile(self, engine: &Engine, compilers: &Compilers) -> Result<Option<CompiledConstraint>> {
        match self {
            Self::Text => Ok(None),
            Self::Constraint(constraint, field) => compilers.compile(engine, &constraint, &field).await.map(Some),
            Self::Calls(calls) => compilers.compile_calls(engine, *calls).await,
        }
    }
}

/// Takes a field as a constraint.
type Take = fn(&mut Fields, &str) -> Result<Option<Constraint>>;

const FIELDS: [(&str, Take); 6] = [
    ("json_schema", schema),
    ("grammar", grammar),
    ("guided_json", schema),
    ("guided_regex", regex),
    ("guided_choice", choice),
    ("guided_grammar", grammar),
];

const STRUCTURED_OUTPUTS: [(&str, Take); 5] =
    [("json", schema), ("json_object", json_object), ("regex", regex), ("choice", choice), ("grammar", grammar)];

fn json_schema(schema: &Value, field: &str) -> Result<Constraint> {
    match schema {
        Value::Object(_) | Value::Bool(_) => Ok(Constraint::json_schema(schema.to_string())),
        other => Err(ApiError::field(field, format!("is {}, must be an object", kind(other)))),
    }
}

/// A schema, or, as in vLLM, its text.
fn schema(fields: &mut Fields, name: &str) -> Result<Option<Constraint>> {
    let field = fields.name(name);
    let malformed = |e: serde_json::Error| ApiError::field(&field, format!("the schema is not valid JSON: {e}"));
    let schema = match fields.value(name) {
        None => return Ok(None),
        Some(Value::String(text)) => serde_json::from_str(&text).map_err(malformed)?,
        Some(value) => value,
    };
    json_schema(&schema, &field).map(Some)
}

fn json_object(fields: &mut Fields, name: &str) -> Result<Option<Constraint>> {
    Ok(fields.flag(name)?.filter(|is_required| *is_required).map(|_| Constraint::json_object()))
}

fn regex(fields: &mut Fields, name: &str) -> Result<Option<Constraint>> {
    Ok(fields.string(name)?.map(Constraint::regex))
}

/// One of several strings.
fn choice(fields: &mut Fields, name: &str) -> Result<Option<Constraint>> {
    let Some(strings) = fields.list(name)? else { return Ok(None) };
    if strings.is_empty() || !strings.iter().all(|string| string.as_str().is_some_and(|text| !text.is_empty())) {
        return Err(fields.error(name, "must be an array of one or more strings, none of them empty"));
    }
    // Lark's strings are JSON's, with DEL escaped as well. As alternatives of a rule they would be limited by its items.
    let strings: Vec<_> = strings.iter().map(|string| string.to_string().replace('\x7f', "\\u007f")).collect();
    Ok(Some(Constraint::lark(format!("start: CHOICE\nCHOICE: {}", strings.join(" | ")))))
}

/// A grammar in Lark's syntax; an empty one is none, as in llama.cpp.
fn grammar(fields: &mut Fields, name: &str) -> Result<Option<Constraint>> {
    let Some(grammar) = fields.string(name)?.filter(|grammar| !grammar.is_empty()) else { return Ok(None) };
    if grammar.contains("::=") && !grammar.trim_start().starts_with("%llguidance") {
        let problem =
            "GBNF and EBNF are not supported; use Lark syntax, with a first line `%llguidance {}` if it has `::=`";
        return Err(fields.error(name, problem).with_code("unsupported_parameter"));
    }
    Ok(Some(Constraint::lark(grammar)))
}
