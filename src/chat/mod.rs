//! The checkpoint's own chat template: conversations, tools and options in, a prompt out.
//!
//! The judge is transformers' `apply_chat_template`: the same template and messages give the same string
//! (`tests/chat_templates.rs`).

mod json;
mod language;
mod message;
mod template;

pub use json::Json;
pub use message::{Content, Message, Part, Role, ToolCall};
pub(crate) use template::template_source;
pub use template::{ChatOptions, ChatTemplate, GenerationPrompt, Thinking};
