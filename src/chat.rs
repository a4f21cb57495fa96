//! The checkpoint's own chat template.

use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Rest, Serde, ValueOrKwargs};
use minijinja::{Environment, Error as TemplateError, ErrorKind, State, Value, context, filters};
use serde::Serialize;

use crate::checkpoint::{Checkpoint, Fields, NotGguf};
use crate::{Error, Result};

/// The role of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
}

/// One message.
#[derive(Clone, Debug, Serialize)]
pub struct Message {
    /// Its role.
    pub role: Role,
    /// Its text.
    pub content: String,
}

/// Whether the model writes its reasoning first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// It answers at once.
    #[default]
    Off,
    /// It writes its reasoning in a thinking channel before it answers.
    On,
}

/// A chat template, as published with the checkpoint.
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The checkpoint's; `None` if it has none.
    ///
    /// # Errors
    /// If a file is malformed or the template does not compile.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        match checkpoint.gguf_text("tokenizer.chat_template") {
            Err(NotGguf) => Self::read(checkpoint.path()),
            Ok(source) => source.map(|source| Self::new(source.to_owned(), "<bos>".into(), "<eos>".into())).transpose(),
        }
    }

    /// Reads `chat_template.jinja`, or else the template in `tokenizer_config.json`; `None` if there is neither.
    ///
    /// # Errors
    /// If a file is malformed or the template does not compile.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let Some(source) = template_source(directory)? else { return Ok(None) };
        let config = tokenizer_config(directory)?;
        let special = |name: &str, default: &str| {
            let value = config.as_ref().and_then(|config| config.get(name))?;
            // Older files give an object with the token's flags.
            Some(value.as_str().or_else(|| value.get("content")?.as_str()).unwrap_or(default).to_owned())
        };
        let bos = special("bos_token", "<bos>").unwrap_or_else(|| "<bos>".into());
        let eos = special("eos_token", "<eos>").unwrap_or_else(|| "<eos>".into());
        Self::new(source, bos, eos).map(Some)
    }

    /// A template from its source.
    ///
    /// # Errors
    /// If it does not compile.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(Error::template)?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(|state, value, method, arguments| {
            if method == "format" {
                check_widths(value)?;
            }
            minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)
        });
        for (name, filter) in [
            ("batch", Value::from_function(filters::batch)),
            ("format", Value::from_function(filters::format)),
            ("indent", Value::from_function(filters::indent)),
            ("slice", Value::from_function(filters::slice)),
            ("tojson", Value::from_function(filters::tojson)),
        ] {
            environment.add_filter(name, move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| {
                let arguments = arguments.into_values();
                let (value, counts) = arguments.split_first().ok_or(ErrorKind::MissingArgument)?;
                match name {
                    "format" => check_widths(value)?,
                    _ => counts.iter().try_for_each(check_count)?,
                }
                filter.call(state, &arguments)
            });
        }
        environment.add_function("raise_exception", |message: String| -> Result<Value, TemplateError> {
            Err(TemplateError::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source).map_err(Error::template)?;
        Ok(Self { environment, bos, eos })
    }

    /// The prompt of a conversation, ready with the generation prompt.
    ///
    /// # Errors
    /// If the template refuses the messages.
    pub fn render(&self, messages: &[Message], thinking: Thinking) -> Result<String> {
        let template = self.environment.get_template(NAME).map_err(Error::template)?;
        let rendered = template.render(context! {
            messages => Serde(messages),
            add_generation_prompt => true,
            enable_thinking => thinking == Thinking::On,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        });
        rendered.map_err(Error::template)
    }
}

/// Limit of indentation, batch size, field width and slice count in templates: minijinja allocates them unchecked and
/// panics or aborts if memory is short.
const MAX_COUNT: usize = 1 << 16;

fn too_large() -> TemplateError {
    TemplateError::new(ErrorKind::InvalidOperation, format!("a count or width is larger than {MAX_COUNT}"))
}

/// Checks the arguments of a filter that takes a count: `count` alone, or by keyword.
fn check_count(argument: &Value) -> Result<(), TemplateError> {
    if argument.is_kwargs() {
        return argument.try_iter()?.try_for_each(|key| check_count(&argument.get_item(&key)?));
    }
    match argument.is_integer() && argument.as_usize().is_none_or(|count| count > MAX_COUNT) {
        true => Err(too_large()),
        false => Ok(()),
    }
}

/// Checks the widths and precisions in a format string: no number in it may be too large.
fn check_widths(format: &Value) -> Result<(), TemplateError> {
    let numbers = format.as_str().unwrap_or_default().split(|c: char| !c.is_ascii_digit());
    let mut numbers = numbers.filter(|digits| !digits.is_empty());
    match numbers.any(|digits| digits.parse::<usize>().map_or(true, |number| number > MAX_COUNT)) {
        true => Err(too_large()),
        false => Ok(()),
    }
}

/// The text of `chat_template.jinja`, or else of the template in `tokenizer_config.json`; `None` if there is neither.
pub(crate) fn template_source(directory: &Path) -> Result<Option<String>> {
    let file = directory.join("chat_template.jinja");
    match file.exists() {
        true => std::fs::read_to_string(&file).map(Some).map_err(Error::io(&file)),
        false => Ok(tokenizer_config(directory)?.as_ref().and_then(template_in)),
    }
}

fn tokenizer_config(directory: &Path) -> Result<Option<Fields>> {
    let path = directory.join("tokenizer_config.json");
    if path.exists() { Fields::read(path).map(Some) } else { Ok(None) }
}

/// The template itself, or the one named `default` in a list of several.
fn template_in(config: &Fields) -> Option<String> {
    match config.get("chat_template")? {
        serde_json::Value::String(source) => Some(source.clone()),
        serde_json::Value::Array(several) => several
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}
