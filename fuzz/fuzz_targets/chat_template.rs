//! Any bytes at all as chat_template.jinja, or as tokenizer_config.json where they begin with a brace: conversations are
//! rendered, or refused.

#![no_main]

use foretoken::chat::{ChatTemplate, Message, Role, Thinking};
use foretoken_fuzz::{checked, directory, file};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let template = file("chat_template.jinja", data);
    // A template that begins so begins with an expression or a block.
    if data.first() == Some(&b'{') && !matches!(data.get(1), Some(b'{' | b'%' | b'#')) {
        std::fs::rename(template, directory().join("tokenizer_config.json")).expect("renamed");
    } else {
        file("tokenizer_config.json", br#"{"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}"#);
    }
    let Some(Some(template)) = checked(ChatTemplate::read(directory())) else { return };
    let turns =
        [(Role::System, "Be brief."), (Role::User, "Hello {{ x }}\n"), (Role::Assistant, "Hi"), (Role::User, "")];
    let turns = turns.map(|(role, content)| Message { role, content: content.into() });
    for (messages, thinking) in [(&turns[..], Thinking::On), (&turns[1..2], Thinking::Off), (&[], Thinking::Off)] {
        checked(template.render(messages, thinking));
    }
});
