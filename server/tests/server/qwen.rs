//! The demo Qwen3.5: a byte-level vocabulary, and calls in XML.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use foretoken::chat::ChatTemplate;
use foretoken::checkpoint::Checkpoint;
use foretoken::{Engine, EngineOptions, LogitsProcessor};
use foretoken_server::{GenerateDefaults, ServerOptions};
use serde_json::{Value, json};

use crate::support::{self, CHAT, LLAMA, PROMPT, Script, TEMPLATE, TEXT, TestServer, options};

fn path() -> PathBuf {
    foretoken_tools::repository().join("models/demo-qwen")
}

pub fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| Engine::load(&EngineOptions::new(path())).expect("the demo"))
}

/// The demo with another tokenizer.
fn with_tokenizer(edit: impl FnOnce(&mut Value)) -> Engine {
    let files = ["config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"];
    support::with_tokenizer(&path(), &files, edit)
}

/// The demo with tags of calls that are ordinary text, as in Qwen's own tokenizer.json.
fn with_visible_tags() -> Engine {
    with_tokenizer(|tokenizer| {
        for token in tokenizer["added_tokens"].as_array_mut().expect("a list") {
            let is_tag = token["content"].as_str().is_some_and(|name| name.ends_with("tool_call>"));
            token["special"] = json!(!is_tag);
        }
    })
}

/// Has the model write a text, and end there.
fn script(engine: &Engine, text: &str) -> Arc<dyn LogitsProcessor> {
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let mut ids = tokenizer.encode(text).expect("tokens");
    ids.push(tokenizer.id("<|im_end|>").expect("a token"));
    Arc::new(Script(Arc::new(Mutex::new(ids))))
}

fn start(processor: Option<Arc<dyn LogitsProcessor>>) -> TestServer {
    start_on(engine(), processor)
}

fn start_on(engine: &Engine, processor: Option<Arc<dyn LogitsProcessor>>) -> TestServer {
    let template = ChatTemplate::new(TEMPLATE.into(), String::new(), String::new()).expect("a template");
    let defaults = GenerateDefaults { logits_processor: processor, ..GenerateDefaults::default() };
    TestServer::start_on(engine.clone(), ServerOptions { defaults, chat_template: Some(template), ..options() })
}

#[test]
fn token_texts_are_those_of_the_text() {
    let server = start(None);
    let text = "fn main() {\n    let x = \"\u{6f22} \u{e9}\";\n}";
    let tokens = server.ask("/tokenize", &json!({"content": text, "with_pieces": true}))["tokens"].clone();
    let bytes = tokens.as_array().expect("an array").iter().flat_map(|token| match &token["piece"] {
        Value::String(text) => text.as_bytes().to_vec(),
        piece => serde_json::from_value(piece.clone()).expect("bytes"),
    });
    assert_eq!(String::from_utf8(bytes.collect()).as_deref(), Ok(text));
    let ids: Vec<_> = tokens.as_array().expect("an array").iter().map(|token| token["id"].clone()).collect();
    assert_eq!(server.ask("/detokenize", &json!({"tokens": ids}))["content"], text);

    let body = json!({"prompt": PROMPT, "max_tokens": 24, "ignore_eos": true, "logprobs": 2});
    let choice = server.ask(TEXT, &body)["choices"][0].clone();
    let pieces = choice["logprobs"]["tokens"].as_array().expect("an array");
    assert_eq!(pieces.iter().filter_map(Value::as_str).collect::<String>(), choice["text"]);
    assert!(pieces.iter().any(|piece| piece.as_str().is_some_and(|piece| piece.contains(' '))), "{pieces:?}");
    let mut characters = 0;
    for (piece, offset) in pieces.iter().zip(choice["logprobs"]["text_offset"].as_array().expect("an array")) {
        assert_eq!(*offset, characters);
        characters += piece.as_str().expect("a string").chars().count();
    }
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "logprobs": true});
    let choice = server.ask(CHAT, &body)["choices"][0].clone();
    let bytes = choice["logprobs"]["content"].as_array().expect("an array").iter();
    let bytes = bytes.flat_map(|token| token["bytes"].as_array().expect("an array").clone());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().expect("a byte") as u8).collect();
    assert_eq!(choice["message"]["content"], json!(String::from_utf8_lossy(&bytes)));
}

