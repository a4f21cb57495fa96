//! Chat templates: where checkpoints have them, and rendering.

use std::borrow::Cow;
use std::io;
use std::path::Path;
use std::time::SystemTime;

use minijinja::{Environment, Value};

use super::channels;
use super::continued;
use super::json::Json;
use super::language::{environment, strftime};
use super::marks;
use super::message::{Content, Message, Part, Role};
use super::slices::as_calls;
use super::sources::{DEFAULT_TEMPLATE, TOOL_TEMPLATE, Texts, gguf_special_tokens, special_tokens, template_sources};
use crate::checkpoint::Checkpoint;
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Whether the model reasons before it answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Thinking {
    /// It answers directly.
    #[default]
    Off,
    /// It reasons in a thinking channel before it answers.
    On,
}

/// Whether a prompt ends with the start of the model's turn, or within it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// Yes: the model answers.
    #[default]
    Add,
    /// No: it ends with the last message.
    Omit,
    /// It ends with the text of the last message, which is the assistant's and is continued: transformers'
    /// `continue_final_message`.
    Continue,
}

/// What opens the reasoning of a reply (`<think>`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReasoningStart {
    /// The prompt if thinking is on, as in Qwen3.5's template.
    #[default]
    PromptIfThinking,
    /// The prompt.
    Prompt,
    /// The reply, if it reasons.
    Reply,
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
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// The template's `enable_thinking`. Default: off.
    pub thinking: Thinking,
    /// JSON schemas of the tools that the model may call, in transformers' format: `{"type": "function", "function":
    /// {"name": .., "description": .., "parameters": ..}}`. Default: none.
    pub tools: Vec<Json>,
    /// The template's `add_generation_prompt`, or the last message continued. Default: added.
    pub generation_prompt: GenerationPrompt,
    /// How control token names in messages and tools are tokenized. Default: as text.
    pub control_tokens: ControlTokens,
    /// What opens the reasoning of replies with `<think>`, for parsers and grammars of them, not for the template:
    /// see [`ChatTemplate::reasoning_start`]. Default: the prompt if thinking is on.
    pub reasoning_start: ReasoningStart,
    /// Additional template variables (transformers' keyword arguments). Default: none.
    pub variables: Vec<(String, Json)>,
    /// The time for the template's `strftime_now`, in UTC: for local time, add the zone's offset.
    /// Default: the time of rendering.
    pub now: Option<SystemTime>,
}

const BOS: &str = "bos_token";
const EOS: &str = "eos_token";

/// Variables with dedicated options.
const RESERVED: [&str; 5] = ["messages", "tools", "add_generation_prompt", "enable_thinking", "strftime_now"];

impl ChatOptions {
    /// Whether prompts end within the reasoning.
    pub(crate) fn prompt_opens_reasoning(&self) -> bool {
        match self.reasoning_start {
            ReasoningStart::PromptIfThinking => {
                self.thinking == Thinking::On && self.generation_prompt == GenerationPrompt::Add
            }
            ReasoningStart::Prompt => self.generation_prompt != GenerationPrompt::Continue,
            ReasoningStart::Reply => false,
        }
    }

    /// Checks the options, as [`ChatTemplate::render`] does.
    ///
    /// # Errors
    /// If a tool is not an object, or a variable has a dedicated option.
    pub fn check(&self) -> Result<()> {
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
    special_tokens: Texts,
}

impl ChatTemplate {
    /// The checkpoint's template; `None` if it has none. With tools, it is the one named `tool_use` if there is one.
    ///
    /// # Errors
    /// If a file is malformed or the template does not compile.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Self>> {
        let Some(gguf) = checkpoint.gguf() else { return Self::read(checkpoint.path()) };
        let text = |key| gguf.metadata(key).and_then(|source| source.as_str()).map(str::to_owned);
        let of_tools = text("tokenizer.chat_template.tool_use");
        Self::with(text("tokenizer.chat_template"), of_tools, || Ok(gguf_special_tokens(gguf)))
    }

    /// A template from its source, with the checkpoint's special tokens.
    ///
    /// # Errors
    /// If tokenizer_config.json or special_tokens_map.json is malformed or the template does not compile.
    pub fn with_tokens_of(checkpoint: &Checkpoint, source: String) -> Result<Self> {
        let tokens = match checkpoint.gguf() {
            Some(gguf) => gguf_special_tokens(gguf),
            None => special_tokens(checkpoint.path())?,
        };
        Self::compile(source, None, tokens)
    }

