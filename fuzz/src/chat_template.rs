//! Any bytes at all as chat_template.jinja, or as tokenizer_config.json where they begin with a
//! brace: conversations are rendered, or refused.

use super::{checked, directory, file};
use foretoken::chat::{ChatOptions, ChatTemplate, Json, Message, Role, Thinking, ToolCall};

const TARGET: &str = "chat_template";

/// Reads `data`.
pub fn read(data: &[u8]) {
    let template = file(TARGET, "chat_template.jinja", data);
    // A template that begins so begins with an expression or a block.
    if data.first() == Some(&b'{') && !matches!(data.get(1), Some(b'{' | b'%' | b'#')) {
        std::fs::rename(template, directory(TARGET).join("tokenizer_config.json")).expect("renamed");
    } else {
        file(TARGET, "tokenizer_config.json", br#"{"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}"#);
    }
    let Some(Some(template)) = checked(ChatTemplate::read(directory(TARGET))) else { return };
    let turns =
        [(Role::System, "Be brief."), (Role::User, "Hello {{ x }}\n"), (Role::Assistant, "Hi"), (Role::User, "")];
    let turns = turns.map(|(role, content)| Message::new(role, content));
    let arguments = Json::parse(r#"{"z": [1, 1.5, null], "a": "\u00e9"}"#).expect("JSON");
    let call = ToolCall { id: Some("1".into()), name: "f".into(), arguments: arguments.clone() };
    let call = Message { reasoning: Some("r".into()), tool_calls: vec![call], ..Message::assistant("") };
    let turns: Vec<_> = turns.into_iter().chain([call, Message::tool("1", "f", "{}")]).collect();
    let with_tools = ChatOptions { thinking: Thinking::On, tools: vec![arguments], ..ChatOptions::default() };
    for (messages, options) in [(&turns[..], &with_tools), (&turns[1..2], &plain()), (&[], &plain())] {
        checked(template.render(messages, options));
    }
}

fn plain() -> ChatOptions {
    ChatOptions::default()
}
