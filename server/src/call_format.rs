//! The constraint of replies that call tools.

use foretoken::chat::{CallChoice, ChatOptions, Json};
use foretoken::{Constraint, Engine};

use crate::api_error::{ApiError, Result};

/// A tool of a request, apart from what its template is given.
#[derive(Debug)]
pub(crate) struct DeclaredTool {
    pub name: String,
    /// The field of its schema.
    pub schema_field: String,
    /// Whether its arguments must match that.
    pub is_strict: bool,
}

/// The names of the strict tools.
pub(crate) fn strict_of(tools: &[DeclaredTool]) -> Vec<String> {
    tools.iter().filter(|tool| tool.is_strict).map(|tool| tool.name.clone()).collect()
}

/// The calls that a reply must have, or whose arguments must follow their schemas; or a format that
/// reasoning may precede.
#[derive(Debug)]
pub(crate) struct CallFormat {
    pub options: ChatOptions,
    /// Without it, there are no calls.
    pub choice: Option<CallChoice>,
    /// Of the tools in `options`.
    pub declared: Vec<DeclaredTool>,
    /// What a reply without calls must match, and its field.
    pub format: Option<(Constraint, String)>,
}

/// A constraint with its field.
pub(crate) struct Located {
    pub constraint: Constraint,
    pub field: String,
    /// Its parts with their fields, by which an error is located.
    pub parts: Vec<(Constraint, String)>,
    /// What replaces it if it cannot be compiled.
    pub widened: Option<Widened>,
}

/// Makes a constraint, which takes as long as compiling one.
pub(crate) type Widened = Box<dyn FnOnce(&Engine) -> foretoken::Result<Constraint> + Send>;

/// The field of constraints of calls, for errors.
const FIELD_OF_CALLS: &str = "tool_choice";

impl CallFormat {
    /// The field of the format if there is one, else that of calls, for errors.
    pub fn field(&self) -> &str {
        self.format.as_ref().map_or(FIELD_OF_CALLS, |(_, field)| field.as_str())
    }

    /// The constraint. Takes time that grows with the schemas. `None` if the checkpoint cannot call
    /// tools, and need not.
    ///
    /// # Errors
    /// If the checkpoint cannot call tools, or a tool cannot be called.
    pub fn constraint(self, engine: &Engine) -> Result<Option<Located>> {
        let field = self.field().to_owned();
        let Self { options, choice, declared, format } = self;
        let tokenizer = engine.tokenizer().map_err(|error| ApiError::of(&error, "tools"))?;
        let Some(choice) = choice else { return after_reasoning(engine, &options, format) };
        let constraint = match Constraint::tool_calls(tokenizer, &options, &choice) {
            Ok(constraint) => constraint,
            Err(foretoken::Error::Unsupported { .. })
                if matches!(choice, CallChoice::Strict(_) | CallChoice::OrJson(_)) =>
            {
                return after_reasoning(engine, &options, format);
            }
            Err(error) => return Err(ApiError::of_constraint(&error, &field)),
        };
        let is_used = |tool: &DeclaredTool| match &choice {
            CallChoice::Strict(_) => tool.is_strict,
            CallChoice::Named(name) => tool.name == *name,
            _ => true,
        };
        let schema = |(json, tool): (&Json, &DeclaredTool)| {
            let schema = json.field("function")?.field("parameters")?.to_string();
            is_used(tool).then(|| (Constraint::json_schema(schema), tool.schema_field.clone()))
        };
        let mut parts: Vec<_> = options.tools.iter().zip(&declared).filter_map(schema).collect();
        parts.extend(format);
        let widens = declared.iter().any(|tool| is_used(tool) && !tool.is_strict);
        let strict = strict_of(&declared);
        let widened: Widened =
            Box::new(move |engine| Constraint::tool_calls_widened(engine.tokenizer()?, &options, &choice, &strict));
        Ok(Some(Located { constraint, field: FIELD_OF_CALLS.into(), parts, widened: widens.then_some(widened) }))
    }
}

/// The format, after reasoning if it is enabled.
fn after_reasoning(
    engine: &Engine,
    options: &ChatOptions,
    format: Option<(Constraint, String)>,
) -> Result<Option<Located>> {
    let Some((format, field)) = format else { return Ok(None) };
    if format.schema().is_none() {
        // Embedded, a grammar that no text satisfies is noticed only where it begins.
        engine.compile(&format).map_err(|error| ApiError::of_constraint(&error, &field))?;
    }
    let tokenizer = engine.tokenizer().map_err(|error| ApiError::of(&error, &field))?;
    let constraint =
        format.after_reasoning(tokenizer, options).map_err(|error| ApiError::of_constraint(&error, &field))?;
    Ok(Some(Located { constraint, field: field.clone(), parts: vec![(format, field)], widened: None }))
}