    /// Reads `chat_template.jinja`, or else the template in `tokenizer_config.json`, or else that
    /// in `chat_template.json` (used by older processors); `None` if there is none. With tools, it
    /// is the one named `tool_use` if there is one.
    ///
    /// # Errors
    /// If a file is malformed or the template does not compile.
    pub fn read(directory: impl AsRef<Path>) -> Result<Option<Self>> {
        let directory = directory.as_ref();
        let mut sources = template_sources(directory)?;
        let (default, of_tools) = (sources.remove(DEFAULT_TEMPLATE), sources.remove(TOOL_TEMPLATE));
        Self::with(default, of_tools, || special_tokens(directory))
    }

    /// The template, unless it is blank, and the one that is used with tools.
    fn with(
        source: Option<String>,
        of_tools: Option<String>,
        tokens: impl FnOnce() -> Result<Texts>,
    ) -> Result<Option<Self>> {
        // A blank one counts as none, as in llama.cpp.
        let [source, of_tools] = [source, of_tools].map(|source| source.filter(|source| !source.trim().is_empty()));
        source.map(|source| Self::compile(source, of_tools, tokens()?)).transpose()
    }

    /// A template from its source.
    ///
    /// # Errors
    /// If it does not compile.
    pub fn new(source: String, bos: String, eos: String) -> Result<Self> {
        Self::compile(source, None, Texts::from([(BOS.into(), bos), (EOS.into(), eos)]))
    }

    fn compile(source: String, of_tools: Option<String>, special_tokens: Texts) -> Result<Self> {
        let mut environment = environment().map_err(Error::template)?;
        // As Jinja reads sources.
        let read = |source: String| source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, of_tools) = (read(source), of_tools.map(read));
        for (name, source) in [(DEFAULT_TEMPLATE, Some(&source)), (TOOL_TEMPLATE, of_tools.as_ref())] {
            let source = source.map(|source| as_calls(&without_generation_tags(source)));
            source.map_or(Ok(()), |source| environment.add_template_owned(name, source)).map_err(Error::template)?;
        }
        Ok(Self { environment, source, special_tokens })
    }

    /// Its source; that of the default one if there is another one for tools.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Its `bos_token`; empty if there is none.
    pub fn bos_token(&self) -> &str {
        self.special_token(BOS)
    }

    /// Its `eos_token`; empty if there is none.
    pub fn eos_token(&self) -> &str {
        self.special_token(EOS)
    }

    fn special_token(&self, name: &str) -> &str {
        self.special_tokens.get(name).map_or("", String::as_str)
    }

    /// Renders a conversation to a prompt.
    ///
    /// # Errors
    /// If the template refuses the messages, does not write the text that is to be continued, executes more than 20
    /// million instructions or writes more than 64 MiB, or an option is invalid. Values built in template variables are
    /// not limited, because minijinja's operators cannot be checked: a template that repeatedly doubles a text exhausts
    /// memory, and one that prints a namespace that contains itself, or drops a list nested a million times, the stack.
    pub fn render(&self, messages: &[Message], options: &ChatOptions) -> Result<String> {
        let (messages, end) = tagged(messages, options)?;
        let (messages, tools) = values(&messages, options);
        continued::cut(self.render_values(messages, tools, options)?, end)
    }

    /// What opens the reasoning of replies, by the end of a short prompt: templates of fine-tunes may ignore
    /// `enable_thinking`, or always open it. None follows a text that is continued.
    pub fn reasoning_start(&self, options: &ChatOptions) -> ReasoningStart {
        if options.generation_prompt == GenerationPrompt::Continue {
            return ReasoningStart::Reply;
        }
        // One tool is enough for the template that is used with tools, none for another.
        let mut options = options.clone();
        options.tools.truncate(usize::from(self.environment.get_template(TOOL_TEMPLATE).is_ok()));
        match self.render(&[Message::user("a")], &options) {
            Ok(prompt) if prompt.trim_end().ends_with("<think>") => ReasoningStart::Prompt,
            Ok(_) => ReasoningStart::Reply,
            Err(_) => options.reasoning_start,
        }
    }

    /// Renders and tokenizes a conversation.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`], or if the prompt is empty or cannot be encoded.
    pub fn encode(&self, tokenizer: &Tokenizer, messages: &[Message], options: &ChatOptions) -> Result<Vec<u32>> {
        if options.control_tokens == ControlTokens::Anywhere {
            return tokenizer.encode(&self.render(messages, options)?);
        }
        // Templates would not find them once they are marked.
        let messages: Vec<_> = messages.iter().map(|message| without_channels(tokenizer, message)).collect();
        let (messages, end) = tagged(&messages, options)?;
        let (messages, tools) = values(&messages, options);
        let num_messages = messages.len();
        let values = [messages, tools].concat();
        let marked = marks::mark(&values, tokenizer.control_names())?;
        let (mut messages, mark) = marked.map_or((values, None), |(values, mark)| (values, Some(mark)));
        let tools = messages.split_off(num_messages);
        let prompt = continued::cut(self.render_values(messages, tools, options)?, end)?;
        mark.map_or_else(|| tokenizer.encode(&prompt), |mark| tokenizer.encode_marked(&prompt, mark))
    }

    fn render_values(&self, messages: Vec<Value>, tools: Vec<Value>, options: &ChatOptions) -> Result<String> {
        options.check()?;
        let of_tools = self.environment.get_template(TOOL_TEMPLATE).ok().filter(|_| !tools.is_empty());
        let template = of_tools.map_or_else(|| self.environment.get_template(DEFAULT_TEMPLATE), Ok);
        let template = template.map_err(Error::template)?;
        // None if there are no tools, as in transformers: templates test `tools is not none`.
        let tools = (!tools.is_empty()).then(|| Value::from(tools));
        // Empty if there is none, as in llama.cpp; others are undefined, as in transformers.
        let tokens = [BOS, EOS].map(|name| (name, Value::from(self.special_token(name)))).into_iter();
        let tokens =
            tokens.chain(self.special_tokens.iter().map(|(name, token)| (name.as_str(), token.as_str().into())));
        let own = [
            ("messages", Value::from(messages)),
            ("tools", Value::from(tools)),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(options.generation_prompt == GenerationPrompt::Add)),
            ("enable_thinking", Value::from(options.thinking == Thinking::On)),
            ("strftime_now", strftime(options.now.unwrap_or_else(SystemTime::now))),
        ];
        let variables = options.variables.iter().map(|(name, Json(value))| (name.as_str(), value.clone()));
        let mut prompt = Prompt(Vec::new());
        let context = Value::from_pairs(tokens.chain(own).chain(variables));
        template.render_captured_to(context, &mut prompt).map_err(Error::template)?;
        String::from_utf8(prompt.0).map_err(|e| Error::Template(format!("output is not UTF-8: {e}")))
    }
}

