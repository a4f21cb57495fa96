//! The checkpoint's chat template: renders conversations, tools and options to a prompt. [`ReplyParser`] splits the
//! model's output into text, reasoning and tool calls.
//!
//! The reference is transformers' `apply_chat_template`: the same template and messages give the same string
//! (`tests/chat_templates.rs`).

mod call;
mod call_grammar;
mod channels;
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
