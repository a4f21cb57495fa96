//! Structured output: the fields that request it, and their constraints.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use foretoken::Constraint;
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use crate::api_error::ApiError;
use crate::app::App;
use crate::fields::{Fields, kind};
use crate::job::Ticket;
use crate::tools::{CallFormat, Located};

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
        let Some(mut format) = fields.object("response_format")? else { return Ok(Self::default()) };
        let own = match format.string("type")?.as_deref() {
            Some("text") => Self::default(),
            // llama.cpp's format has a schema as well.
            Some("json_object") => match format.value("schema") {
                None => Self::Constraint(Constraint::json_object(), format.name("type")),
                Some(schema) => Self::of_schema(schema, format.name("schema"))?,
            },
            Some("json_schema") => {
                let missing = |format: &Fields| format.error("json_schema", "is required");
                let mut named = format.object("json_schema")?.ok_or_else(|| missing(&format))?;
                named.ignore(&["name", "description"]);
                named.flag("strict")?;
                let schema = named.value("schema").ok_or_else(|| named.error("schema", "is required"))?;
                let own = Self::of_schema(schema, named.name("schema"))?;
                named.end()?;
                own
            }
            Some(_) => return Err(format.error("type", "must be one of text, json_object, json_schema")),
            None => return Err(format.error("type", "is required: text, json_object or json_schema")),
        };
        format.end()?;
        Ok(own)
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
        let mut own = Self::default();
        if let Some(mut format) = text.object("format")? {
            match format.string("type")?.as_deref() {
                Some("text") => {}
                Some("json_object") => own = Self::Constraint(Constraint::json_object(), format.name("type")),
                Some("json_schema") => {
                    format.ignore(&["name", "description"]);
                    format.flag("strict")?;
                    let schema = format.value("schema").ok_or_else(|| format.error("schema", "is required"))?;
                    own = Self::of_schema(schema, format.name("schema"))?;
                }
                _ => return Err(format.error("type", "must be one of text, json_object, json_schema")),
            }
            format.end()?;
        }
        text.end()?;
        Ok((own, echoed))
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

    /// The constraint, compiled: this takes up to seconds, and is not done on the threads of connections. The engine caches what
    /// was compiled.
    ///
    /// # Errors
    /// 400 with the place in the schema, or 429 if the queue is full.
    pub async fn compile(self, app: &Arc<App>) -> Result<Option<Constraint>> {
        let located = match self {
            Self::Text => return Ok(None),
            Self::Constraint(constraint, field) => Located { constraint, field, parts: Vec::new(), widened: None },
            Self::Calls(calls) => {
                let Some(located) = on_compiler(app, move |app| calls.constraint(&app.engine)).await?? else {
                    return Ok(None);
                };
                located
            }
        };
        let Located { constraint, field, parts, widened } = located;
        let Err(error) = compile(app, &constraint, &field).await else { return Ok(Some(constraint)) };
        // Only what is wrong with the schemas can be mended by wider ones.
        if let Some(widened) = widened.filter(|_| error.status == StatusCode::BAD_REQUEST)
            && let Ok(widened) = on_compiler(app, move |app| widened(&app.engine)).await?
            && compile(app, &widened, &field).await.is_ok()
        {
            return Ok(Some(widened));
        }
        for (part, of_part) in parts {
            compile(app, &part, &of_part).await?;
        }
        Err(error)
    }
}

/// Threads that compile.
const MAX_THREADS: usize = 2;
/// Maximum number of requests that compile or wait for that.
const MAX_COMPILING: usize = 16;
/// Bytes of stack, of which only those that are used take memory: the grammar of a tool's schema is written by recursion.
const STACK: usize = 256 << 20;
/// Time within which a constraint must be compiled, including the wait.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(30);

/// The state of [`on_compiler`].
pub(crate) struct CompilerQueue {
    taken: Arc<AtomicUsize>,
    running: Arc<Semaphore>,
}

impl CompilerQueue {
    pub fn new() -> Self {
        Self { taken: Arc::default(), running: Arc::new(Semaphore::new(MAX_THREADS)) }
    }
}

/// Does work on a thread of its own: compiling cannot be interrupted, and must delay neither tokenizing nor the shutdown.
///
/// # Errors
/// 429 if too many requests wait, 503 if the work takes too long, 500 if it panics.
async fn on_compiler<T: Send + 'static>(app: &Arc<App>, work: impl FnOnce(&App) -> T + Send + 'static) -> Result<T> {
    let queue = &app.compilers;
    let ticket = Ticket::take(&queue.taken, MAX_COMPILING).ok_or_else(|| {
        let message = format!("{MAX_COMPILING} requests are compiling schemas or grammars; retry later");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, message).with_code("queue_full")
    })?;
    let (send, receive) = oneshot::channel();
    let done = async {
        let permit = queue.running.clone().acquire_owned().await;
        let app = app.clone();
        let thread = std::thread::Builder::new().name("constraint".into()).stack_size(STACK).spawn(move || {
            let result = work(&app);
            drop((app, permit, ticket));
            let _ = send.send(result);
        });
        thread.map_err(|_| ApiError::internal())?;
        receive.await.map_err(|_| ApiError::internal())
    };
    timeout(COMPILE_TIMEOUT, done).await.unwrap_or_else(|_| {
        let message = format!("the schema or grammar was not compiled within {} s", COMPILE_TIMEOUT.as_secs());
        Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("compile_timeout"))
    })
}

/// Compiles the constraint of the field `field`.
async fn compile(app: &Arc<App>, constraint: &Constraint, field: &str) -> Result<()> {
    let constraint = constraint.clone();
    let compiled = on_compiler(app, move |app| app.engine.compile(&constraint)).await?;
    compiled.map_err(|error| match error {
        foretoken::Error::Argument { name: "constraint", problem } => ApiError::field(field, problem),
        error => ApiError::of(&error, field),
    })
}
