//! The options of a prompt, and the tokens that they make.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::Result;
use clap::Args;
use foretoken::Engine;
use foretoken::chat::{ChatOptions, Json, Message, ReplyParser, Thinking};

use crate::input;

/// The prompt.
#[derive(Args)]
pub struct Prompt {
    /// The text to continue (with --chat: the user's message).
    #[arg(default_value = "/// Returns the largest element of the slice, or `None` if it is empty.\n")]
    prompt: String,
    /// The prompt, as an option.
    #[arg(short = 'p', long = "prompt", value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "prompt")]
    text: Option<String>,
    /// File with the prompt, without the newline at its end; - is stdin.
    #[arg(short, long, value_name = "FILE", conflicts_with_all = ["prompt", "text"])]
    file: Option<PathBuf>,
    /// Token ids instead of a prompt.
    #[arg(long, value_name = "2,500,..", value_delimiter = ',', conflicts_with_all = ["prompt", "text", "file", "chat"])]
    prompt_ids: Option<Vec<u32>>,
    /// Apply the checkpoint's chat template to the prompt. What no option sets of temperature, top-k, top-p, min-p,
    /// typical, XTC and the repeat penalty has the checkpoint's defaults then.
    #[arg(long)]
    pub chat: bool,
    /// The system message, with --chat.
    #[arg(long, requires = "chat")]
    system: Option<String>,
    /// Enable thinking, with --chat.
    #[arg(long, requires = "chat")]
    think: bool,
    /// JSON list of messages instead of the prompt, with --chat, in the format of OpenAI's chat completions; - is
    /// stdin.
    #[arg(long, value_name = "FILE", requires = "chat", conflicts_with_all = ["prompt", "text", "file"])]
    messages: Option<PathBuf>,
    /// JSON list of tool schemas, with --chat.
    #[arg(long, value_name = "FILE", requires = "chat")]
    tools: Option<PathBuf>,
    /// Additional variables for the chat template: a JSON object; {"enable_thinking": true} is --think.
    #[arg(long, value_name = "JSON", requires = "chat")]
    chat_template_kwargs: Option<TemplateVariables>,
}

/// The value of `--chat-template-kwargs`.
#[derive(Clone, Debug, Default)]
pub struct TemplateVariables {
    /// `enable_thinking`, if it is there.
    pub thinking: Option<Thinking>,
    /// The other variables.
    pub others: Vec<(String, Json)>,
}

/// Variables that are not set by name: they have options of their own.
pub const RESERVED: [&str; 4] = ["messages", "tools", "add_generation_prompt", "strftime_now"];

impl FromStr for TemplateVariables {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fields = Json::parse(text).and_then(Json::into_fields).map_err(|error| match error {
            foretoken::Error::Argument { problem, .. } => problem,
            other => other.to_string(),
        })?;
        let mut own = Self::default();
        for (name, value) in fields {
            match (name.as_str(), value.to_string().as_str()) {
                ("enable_thinking", "true") => own.thinking = Some(Thinking::On),
                ("enable_thinking", "false") => own.thinking = Some(Thinking::Off),
                ("enable_thinking", _) => return Err("enable_thinking must be true or false".into()),
                (name, _) if RESERVED.contains(&name) => return Err(format!("{name} cannot be set here; remove it")),
                _ => own.others.push((name, value)),
            }
        }
        Ok(own)
    }
}

/// What `read` makes of the JSON `text` of a file; an error names the file.
fn of_json<T>(path: &Path, text: &str, read: impl FnOnce(Json) -> foretoken::Result<T>) -> foretoken::Result<T> {
    Json::parse(text).and_then(read).map_err(|error| match error {
        foretoken::Error::Argument { name, problem } => {
            foretoken::Error::File { path: path.to_owned(), problem: format!("{name}: {problem}") }
        }
        other => other,
    })
}

/// Maximum bytes of a prompt's file.
const MAX_FILE: u64 = 64 << 20;

/// The text of a file, or of stdin if it is `-`, without the newline at its end.
fn text_of(path: &Path) -> foretoken::Result<String> {
    let text = input::text_within(path, MAX_FILE)?;
    let whole = text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text));
    Ok(whole.unwrap_or(&text).to_owned())
}

impl Prompt {
    /// The text; with `--prompt-ids` and `--messages` it is not used.
    ///
    /// # Errors
    /// If its file cannot be read, is too long, or is not UTF-8.
    pub fn text(&self) -> Result<String> {
        match (&self.text, &self.file) {
            (Some(text), _) => Ok(text.clone()),
            (None, Some(path)) => Ok(text_of(path)?),
            (None, None) => Ok(self.prompt.clone()),
        }
    }

    /// The token ids of `text`, or of what replaces it.
    ///
    /// # Errors
    /// If the checkpoint has no tokenizer or, with --chat, no template; the text is certainly longer than `context`
    /// tokens; or a file is not such JSON.
    pub fn ids(&self, engine: &Engine, text: &str, context: usize) -> foretoken::Result<Vec<u32>> {
        if let Some(ids) = &self.prompt_ids {
            return Ok(ids.clone());
        }
        let tokenizer = engine.tokenizer()?;
        // Megabytes would be tokenized for seconds.
        let least = text.len().div_ceil(tokenizer.longest_token().max(1));
        if self.messages.is_none() && least > context {
            return Err(foretoken::Error::Context { needed: least, limit: context });
        }
        if !self.chat {
            return tokenizer.encode(text);
        }
        let system = self.system.iter().map(Message::system);
        let messages: Vec<Message> = match &self.messages {
            Some(path) => system.chain(of_json(path, &input::text(path)?, |json| Message::list(&json))?).collect(),
            None => system.chain([Message::user(text)]).collect(),
        };
        engine.encode_chat(&messages, &self.chat_options()?)
    }

    /// The parser of the reply if it is a chat's.
    ///
    /// # Errors
    /// If the checkpoint has no tokenizer, or a chat option is malformed.
    pub fn reply_parser(&self, engine: &Engine) -> Result<Option<ReplyParser>> {
        if !self.chat {
            return Ok(None);
        }
        let options = self.chat_options()?;
        let reasoning_start = engine.chat_template()?.reasoning_start(&options);
        Ok(Some(ReplyParser::new(engine.tokenizer()?, &ChatOptions { reasoning_start, ..options })))
    }

    /// The options for rendering the chat.
    ///
    /// # Errors
    /// If a file is not such JSON, or two options contradict each other.
    fn chat_options(&self) -> foretoken::Result<ChatOptions> {
        let TemplateVariables { thinking, others } = self.chat_template_kwargs.clone().unwrap_or_default();
        if self.think && thinking == Some(Thinking::Off) {
            let problem = "contradicts enable_thinking in --chat-template-kwargs; omit one of them".into();
            return Err(foretoken::Error::Argument { name: "--think", problem });
        }
        let tools = self.tools.as_deref().map(|path| of_json(path, &input::file(path)?, Json::into_list));
        Ok(ChatOptions {
            thinking: if self.think { Thinking::On } else { thinking.unwrap_or_default() },
            tools: tools.transpose()?.unwrap_or_default(),
            variables: others,
            ..ChatOptions::default()
        })
    }
}