#[test]
fn the_post_processor_may_add_bos() {
    let bos = "<|endoftext|>";
    let single = json!([{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    let special_tokens = json!({bos: {"id": bos, "ids": [0], "tokens": [bos]}});
    let engine = with_tokenizer(|tokenizer| {
        tokenizer["post_processor"] =
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special_tokens});
    });
    let server = start_on(&engine, None);
    let tokens = |body: Value| server.ask("/tokenize", &body)["tokens"].clone();
    let text = tokens(json!({"content": "x"}));
    assert_eq!(text.as_array().map(Vec::len), Some(1), "{text}");
    let with_bos = json!([0, text[0]]);
    assert_eq!(tokens(json!({"content": "x", "add_special": true})), with_bos);
    assert_eq!(tokens(json!({"content": format!("{bos}x"), "add_special": true})), with_bos);
    assert_eq!(tokens(json!({"content": format!("{bos}x")})), with_bos);
    assert_eq!(tokens(json!({"content": "", "add_special": true})), json!([0]));
}

/// A token may end a stop string, and go on with bytes that are no character.
#[test]
fn stop_strings_before_invalid_bytes() {
    // Of bytes that no text has: the tokens are in no merge.
    let names = [("\u{c0}", "x\u{ff}\u{fe}"), ("\u{c1}", "x\u{e2}")];
    let engine = with_tokenizer(|tokenizer| {
        let vocabulary = tokenizer["model"]["vocab"].as_object_mut().expect("an object");
        for (byte, name) in names {
            let id = vocabulary.remove(byte).expect("a token");
            vocabulary.insert(name.into(), id);
        }
    });
    let id = |name| engine.tokenizer().ok().and_then(|tokenizer| tokenizer.id(name)).expect("a token");
    for (_, name) in names {
        let script = Script(Arc::new(Mutex::new(["E", "N", "D", name].map(id).to_vec())));
        let server = start_on(&engine, Some(Arc::new(script)));
        let body = json!({"prompt": "fn", "stop": ["x", "NDx"], "n_predict": 9});
        let whole = server.ask(LLAMA, &body);
        assert_eq!((&whole["content"], &whole["stopping_word"]), (&json!("E"), &json!("NDx")), "{name:?}: {whole}");
    }
}

#[test]
fn one_call_if_calls_are_not_parallel() {
    let call =
        |n: usize| format!("<tool_call>\n<function=f>\n<parameter=n>\n{n}\n</parameter>\n</function>\n</tool_call>");
    let server = start(Some(script(engine(), &(call(1) + &call(2)))));
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object",
        "properties": {"n": {"type": "integer"}}}}});
    for (parallel, calls) in [(true, 2), (false, 1)] {
        let body = json!({"messages": [{"role": "user", "content": "?"}], "tools": [tool], "max_tokens": 200,
            "parallel_tool_calls": parallel});
        let choice = server.ask(CHAT, &body)["choices"][0].clone();
        let got = choice["message"]["tool_calls"].as_array().map(Vec::len);
        assert_eq!((got, &choice["finish_reason"]), (Some(calls), &json!("tool_calls")), "{choice}");
        assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"n\":1}");
    }
}

/// A reply that continues a message is text, where other prompts open the reasoning.
#[test]
fn a_continued_message_is_text() {
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}";
    let template = ChatTemplate::new(source.into(), String::new(), String::new()).expect("a template");
    let logits_processor = Some(script(engine(), "sunny."));
    let defaults = GenerateDefaults { logits_processor, ..GenerateDefaults::default() };
    let options = ServerOptions { defaults, chat_template: Some(template), ..options() };
    let server = TestServer::start_on(engine().clone(), options);
    let messages = json!([{"role": "user", "content": "?"}, {"role": "assistant", "content": "It is "}]);
    for (continues, name) in [(true, "content"), (false, "reasoning_content")] {
        let body = json!({"messages": messages, "continue_final_message": continues, "max_tokens": 20});
        let message = server.ask(CHAT, &body)["choices"][0]["message"].clone();
        assert_eq!(message[name], "sunny.", "{message}");
    }
}

/// The token that ends a call is a stop token of replies with one call. Where no call is, its text is part of the reply;
/// without tools it stops nothing.
#[test]
fn the_end_of_a_call_is_not_lost() {
    let visible = with_visible_tags();
    let tool = json!({"type": "function", "function": {"name": "f"}});
    for engine in [engine(), &visible] {
        for (written, of_one_call) in [
            ("<tool_call>{}</tool_call>\nand more", "<tool_call>{}</tool_call>"),
            ("The tag </tool_call> ends it.", "The tag </tool_call>"),
        ] {
            let server = start_on(engine, Some(script(engine, written)));
            for (tools, parallel, want) in
                [(vec![&tool], true, written), (vec![&tool], false, of_one_call), (vec![], false, written)]
            {
                let body = json!({"messages": [{"role": "user", "content": "?"}], "tools": tools, "max_tokens": 200,
                    "parallel_tool_calls": parallel});
                let choice = server.ask(CHAT, &body)["choices"][0].clone();
                assert_eq!(choice["message"]["content"], want, "{tools:?} {parallel}");
                assert_eq!(choice["finish_reason"], "stop");
            }
        }
    }
}

/// What the model writes freely is held to a call under the tool's schema.
#[test]
fn calls_can_be_forced() {
    let server = start(None);
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9},
        "s": {"type": "string", "maxLength": 3}}, "required": ["n", "s"], "additionalProperties": false});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "f"}})] {
        let body = json!({"messages": [{"role": "user", "content": "fn"}], "tools": [tool], "tool_choice": choice,
            "parallel_tool_calls": false, "max_tokens": 200});
        let answer = server.ask(CHAT, &body)["choices"][0].clone();
        assert_eq!(answer["finish_reason"], "tool_calls", "{answer}");
        let arguments = answer["message"]["tool_calls"][0]["function"]["arguments"].as_str().expect("a string");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(arguments["n"].as_u64().is_some_and(|n| n <= 9), "{arguments}");
        assert!(arguments["s"].as_str().is_some_and(|s| s.chars().count() <= 3), "{arguments}");
    }
}

/// A template in place of the checkpoint's has the checkpoint's tokens: this one has no `bos_token`.
#[test]
fn templates_have_the_tokens_of_the_checkpoint() {
    let checkpoint = Checkpoint::open(path()).expect("a checkpoint");
    let source = "{{ bos_token }}|{{ eos_token }}".to_owned();
    let template = ChatTemplate::with_tokens_of(&checkpoint, source).expect("a template");
    assert_eq!(template.render(&[], &Default::default()).expect("a prompt"), "|<|im_end|>");
}
