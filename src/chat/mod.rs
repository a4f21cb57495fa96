//! The checkpoint's chat template: renders conversations, tools and options to a prompt. [`ReplyParser`] splits the
//! model's output into text, reasoning and tool calls.
//!
//! The reference is transformers' `apply_chat_template`: the same template and messages give the same string
//! (`tests/chat_templates.rs`).
//!
//! ```no_run
//! use foretoken::chat::{ChatOptions, Json, Message, ReplyParser, ReplyPart, ToolCall};
//! use foretoken::{Engine, EngineOptions, GenerateOptions, SessionOptions};
//!
//! # fn main() -> foretoken::Result<()> {
//! let engine = Engine::load(&EngineOptions::new("gemma-4-E2B-it").with_assistant("gemma-4-E2B-it-assistant"))?;
//! let tool = r#"{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}"#;
//! let chat = ChatOptions { tools: vec![Json::parse(tool)?], ..ChatOptions::default() };
//! let mut messages = vec![Message::user("What time is it?")];
//! let prompt = engine.encode_chat(&messages, &chat)?;
//!
//! let mut parser = ReplyParser::new(engine.tokenizer()?, &chat);
//! let mut parts = Vec::new();
//! let mut session = engine.session(&SessionOptions::default())?;
//! for piece in session.generate(&prompt, &GenerateOptions::default())? {
//!     parts.extend(parser.push(&piece?));
//! }
//! parts.extend(parser.finish());
//! let (mut text, mut tool_calls) = (String::new(), Vec::new());
//! for part in parts {
//!     match part {
//!         ReplyPart::Text(more) => text += &more,
//!         ReplyPart::ToolCall(call) => tool_calls.push(ToolCall { id: Some("call_0".into()), ..call }),
//!         _ => {}
//!     }
//! }
//!
//! // Every prompt has the whole conversation, for a new session. A `Scheduler` with a prefix cache reads what is new.
//! messages.push(Message { tool_calls, ..Message::assistant(text) });
//! messages.push(Message::tool("call_0", "time", "12:00"));
//! let prompt = engine.encode_chat(&messages, &chat)?;
//! # Ok(())
//! # }
//! ```

mod call;
mod call_grammar;
mod channels;
mod continued;
mod json;
mod language;
mod marks;
mod message;
mod parts;
mod python;
mod reply;
mod reply_grammar;
mod rules;
mod slices;
mod sources;
mod template;

pub(crate) use call_grammar::ChannelCalls;
pub(crate) use channels::Channels;
pub use json::Json;
pub use message::{Content, Message, Part, Role, ToolCall};
pub use parts::ReplyPart;
pub(crate) use parts::{ReasoningTokens, ReplySyntax, add};
pub use reply::ReplyParser;
pub use reply_grammar::CallChoice;
pub(crate) use rules::{
    CallSyntax, JsonRule, MAX_DEPTH, Refused, Rules, TYPES, Tool, argument, constants, count, has_only, literal,
    of_type,
};
pub(crate) use sources::{DEFAULT_TEMPLATE, NAMED_TEMPLATES, gguf_special_tokens, template_sources};
pub use template::{ChatOptions, ChatTemplate, ControlTokens, GenerationPrompt, ReasoningStart, Thinking};
