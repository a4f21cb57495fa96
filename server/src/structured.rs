//! Structured output: the fields that request it, and their constraints.

use foretoken::{CompiledConstraint, Constraint, Engine};
use serde_json::{Value, json};

use crate::api_error::{ApiError, Result};
use crate::call_format::CallFormat;
use crate::compiler::Compilers;
use crate::fields::{Fields, mismatch};

/// A constraint, and the field of the request that has it.
pub(crate) type Format = (Constraint, String);

/// What an answer must match.
pub(crate) enum Structured {
    Format(Format),
    /// Calls of tools.
    Calls(Box<CallFormat>),
}

impl Structured {
    /// The field that has it, for errors.
    pub fn field(&self) -> &str {
        match self {
            Self::Format((_, field)) => field,
            Self::Calls(calls) => calls.field(),
        }
    }

    /// The compiled constraint, which the generations hold; `None` if calls need none.
    ///
    /// # Errors
    /// 400 with the place in the schema, or those of [`Compilers::compile`].
    pub async fn compile(self, engine: &Engine, compilers: &Compilers) -> Result<Option<CompiledConstraint>> {
        match self {
            Self::Format((constraint, field)) => compilers.compile(engine, &constraint, &field).await.map(Some),
            Self::Calls(calls) => compilers.compile_calls(engine, *calls).await,
        }
    }
}

/// Takes the fields of `/completion` and of OpenAI's older routes: `response_format`, llama.cpp's `json_schema` and
/// `grammar`, vLLM's `structured_outputs` and the `guided_*` before it.
///
/// # Errors
/// If one is malformed, or several request a format.
pub(crate) fn of_request(fields: &mut Fields) -> Result<Option<Format>> {
    let mut all = Vec::from_iter(response_format(fields)?);
    fields.ignore(&["guided_decoding_backend"]);
    take_all(fields, &FIELDS, &mut all)?;
    if let Some(mut outputs) = fields.object("structured_outputs")? {
        outputs.ignore(&["disable_fallback"]);
        outputs.only("disable_any_whitespace", &[json!(false)])?;
        outputs.only("disable_additional_properties", &[json!(false)])?;
        take_all(&mut outputs, &STRUCTURED_OUTPUTS, &mut all)?;
        outputs.end()?;
    }
    if let [(_, first), (_, second), ..] = &*all {
        return Err(ApiError::field(second, format!("cannot be combined with {first}")));
    }
    Ok(all.pop())
}

fn take_all(fields: &mut Fields, named: &[(&str, Take)], all: &mut Vec<Format>) -> Result<()> {
    for (name, take) in named {
        let taken = take(fields, name)?;
        all.extend(taken.map(|constraint| (constraint, fields.name(name))));
    }
    Ok(())
}

/// Takes OpenAI's `response_format`: text, any JSON object, or JSON that matches a schema, whether `strict` or not.
fn response_format(fields: &mut Fields) -> Result<Option<Format>> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    of_type(format, |format| {
        let mut named = format.object("json_schema")?.ok_or_else(|| format.error("json_schema", "is required"))?;
        let own = named_schema(&mut named)?;
        named.end()?;
        Ok(own)
    })
}

/// Takes the field `text` of responses, whose `format` has the schema's fields next to its type. Returns also the field
/// `format` as the response repeats it.
///
/// # Errors
/// If it is malformed.
pub(crate) fn text_format(fields: &mut Fields) -> Result<(Option<Format>, Value)> {
    let plain = json!({"type": "text"});
    let Some(mut text) = fields.object("text")? else { return Ok((None, plain)) };
    text.ignore(&["verbosity"]);
    let echoed = text.peek("format").cloned().unwrap_or(plain);
    let own = match text.object("format")? {
        Some(format) => of_type(format, named_schema)?,
        None => None,
    };
    text.end()?;
    Ok((own, echoed))
}

/// A format by its type; `named` takes the fields of `json_schema`.
fn of_type(mut format: Fields, named: impl FnOnce(&mut Fields) -> Result<Format>) -> Result<Option<Format>> {
    let own = match format.string("type")?.as_deref() {
        Some("text") => None,
        // llama.cpp's format has a schema as well.
        Some("json_object") if format.peek("schema").is_some() => Some(required_schema(&mut format)?),
        Some("json_object") => Some((Constraint::json_object(), format.name("type"))),
        Some("json_schema") => Some(named(&mut format)?),
        Some(_) => return Err(format.error("type", "must be one of text, json_object, json_schema")),
        None => return Err(format.error("type", "is required: text, json_object or json_schema")),
    };
    format.end()?;
    Ok(own)
}

/// Takes a schema, with its name.
fn named_schema(fields: &mut Fields) -> Result<Format> {
    fields.ignore(&["name", "description"]);
    fields.flag("strict")?;
    required_schema(fields)
}

/// Takes Anthropic's `output_config`. Its `effort` is ignored.
///
/// # Errors
/// If it is malformed.
pub(crate) fn output_config(fields: &mut Fields) -> Result<Option<Format>> {
    let Some(mut config) = fields.object("output_config")? else { return Ok(None) };
    config.ignore(&["effort"]);
    let mut own = None;
    if let Some(mut format) = config.object("format")? {
        format.only("type", &[json!("json_schema")])?;
        own = Some(required_schema(&mut format)?);
        format.end()?;
    }
    config.end()?;
    Ok(own)
}

fn required_schema(fields: &mut Fields) -> Result<Format> {
    let schema = fields.value("schema").ok_or_else(|| fields.error("schema", "is required"))?;
    let field = fields.name("schema");
    Ok((json_schema(&schema, &field)?, field))
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
        other => Err(mismatch(field, other, "an object")),
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
