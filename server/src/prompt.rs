//! Prompts: the fields that have them, and their tokens.

use foretoken::chat::{ChatOptions, ChatTemplate, GenerationPrompt, Message, Role};
use foretoken::tokenizer::Tokenizer;
use serde_json::Value;

use crate::api_error::Result;
use crate::fields::Fields;
use crate::served::Served;

/// A conversation, and the options that it is rendered with.
pub(crate) struct Chat {
    pub messages: Vec<Message>,
    pub options: ChatOptions,
    /// Bytes of the request's body: its texts have no more.
    pub body_bytes: usize,
}

impl Chat {
    /// With what opens the reasoning of replies. System messages after the first message are the user's if the
    /// template does not take them: coding agents send such messages between turns.
    pub fn new(served: &Served, mut messages: Vec<Message>, mut options: ChatOptions, body_bytes: usize) -> Self {
        if let Ok(template) = served.template() {
            options.reasoning_start = template.reasoning_start(&options);
            let mut late = messages.iter_mut().skip(1).filter(|message| message.role == Role::System).peekable();
            if late.peek().is_some() && !takes_late_system(template, &options) {
                late.for_each(|message| message.role = Role::User);
            }
        }
        Self { messages, options, body_bytes }
    }
}

/// Whether the template writes a system message that is not the first: Qwen3.5's refuses it.
fn takes_late_system(template: &ChatTemplate, options: &ChatOptions) -> bool {
    const TEXT: &str = "a late system message";
    let messages = [Message::user("a"), Message::assistant("b"), Message::system(TEXT), Message::user("c")];
    let mut options = ChatOptions { generation_prompt: GenerationPrompt::default(), ..options.clone() };
    // One, as there may be a template for tools.
    options.tools.truncate(1);
    template.render(&messages, &options).is_ok_and(|prompt| prompt.contains(TEXT))
}

/// A prompt.
pub(crate) enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Chat(Chat),
}

/// Maximum number of prompts in one request.
const MAX_PROMPTS: usize = 64;

/// One or more prompts of the field `name`: a prompt, or an array of prompts.
pub(crate) fn prompts(fields: &mut Fields, name: &str) -> Result<Vec<Prompt>> {
    let list = match fields.value(name) {
        None => return Err(fields.error(name, "is required: a string or an array of token ids")),
        Some(Value::String(text)) => return Ok(vec![Prompt::Text(text)]),
        Some(Value::Array(list)) => list,
        Some(other) => return Err(fields.mismatch(name, &other, "a string or an array of token ids")),
    };
    match list.first() {
        None => return Err(fields.error(name, "is empty; at least one token is required")),
        Some(Value::Number(_)) => return Ok(vec![Prompt::Ids(fields.token_ids(name, &list)?)]),
        Some(_) if list.len() > MAX_PROMPTS => {
            let problem =
                format!("has {} prompts, at most {MAX_PROMPTS} are allowed; send several requests", list.len());
            return Err(fields.error(name, problem));
        }
        Some(_) => {}
    }
    let prompt = |(i, value): (usize, Value)| match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => fields.token_ids(&format!("{name}[{i}]"), &ids).map(Prompt::Ids),
        other => Err(fields.mismatch(&format!("{name}[{i}]"), &other, "a string or token ids")),
    };
    list.into_iter().enumerate().map(prompt).collect()
}

/// The tokens of a prompt that a sequence can begin with. Takes time that grows with the prompt.
///
/// # Errors
/// If there are none, one is outside the vocabulary, they do not fit the context, the checkpoint has no tokenizer or no
/// template, or the template refuses the messages.
pub(crate) fn tokens(served: &Served, prompt: Prompt) -> foretoken::Result<Vec<u32>> {
    let tokens = match prompt {
        Prompt::Ids(ids) => ids,
        Prompt::Text(text) => {
            check_length(served, text.len())?;
            served.engine.tokenizer()?.encode(&text)?
        }
        Prompt::Chat(chat) => {
            if check_length(served, chat.body_bytes).is_err() {
                // A template need not write all that the request has.
                check_length(served, served.template()?.render(&chat.messages, &chat.options)?.len())?;
            }
            chat_tokens(served, &chat)?
        }
    };
    let outside = |problem: String| Err(foretoken::Error::Argument { name: "prompt", problem });
    let (vocab, context) = (served.engine.target().num_readable_tokens(), served.context);
    match tokens.iter().find(|id| **id as usize >= vocab) {
        Some(id) => outside(format!("token id {id} is outside the vocabulary of {vocab}")),
        None if tokens.is_empty() => outside("is empty; pass at least one token".into()),
        None if tokens.len() > context => Err(foretoken::Error::Context { needed: tokens.len(), limit: context }),
        None => Ok(tokens),
    }
}

/// The tokens of a chat, however many. Takes time that grows with its text.
///
/// # Errors
/// If the checkpoint has no tokenizer or no template, or the template refuses the messages.
pub(crate) fn chat_tokens(served: &Served, chat: &Chat) -> foretoken::Result<Vec<u32>> {
    served.template()?.encode(served.engine.tokenizer()?, &chat.messages, &chat.options)
}

/// # Errors
/// If a text of `bytes` bytes is certainly longer than the context. Encoding megabytes would take seconds.
pub(crate) fn check_length(served: &Served, bytes: usize) -> foretoken::Result<()> {
    let longest = served.engine.tokenizer().map_or(usize::MAX, Tokenizer::longest_token);
    match bytes > served.context.saturating_mul(longest) {
        true => Err(foretoken::Error::Context { needed: bytes.div_ceil(longest), limit: served.context }),
        false => Ok(()),
    }
}