/// An assistant's message without the channels that its text spells; others unchanged.
fn without_channels(tokenizer: &Tokenizer, message: &Message) -> Message {
    let mut message = message.clone();
    let texts = match &mut message.content {
        _ if message.role != Role::Assistant => Vec::new(),
        Content::Text(text) => vec![text],
        Content::Parts(parts) => parts.iter_mut().map(|Part::Text(text)| text).collect(),
    };
    for text in texts {
        if let Some(stripped) = channels::without_channels(tokenizer, text) {
            *text = stripped;
        }
    }
    message
}

/// The messages and the tools as seen by templates.
fn values(messages: &[Message], options: &ChatOptions) -> (Vec<Value>, Vec<Value>) {
    (messages.iter().map(Message::value).collect(), options.tools.iter().map(|Json(tool)| tool.clone()).collect())
}

/// The messages, the last one's end tagged if the options continue it.
fn tagged<'m>(
    messages: &'m [Message],
    options: &ChatOptions,
) -> Result<(Cow<'m, [Message]>, Option<continued::TextEnd>)> {
    if options.generation_prompt != GenerationPrompt::Continue {
        return Ok((messages.into(), None));
    }
    let (mut seen, tools) = values(messages, options);
    seen.extend(tools);
    seen.extend(options.variables.iter().map(|(_, Json(value))| value.clone()));
    let (messages, end) = continued::tagged(messages, &seen)?;
    Ok((messages.into(), Some(end)))
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

/// The source with `{% generation %}` and `{% endgeneration %}`, which mark the model's tokens for training in
/// transformers, replaced by blocks that are always rendered.
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
