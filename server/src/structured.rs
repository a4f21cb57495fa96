//! Structured output: the fields that request it, and their constraints.

use foretoken::{Constraint, Engine};
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
    /// Takes OpenAI's `response_format`: text, any JSON object, or JSON that matches a schema, whether `strict` or not.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn response_format(fields: &mut Fields) -> Result<Self> {
        let Some(format) = fields.object("response_format")? else { return Ok(Self::default()) };
        Self::format(format, |format| {
            let missing = |format: &Fields| format.error("json_schema", "is required");
            let mut named = format.object("json_schema")?.ok_or_else(|| missing(format))?;
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

    /// Takes llama.cpp's `json_schema` and `grammar`, which must be in Lark's syntax after a line `%llguidance {}`.
    ///
    /// # Errors
    /// If both are given, or the grammar is in GBNF.
    pub fn llama(fields: &mut Fields) -> Result<Self> {
        let schema = fields.value("json_schema");
        let grammar = fields.string("grammar")?.filter(|grammar| !grammar.is_empty());
        match (schema, grammar) {
            (None, None) => Ok(Self::default()),
            (Some(schema), None) => Self::of_schema(schema, fields.name("json_schema")),
            (None, Some(grammar)) if grammar.trim_start().starts_with("%llguidance") => {
                Ok(Self::Constraint(Constraint::lark(grammar), fields.name("grammar")))
            }
            (None, Some(_)) => {
                let problem = "GBNF is not supported; use Lark syntax with a first line `%llguidance {}`";
                Err(fields.error("grammar", problem).with_code("unsupported_parameter"))
            }
            (Some(_), Some(_)) => Err(fields.error("grammar", "cannot be combined with json_schema")),
        }
    }

    fn of_schema(schema: Value, field: String) -> Result<Self> {
        match schema {
            Value::Object(_) | Value::Bool(_) => {
                Ok(Self::Constraint(Constraint::json_schema(schema.to_string()), field))
            }
            other => Err(ApiError::field(field, format!("is {}, must be an object", kind(&other)))),
        }
    }

    /// The constraint, compiled. The engine caches what was compiled.
    ///
    /// # Errors
    /// 400 with the place in the schema, or those of [`Compilers::compile`].
    pub async fn compile(self, engine: &Engine, compilers: &Compilers) -> Result<Option<Constraint>> {
        match self {
            Self::Text => Ok(None),
            Self::Constraint(constraint, field) => {
                compilers.compile(engine, &constraint, &field).await?;
                Ok(Some(constraint))
            }
            Self::Calls(calls) => compilers.compile_calls(engine, *calls).await,
        }
    }
}
