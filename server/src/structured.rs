//! Structured output: the fields that ask for it, and the constraint that they mean.

use std::sync::Arc;

use foretoken::Constraint;
use serde_json::{Value, json};

use crate::api_error::ApiError;
use crate::app::App;
use crate::fields::{Fields, kind};
use crate::reply::encode;

type Result<T> = std::result::Result<T, ApiError>;

/// What an answer must match, and the field that says so.
#[derive(Default)]
pub(crate) struct Structured {
    pub constraint: Option<Constraint>,
    field: String,
    /// The parts that it was made of, each with its own field, which tell what is wrong with it.
    parts: Vec<(Constraint, String)>,
}

impl Structured {
    fn new(constraint: Constraint, field: String) -> Self {
        Self { constraint: Some(constraint), field, parts: Vec::new() }
    }

    /// Calls of tools, whose schemas are the parts.
    pub fn of_calls(constraint: Constraint, parts: Vec<(Constraint, String)>) -> Self {
        Self { constraint: Some(constraint), field: "tool_choice".into(), parts }
    }

    /// Takes OpenAI's `response_format`: text, any JSON object, or JSON under a schema, which always holds, `strict` or not.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn response_format(fields: &mut Fields) -> Result<Self> {
        let Some(mut format) = fields.object("response_format")? else { return Ok(Self::default()) };
        let own = match format.string("type")?.as_deref() {
            Some("text") => Self::default(),
            // llama.cpp's form has a schema as well.
            Some("json_object") => match format.value("schema") {
                None => Self::new(Constraint::json_object(), format.name("type")),
                Some(schema) => Self::of_schema(schema, format.name("schema"))?,
            },
            Some("json_schema") => {
                let missing = |format: &Fields| format.error("json_schema", "is missing; give its schema");
                let mut named = format.object("json_schema")?.ok_or_else(|| missing(&format))?;
                named.ignore(&["name", "description"]);
                named.flag("strict")?;
                let schema = named.value("schema").ok_or_else(|| named.error("schema", "is missing"))?;
                let own = Self::of_schema(schema, named.name("schema"))?;
                named.end()?;
                own
            }
            Some(_) => return Err(format.error("type", "is unknown; there are text, json_object and json_schema")),
            None => return Err(format.error("type", "is missing; give text, json_object or json_schema")),
        };
        format.end()?;
        Ok(own)
    }

    /// Takes the field `text` of responses, whose `format` has the fields of a schema beside its type.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn text_format(fields: &mut Fields) -> Result<(Self, Value)> {
        let plain = json!({"type": "text"});
        let Some(mut text) = fields.object("text")? else { return Ok((Self::default(), plain)) };
        text.ignore(&["verbosity"]);
        let echoed = text.peek("format").cloned().unwrap_or(plain);
        let mut own = Self::default();
        if let Some(mut format) = text.object("format")? {
            match format.string("type")?.as_deref() {
                Some("text") => {}
                Some("json_object") => own = Self::new(Constraint::json_object(), format.name("type")),
                Some("json_schema") => {
                    format.ignore(&["name", "description"]);
                    format.flag("strict")?;
                    let schema = format.value("schema").ok_or_else(|| format.error("schema", "is missing"))?;
                    own = Self::of_schema(schema, format.name("schema"))?;
                }
                _ => {
                    let known = "there are text, json_object and json_schema";
                    return Err(format.error("type", format!("is missing or unknown; {known}")));
                }
            }
            format.end()?;
        }
        text.end()?;
        Ok((own, echoed))
    }

    /// Takes llama.cpp's `json_schema` and `grammar`, of which the second is Lark's syntax behind a line `%llguidance {}`.
    ///
    /// # Errors
    /// If there are both, or the grammar is GBNF.
    pub fn llama(fields: &mut Fields) -> Result<Self> {
        let schema = fields.value("json_schema");
        let grammar = fields.string("grammar")?.filter(|grammar| !grammar.is_empty());
        match (schema, grammar) {
            (None, None) => Ok(Self::default()),
            (Some(schema), None) => Self::of_schema(schema, fields.name("json_schema")),
            (None, Some(grammar)) if grammar.trim_start().starts_with("%llguidance") => {
                Ok(Self::new(Constraint::lark(grammar), fields.name("grammar")))
            }
            (None, Some(_)) => {
                let problem = "is GBNF, which is not implemented; give a grammar in Lark's syntax that begins with `%llguidance {}`";
                Err(fields.error("grammar", problem).with_code("unsupported_parameter"))
            }
            (Some(_), Some(_)) => Err(fields.error("grammar", "is for texts without json_schema; give one of them")),
        }
    }

    fn of_schema(schema: Value, field: String) -> Result<Self> {
        match schema {
            Value::Object(_) | Value::Bool(_) => Ok(Self::new(Constraint::json_schema(schema.to_string()), field)),
            other => Err(ApiError::field(field, format!("is {}, must be an object", kind(&other)))),
        }
    }

    /// Compiles it, which takes up to seconds, not on the threads of connections. The engine keeps what was compiled.
    ///
    /// # Errors
    /// 400 with the place in the schema, or 429 if all places of requests are taken.
    pub async fn compile(self, app: &Arc<App>) -> Result<()> {
        let Some(constraint) = self.constraint else { return Ok(()) };
        let (parts, mut field) = (self.parts, self.field);
        let compiled = encode(app, app.admit(1)?, &field, move |app| app.engine.compile(&constraint)).await;
        let Err(mut error) = compiled else { return Ok(()) };
        for (part, of_part) in parts {
            if let Err(in_part) = encode(app, app.admit(1)?, &of_part, move |app| app.engine.compile(&part)).await {
                (error, field) = (in_part, of_part);
                break;
            }
        }
        Err(match error.param.as_deref() {
            Some("constraint") => {
                let problem = error.message.strip_prefix("constraint: ").unwrap_or(&error.message);
                ApiError::field(field, problem)
            }
            _ => error,
        })
    }
}
