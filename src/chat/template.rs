//! Chat templates: where checkpoints have them, and rendering.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use minijinja::{Environment, Value};

use super::json::Json;
use super::language::{environment, strftime};
use super::marks;
use super::message::Message;
use super::slices::as_calls;
use crate::checkpoint::refuse_placeholder;
use crate::checkpoint::{Checkpoint, Fields, NotGguf};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Whether the model reasons before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// It answers directly.
    #[default]
    Off,
    /// It reasons in a thinking channel before it answers.
    On,
}

/// Whether a prompt ends with the start of the model's turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// Yes: the model answers.
    #[default]
    Add,
    /// No: it ends with the last message.
    Omit,
}

/// How names of control tokens (`<turn|>`) in message texts are tokenized.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ControlTokens {
    /// As text: only the template writes control tokens, so that a user's text can neither end nor begin a turn.
    #[default]
    OfTemplate,
    /// As control tokens, as in transformers.
    Anywhere,
}

/// Options of rendering a conversation.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// The template's `enable_thinking`. Default: off.
    pub thinking: Thinking,
    /// JSON schemas of the tools that the model may call, in transformers' format: `{"type": "function", "function": {"name": ..,
    /// "description": .., "parameters": ..}}`. Default: none.
    pub tools: Vec<Json>,
    /// The template's `add_generation_prompt`. Default: added.
    pub generation_prompt: GenerationPrompt,
    /// How control token names in messages and tools are tokenized. Default: as text.
    pub control_tokens: ControlTokens,
    /// Additional template variables (transformers' keyword arguments). Default: none.
    pub variables: Vec<(String, Json)>,
    /// The time for the template's `strftime_now`, in UTC: for local time, add the zone's offset. Default: the time of rendering.
    pub now: Option<SystemTime>,
}

/// Variables with dedicated options.
const RESERVED: [&str; 5] = ["messages", "tools", "add_generation_prompt", "enable_thinking", "strftime_now"];

impl ChatOptions {
    /// # Errors
    /// If a tool is not an object, or a variable has a dedicated option.
    fn check(&self) -> Result<()> {
        if let Some(i) = self.tools.iter().position(|tool| !tool.is_object()) {
            return Err(Error::argument("tools", format!("tools[{i}] is not an object; use the tool's JSON schema")));
        }
        match self.variables.iter().find(|(name, _)| RESERVED.contains(&name.as_str())) {
            Some((name, _)) => {
                Err(Error::argument("variables", format!("{name} has a dedicated option; use that instead")))
            }
            None => Ok(()),
        }
    }
}

/// A chat template, as published with the checkpoint.
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

const NAME: &str = "chat_template";

