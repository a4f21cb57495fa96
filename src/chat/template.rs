//! Chat templates: where a checkpoint has its own, and what it is rendered with.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use minijinja::{Environment, Value};

use super::json::Json;
use super::language::{environment, strftime};
use super::message::Message;
use crate::checkpoint::{Checkpoint, Fields, NotGguf};
use crate::{Error, Result};

/// Whether the model writes its reasoning first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thinking {
    /// It answers at once.
    #[default]
    Off,
    /// It writes its reasoning in a thinking channel before it answers.
    On,
}

/// Whether a prompt ends with the beginning of the model's answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// It does: the model answers.
    #[default]
    Add,
    /// It ends with the last message.
    Omit,
}

/// What a conversation is rendered with, besides its messages.
#[derive(Clone, Debug, Default)]
pub struct ChatOptions {
    /// The template's `enable_thinking`. Default: off.
    pub thinking: Thinking,
    /// JSON schemas of the tools that the model may call, objects as transformers takes them:
    /// `{"type": "function", "function": {"name": .., "description": .., "parameters": ..}}`. Default: none.
    pub tools: Vec<Json>,
    /// The template's `add_generation_prompt`. Default: added.
    pub generation_prompt: GenerationPrompt,
    /// Further variables that the template reads (transformers' keyword arguments). Default: none.
    pub variables: Vec<(String, Json)>,
    /// The time that the template's `strftime_now` writes, in UTC: for local time, add the zone's offset. Default: when it is
    /// rendered.
    pub now: Option<SystemTime>,
}

/// Variables that have options of their own.
const RESERVED: [&str; 5] = ["messages", "tools", "add_generation_prompt", "enable_thinking", "strftime_now"];

impl ChatOptions {
    /// # Errors
    /// If a tool is no object, or a variable has an option of its own.
    fn check(&self) -> Result<()> {
        if let Some(i) = self.tools.iter().position(|tool| !tool.is_object()) {
            return Err(Error::argument("tools", format!("tools[{i}] is no object; give the tool's JSON schema")));
        }
        match self.variables.iter().find(|(name, _)| RESERVED.contains(&name.as_str())) {
            Some((name, _)) => {
                Err(Error::argument("variables", format!("{name} has an option of its own; use that instead")))
            }
            None => Ok(()),
        }
    }
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
        let mut environment = environment().map_err(Error::template)?;
        environment.add_template_owned(NAME, without_generation_tags(&source)).map_err(Error::template)?;
        Ok(Self { environment, bos, eos })
    }

    /// The prompt of a conversation.
    ///
    /// # Errors
    /// If the template refuses the messages, executes more than 20 million instructions or writes more than 64 MiB, or an
    /// option cannot be used. What a template keeps in variables is not bounded: one that doubles a text again and again
    /// exhausts memory.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        options.check()?;
        let template = self.environment.get_template(NAME).map_err(Error::template)?;
        // None where there are no tools, as in transformers: templates ask `tools is not none`.
        let tools = options.tools.iter().map(|Json(tool)| tool.clone());
        let tools: Option<Value> = (!options.tools.is_empty()).then(|| tools.collect());
        let own = [
            ("messages", messages.iter().map(Message::value).collect()),
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
        String::from_utf8(prompt.0).map_err(|e| Error::Template(format!("writes no UTF-8: {e}")))
    }
}

/// Limit of a prompt in bytes.
const MAX_PROMPT: usize = 64 << 20;

/// What a template writes.
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

/// The source with the tags `{% generation %}` and `{% endgeneration %}`, by which transformers finds the model's tokens for
/// training, replaced by blocks that are always rendered.
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