impl ChatTemplate {
    /// The checkpoint's template; `None` if it has none.
    ///
    /// # Errors
    /// If a file is malformed or the template does not compile.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let source = match checkpoint.gguf_text("tokenizer.chat_template") {
            Err(NotGguf) => template_source(checkpoint.path())?,
            Ok(source) => source.map(str::to_owned),
        };
        let source = source.filter(|source| !is_blank(source));
        source.map(|source| Self::with_tokens_of(checkpoint, source)).transpose()
    }

    /// A template from its source, with the checkpoint's `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// If tokenizer_config.json is malformed or the template does not compile.
    pub fn with_tokens_of(checkpoint: &Checkpoint, source: String) -> Result<Self> {
        let token = |key| checkpoint.gguf_token(key).map(|token| token.unwrap_or_default().to_owned());
        match (token("tokenizer.ggml.bos_token_id"), token("tokenizer.ggml.eos_token_id")) {
            (Ok(bos), Ok(eos)) => Self::new(source, bos, eos),
            _ => Self::with_tokens_in(checkpoint.path(), source),
        }
    }

    /// Reads `chat_template.jinja`, or else the template in `tokenizer_config.json`, or else that in `chat_template.json` (used
    /// by older processors); `None` if there is none.
    ///
    /// # Errors
    /// If a file is malformed or the template does not compile.
    pub fn read(directory: &Path) -> Result<Option<Self>> {
        let source = template_source(directory)?.filter(|source| !is_blank(source));
        source.map(|source| Self::with_tokens_in(directory, source)).transpose()
    }

    /// With the tokens that tokenizer_config.json names.
    fn with_tokens_in(directory: &Path, source: String) -> Result<Self> {
        let config = tokenizer_config(directory)?;
        let token = |name: &str| {
            let value = config.as_ref().and_then(|config| config.get(name))?;
            // Older files have an object with the token's flags.
            value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
        };
        Self::new(source, token("bos_token").unwrap_or_default(), token("eos_token").unwrap_or_default())
    }

    /// A template from its source.
    ///
    /// # Errors
    /// If it does not compile.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self> {
        let mut environment = environment().map_err(Error::template)?;
        // As Jinja reads sources.
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        environment.add_template_owned(NAME, as_calls(&without_generation_tags(&source))).map_err(Error::template)?;
        Ok(Self { environment, source, bos, eos })
    }

    /// Its source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Its `bos_token`; empty if there is none.
    pub fn bos_token(&self) -> &str {
        &self.bos
    }

    /// Its `eos_token`; empty if there is none.
    pub fn eos_token(&self) -> &str {
        &self.eos
    }

    /// Renders a conversation to a prompt.
    ///
    /// # Errors
    /// If the template rejects the messages, executes more than 20 million instructions or writes more than 64 MiB, or an option
    /// is invalid. Strings built in template variables are not limited, because minijinja's operators cannot be checked: a
    /// template that repeatedly doubles a text exhausts memory.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        let (messages, tools) = values(messages, options);
        self.render_values(messages, tools, options)
    }

    /// Renders and tokenizes a conversation.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], or if the prompt is empty or cannot be encoded.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        let (messages, tools) = values(messages, options);
        let num_messages = messages.len();
        let values = [messages, tools].concat();
        let marked = match options.control_tokens {
            ControlTokens::OfTemplate => marks::mark(&values, tokenizer.control_names())?,
            ControlTokens::Anywhere => None,
        };
        let (mut messages, mark) = marked.map_or((values, None), |(values, mark)| (values, Some(mark)));
        let tools = messages.split_off(num_messages);
        let prompt = self.render_values(messages, tools, options)?;
        mark.map_or_else(|| tokenizer.encode(&prompt), |mark| tokenizer.encode_marked(&prompt, mark))
    }

    fn render_values(&self, messages: Vec<Value>, tools: Vec<Value>, options: &ChatOptions) -> Result<String> {
        options.check()?;
        let template = self.environment.get_template(NAME).map_err(Error::template)?;
        // None if there are no tools, as in transformers: templates test `tools is not none`.
        let tools = (!tools.is_empty()).then(|| Value::from(tools));
        let own = [
            ("messages", Value::from(messages)),
            ("tools", Value::from(tools)),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(options.generation_prompt == GenerationPrompt::Add)),
            ("enable_thinking", Value::from(options.thinking == Thinking::On)),
            ("bos_token", Value::from(self.bos.as_str())),
            ("eos_token", Value::from(self.eos.as_str())),
            ("strftime_now", strftime(options.now.unwrap_or_else(SystemTime::now))),
        ];
        let variables = options.variables.iter().map(|(name, Json(value))| (name.as_str(), value.clone()));
        let mut prompt = Prompt(Vec::new());
        let context = Value::from_pairs(own.into_iter().chain(variables));
        template.render_captured_to(context, &mut prompt).map_err(Error::template)?;
        String::from_utf8(prompt.0).map_err(|e| Error::Template(format!("output is not UTF-8: {e}")))
    }
}

/// Whether a template writes nothing, so that it counts as none, as in llama.cpp.
fn is_blank(source: &str) -> bool {
    source.trim().is_empty()
}

/// The messages and the tools as seen by templates.
fn values(messages: &[Message], options: &ChatOptions) -> (Vec<Value>, Vec<Value>) {
    (messages.iter().map(Message::value).collect(), options.tools.iter().map(|Json(tool)| tool.clone()).collect())
}

/// Maximum bytes of a prompt.
const MAX_PROMPT: usize = 64 << 20;

/// The rendered text.
struct Prompt(Vec<u8>);

impl io::Write for Prompt {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.0.len() + text.len() > MAX_PROMPT {
            return Err(io::Error::other(format!("the prompt is larger than {} MiB", MAX_PROMPT >> 20)));
        }
        self.0.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The source with `{% generation %}` and `{% endgeneration %}`, which mark the model's tokens for training in transformers,
/// replaced by blocks that are always rendered.
fn without_generation_tags(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len()), source);
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        match tag.trim_matches(['{', '}', '%', '-', '+']).trim() {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out + rest
}

/// The text of the template, from the files of [`ChatTemplate::read`].
pub(crate) fn template_source(directory: &Path) -> Result<Option<String>> {
    let file = directory.join("chat_template.jinja");
    match file.exists() {
        true => {
            let source = std::fs::read_to_string(&file).map_err(Error::io(&file))?;
            refuse_placeholder(&file, source.as_bytes()).map(|()| Some(source))
        }
        false => {
            let of_tokenizer = tokenizer_config(directory)?.as_ref().and_then(template_in);
            Ok(of_tokenizer.or(fields_of(directory, "chat_template.json")?.as_ref().and_then(template_in)))
        }
    }
}

fn tokenizer_config(directory: &Path) -> Result<Option<Fields>> {
    fields_of(directory, "tokenizer_config.json")
}

fn fields_of(directory: &Path, file: &str) -> Result<Option<Fields>> {
    let path = directory.join(file);
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
