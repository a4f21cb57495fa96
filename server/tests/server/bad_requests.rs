//! What cannot be served is refused with a status, a shape and a name; nothing is left of it.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use foretoken::{Engine, EngineOptions};
use foretoken_server::ServerOptions;
use serde_json::{Value, json};

use crate::support::{
    CHAT, LLAMA, MESSAGES, PROMPT, RESPONSES, TEXT, TestServer, agent, copy_of, options, read_head, read_rest, with,
};

/// A body with `more` beside what every route needs.
fn body(path: &str, more: Value) -> Value {
    let body = match path {
        TEXT | LLAMA => json!({"prompt": "fn"}),
        MESSAGES => json!({"messages": [{"role": "user", "content": "fn"}], "max_tokens": 2}),
        RESPONSES => json!({"input": "fn"}),
        _ => json!({"messages": [{"role": "user", "content": "fn"}]}),
    };
    with(&body, more)
}

/// The message of the refusal of a body with `more`, which names `field` in the shape of the route's API.
fn refusal(server: &TestServer, path: &str, more: &Value, field: &str) -> String {
    let (status, answer) = server.post(path, &body(path, more.clone()));
    assert_eq!(status, 400, "{path} {more}: {answer}");
    let error = &answer["error"];
    let message = error["message"].as_str().expect("a message");
    assert!(message.starts_with(&format!("{field}: ")) && !message.contains('\n'), "{path} {more}: {message}");
    assert_eq!(error["type"], "invalid_request_error", "{path} {more}");
    if path != MESSAGES {
        assert_eq!(error["param"], field, "{path} {more}");
    }
    message.to_owned()
}

#[test]
fn fields_that_are_wrong_are_named() {
    let server = TestServer::start(options());
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    let call = |function: Value| json!({"messages": [{"role": "assistant", "tool_calls": [{"function": function}]}]});
    let variables: serde_json::Map<String, Value> = (0..1025).map(|i| (format!("v{i}"), json!(0))).collect();
    let cases = [
        // Types and ranges.
        (TEXT, json!({"prompt": 3}), "prompt"),
        (TEXT, json!({"prompt": null}), "prompt"),
        (TEXT, json!({"prompt": ""}), "prompt"),
        (TEXT, json!({"prompt": []}), "prompt"),
        (LLAMA, json!({"prompt": vec!["a"; 65]}), "prompt"),
        (TEXT, json!({"prompt": vec!["a"; 65]}), "prompt"),
        (TEXT, json!({"prompt": vec!["a"; 60], "n": 2}), "prompt"), // more than the queue has places
        (TEXT, json!({"prompt": ["a", ""]}), "prompt[1]"),
        (TEXT, json!({"prompt": ["a", {}]}), "prompt[1]"),
        (TEXT, json!({"prompt": [[2, 5], [2, "a"]]}), "prompt[1][1]"),
        (TEXT, json!({"prompt": [1, -1]}), "prompt[1]"),
        (TEXT, json!({"prompt": [1, 1.5]}), "prompt[1]"),
        (TEXT, json!({"prompt": [2, 4_000_000_000u32]}), "prompt"),
        (TEXT, json!({"prompt": [2, 5_000_000_000u64]}), "prompt[1]"),
        (CHAT, json!({"max_tokens": 0}), "max_tokens"),
        (TEXT, json!({"max_tokens": "2"}), "max_tokens"),
        (TEXT, json!({"temperature": -0.1}), "temperature"),
        (TEXT, json!({"temperature": "hot"}), "temperature"),
        (TEXT, json!({"temperature": [1]}), "temperature"),
        (TEXT, json!({"top_p": -0.1}), "top_p"),
        (TEXT, json!({"top_p": 1.1}), "top_p"),
        (TEXT, json!({"min_p": -0.1}), "min_p"),
        (TEXT, json!({"top_k": -2}), "top_k"),
        (TEXT, json!({"seed": 1e30}), "seed"),
        (TEXT, json!({"seed": 0.5}), "seed"),
        (TEXT, json!({"stop": 3}), "stop"),
        (TEXT, json!({"stop": ["a", 3]}), "stop[1]"),
        (TEXT, json!({"stop": vec!["x"; 17]}), "stop"),
        (TEXT, json!({"stop": "x".repeat(1025)}), "stop"),
        (TEXT, json!({"stop_token_ids": ["a"]}), "stop_token_ids[0]"),
        (TEXT, json!({"stop_token_ids": vec![5; 1025]}), "stop_token_ids"),
        (TEXT, json!({"stream": "yes"}), "stream"),
        (TEXT, json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (TEXT, json!({"stream": true, "stream_options": {"usage": true}}), "stream_options.usage"),
        (TEXT, json!({"logprobs": 21}), "logprobs"),
        (TEXT, json!({"logprobs": true}), "logprobs"),
        (LLAMA, json!({"n_probs": 21}), "n_probs"),
        (TEXT, json!({"speculative": true}), "speculative"),
        (TEXT, json!({"speculative": {"type": "magic"}}), "speculative.type"),
        (TEXT, json!({"speculative": {"type": "ngram-mod:n=1000000000"}}), "speculative.type"),
        (TEXT, json!({"speculative": {"type": "draft-model"}}), "speculative.type"),
        (TEXT, json!({"speculative": {"type": "mtp,mtp"}}), "speculative.type"),
        (TEXT, json!({"speculative": {"type": "mtp,".repeat(1000) + "mtp"}}), "speculative.type"),
        (TEXT, json!({"speculative": {"draft_block_size": 0}}), "speculative.draft_block_size"),
        (TEXT, json!({"speculative": {"draft_block_size": 100_000}}), "speculative.draft_block_size"),
        (TEXT, json!({"speculative": {"depth": 2}}), "speculative.depth"),
        (CHAT, json!({"messages": []}), "messages"),
        (CHAT, json!({"messages": null}), "messages"),
        (CHAT, json!({"messages": "hello"}), "messages"),
        (CHAT, json!({"messages": ["hello"]}), "messages[0]"),
        (CHAT, json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (CHAT, json!({"messages": [{"role": "wizard", "content": "x"}]}), "messages[0].role"),
        (CHAT, json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].tool_call_id"),
        (
            CHAT,
            json!({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}),
            "messages[0].tool_call_id",
        ),
        (CHAT, json!({"messages": [{"role": "assistant"}]}), "messages[0].content"),
        (CHAT, call(json!({"name": "f", "arguments": "[1]"})), "messages[0].tool_calls[0].function.arguments"),
        (CHAT, call(json!({"name": "f", "arguments": "{"})), "messages[0].tool_calls[0].function.arguments"),
        (CHAT, call(json!({"arguments": "{}"})), "messages[0].tool_calls[0].function.name"),
        (CHAT, json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (CHAT, json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (
            CHAT,
            json!({"tools": [{"type": "function", "function": {"name": "a".repeat(129)}}]}),
            "tools[0].function.name",
        ),
        (
            CHAT,
            json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]}),
            "tools[0].function.parameters",
        ),
        (CHAT, json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (CHAT, json!({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}), "tools[0].function.x"),
        (CHAT, json!({"tools": vec![json!({}); 1025]}), "tools"),
        (CHAT, json!({"n": 0}), "n"),
        (CHAT, json!({"n": 9}), "n"),
        (TEXT, json!({"n": 1000}), "n"),
        (CHAT, json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (CHAT, json!({"logit_bias": {"4096": 1}}), "logit_bias"),
        (CHAT, json!({"logit_bias": {"5": "x"}}), "logit_bias"),
        (TEXT, json!({"logit_bias": [[5]]}), "logit_bias"),
        (TEXT, json!({"logit_bias": [[5, 3e38], [5, 3e38]]}), "logit_bias"), // their sum is infinite
        (TEXT, json!({"logit_bias": {"5": "-2e30"}}), "logit_bias"),
        (TEXT, json!({"logit_bias": 1}), "logit_bias"),
        (TEXT, json!({"logit_bias": vec![(5, 0); 1025]}), "logit_bias"),
        (CHAT, json!({"chat_template_kwargs": {"enable_thinking": 1}}), "chat_template_kwargs.enable_thinking"),
        (CHAT, json!({"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs.messages"),
        (CHAT, json!({"chat_template_kwargs": variables}), "chat_template_kwargs"),
        (RESPONSES, json!({"input": []}), "input"),
        (RESPONSES, json!({"input": 5}), "input"),
        (RESPONSES, json!({"input": [{"type": "web_search_call"}]}), "input[0].type"),
        (
            RESPONSES,
            json!({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}),
            "input[0].call_id",
        ),
        (RESPONSES, json!({"max_output_tokens": 0}), "max_output_tokens"),
        (RESPONSES, json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (RESPONSES, json!({"background": true}), "background"),
        (RESPONSES, json!({"prompt_cache_options": {"prewarm": true}}), "prompt_cache_options.prewarm"),
        (RESPONSES, json!({"include": ["message.output_text.logprobs"]}), "include[0]"),
        (RESPONSES, json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (RESPONSES, json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema"),
        (RESPONSES, json!({"tool_choice": {"type": "web_search"}}), "tool_choice.type"),
        (RESPONSES, json!({"reasoning": {"effort": "extreme"}}), "reasoning.effort"),
        (RESPONSES, json!({"reasoning": {"mode": "pro"}}), "reasoning.mode"),
        (
            MESSAGES,
            json!({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}]}),
            "messages[0].content[0].tool_use_id",
        ),
        (
            MESSAGES,
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": 1}]}]}),
            "messages[0].content[0].input",
        ),
        (MESSAGES, json!({"messages": user(json!([]))}), "messages[0].content"),
        (MESSAGES, json!({"tool_choice": {"type": "any"}}), "tool_choice"),
        (MESSAGES, json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (MESSAGES, json!({"tool_choice": {}}), "tool_choice.type"),
        (MESSAGES, json!({"tools": [{"name": "f", "strict": 1, "input_schema": {}}]}), "tools[0].strict"),
        (MESSAGES, json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0].type"),
        (CHAT, json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (CHAT, json!({"messages": user(json!(5))}), "messages[0].content"),
        (CHAT, json!({"messages": [{"role": "user", "content": "x", "color": 1}]}), "messages[0].color"),
        // Images in results of tools.
        (
            CHAT,
            json!({"messages": [{"role": "tool", "tool_call_id": "1", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
        ),
        (
            RESPONSES,
            json!({"input": [{"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image"}]}]}),
            "input[0].output[0].type",
        ),
        (
            MESSAGES,
            json!({"messages": user(json!([{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]))}),
            "messages[0].content[0].content[0].type",
        ),
        (MESSAGES, json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (CHAT, json!({"top_logprobs": 2}), "top_logprobs"),
        (CHAT, json!({"logprobs": 2}), "logprobs"),
        (MESSAGES, json!({"max_tokens": null}), "max_tokens"),
        (MESSAGES, json!({"system": 3}), "system"),
        (
            MESSAGES,
            json!({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}),
            "messages", // a call is not continued
        ),
        (LLAMA, json!({"n_predict": -2}), "n_predict"),
        (LLAMA, json!({"max_tokens": -2}), "max_tokens"),
        (LLAMA, json!({"response_fields": [1]}), "response_fields[0]"),
        (LLAMA, json!({"response_fields": vec!["content"; 65]}), "response_fields"),
        (LLAMA, json!({"n_probs": -1}), "n_probs"),
        (CHAT, json!({"frequency_penalty": 101}), "frequency_penalty"),
        (LLAMA, json!({"repeat_penalty": 0}), "repeat_penalty"),
        (TEXT, json!({"repetition_penalty": 0}), "repetition_penalty"),
        (CHAT, json!({"repeat_penalty": 0, "repetition_penalty": 1.1}), "repeat_penalty"),
        (LLAMA, json!({"repeat_last_n": -2}), "repeat_last_n"),
        // What would change the text, and is not implemented.
        (CHAT, json!({"tool_choice": "required"}), "tool_choice"),
        (CHAT, json!({"tool_choice": "always"}), "tool_choice"),
        (
            CHAT,
            json!({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}),
            "tool_choice", // the demo pair has no tokens of calls
        ),
        (CHAT, json!({"tool_choice": {"type": "function", "function": {"name": "f"}}}), "tool_choice"),
        (CHAT, json!({"reasoning_effort": "extreme"}), "reasoning_effort"),
        (CHAT, json!({"functions": [{}]}), "functions"),
        (CHAT, json!({"a field of the future": 1}), "a field of the future"),
        (TEXT, json!({"echo": 1}), "echo"),
        (CHAT, json!({"echo": true}), "echo"),
        (CHAT, json!({"add_generation_prompt": 0}), "add_generation_prompt"),
        (CHAT, json!({"add_generation_prompt": true, "continue_final_message": true}), "continue_final_message"),
        (CHAT, json!({"continue_final_message": true}), "messages"), // the last one is the user's
        (RESPONSES, json!({"add_generation_prompt": false}), "add_generation_prompt"),
        (TEXT, json!({"continue_final_message": true}), "continue_final_message"),
        (TEXT, json!({"suffix": "}"}), "suffix"),
        (TEXT, json!({"best_of": 3}), "best_of"),
        (TEXT, json!({"best_of": 3, "n": 2}), "best_of"),
        (TEXT, json!({"typical_p": 0}), "typical_p"),
        (LLAMA, json!({"xtc_probability": 1.5}), "xtc_probability"),
        (CHAT, json!({"xtc_probability": 0.5, "xtc_threshold": -0.1}), "xtc_threshold"),
        (CHAT, json!({"top_n_sigma": "1"}), "top_n_sigma"),
        (TEXT, json!({"dry_multiplier": -1}), "dry_multiplier"),
        (CHAT, json!({"dry_multiplier": 1, "dry_base": 17}), "dry_base"),
        (MESSAGES, json!({"dry_multiplier": 1, "dry_allowed_length": 0}), "dry_allowed_length"),
        (LLAMA, json!({"dry_multiplier": 1, "dry_penalty_last_n": -2}), "dry_penalty_last_n"),
        (RESPONSES, json!({"dry_multiplier": 1, "dry_sequence_breakers": 3}), "dry_sequence_breakers"),
        (TEXT, json!({"dry_multiplier": 1, "dry_sequence_breakers": ["a", 3]}), "dry_sequence_breakers[1]"),
        (TEXT, json!({"dry_multiplier": 1, "dry_sequence_breakers": vec!["a"; 17]}), "dry_sequence_breakers"),
        (TEXT, json!({"samplers": ["temperature"], "dry_multiplier": 1}), "samplers"),
        (TEXT, json!({"samplers": ["top_k", "temperature"], "typical_p": 0.5}), "samplers"),
        (TEXT, json!({"min_tokens": -1}), "min_tokens"),
        (TEXT, json!({"min_tokens": 3, "max_tokens": 2}), "min_tokens"),
        (TEXT, json!({"min_tokens": 2, "response_format": {"type": "json_object"}}), "min_tokens"),
        (TEXT, json!({"samplers": ["temperature", "top_k"]}), "samplers"),
        (TEXT, json!({"samplers": ["temperature"], "top_k": 3}), "samplers"),
        (TEXT, json!({"samplers": "kt", "top_p": 0.9}), "samplers"),
        (TEXT, json!({"samplers": "ka"}), "samplers"),
        (TEXT, json!({"t_max_predict_ms": 100}), "t_max_predict_ms"),
        (MESSAGES, json!({"thinking": {"type": "maximal"}}), "thinking.type"),
        (LLAMA, json!({"mirostat": 2}), "mirostat"),
        (LLAMA, json!({"adaptive_target": 0.5}), "adaptive_target"),
        (CHAT, json!({"mirostat": 1, "mirostat_tau": 5.0}), "mirostat"),
    ];
    for (path, more, field) in cases {
        refusal(&server, path, &more, field);
    }
    let (status, error) = server.post("/tokenize", &json!({"content": "x", "parse_special": 0}));
    assert_eq!((status, &error["error"]["param"]), (400, &json!("parse_special")));
    let (status, error) = server.post("/apply-template", &json!({"messages": []}));
    assert_eq!((status, &error["error"]["param"]), (400, &json!("messages")));
    let (status, error) = server.post("/detokenize", &json!({"tokens": [1, 4096]}));
    assert_eq!((status, &error["error"]["param"]), (400, &json!("tokens[1]")));
    let (status, error) = server.post(TEXT, &body(TEXT, json!({"model": "gpt-4o"})));
    assert_eq!((status, &error["error"]["code"]), (404, &json!("model_not_found")));
    assert_eq!(server.metric("vllm:generation_tokens_total"), 0.0, "something was generated");
    assert_eq!(server.metric("vllm:prompt_tokens_total"), 0.0, "a prompt was read");
}

#[test]
fn a_minimum_that_cannot_be_written_is_refused() {
    let server = TestServer::start(options());
    // Other fields than `max_tokens` have the maximum, as the context does, and calls are no formats.
    let strict = json!({"tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": {}}}]});
    for (path, more, problem) in [
        (LLAMA, json!({"n_predict": 2}), "is 3, must be at most the maximum of tokens, 2"),
        (RESPONSES, json!({"max_output_tokens": 2}), "is 3, must be at most the maximum of tokens, 2"),
        (CHAT, strict, "is supported only without formats, and forced or strict tool calls; omit it"),
    ] {
        let message = refusal(&server, path, &with(&more, json!({"min_tokens": 3})), "min_tokens");
        assert_eq!(message, format!("min_tokens: {problem}"), "{path}");
    }
    let problem =
        "but the context of 8192 has room for 8190 after the prompt; lower it, or raise the server's --context";
    let (status, error) = server.post(TEXT, &json!({"prompt": [2, 5, 6], "min_tokens": 8191, "ignore_eos": true}));
    assert_eq!((status, &error["error"]["message"]), (400, &json!(format!("min_tokens: is 8191, {problem}"))));
}

/// A checkpoint without a tokenizer is served with token ids.
#[test]
fn fields_that_need_a_tokenizer_are_named() {
    let files = ["config.json", "generation_config.json", "model.safetensors"];
    let directory = copy_of(&foretoken_tools::demo("target"), &files);
    let engine = Engine::load(&EngineOptions::new(directory.path())).expect("an engine");
    let server = TestServer::start_on(engine, options());
    for (more, field) in [(json!({"prompt": "fn"}), "prompt"), (json!({"prompt": [2, 5], "stop": "x"}), "stop")] {
        let message = refusal(&server, TEXT, &more, field);
        assert!(message.contains("tokenizer"), "{message}");
    }
}

#[test]
fn content_of_other_types_than_text_is_named() {
    let server = TestServer::start(options());
    for (path, list, part) in [
        (CHAT, "messages", json!({"type": "image_url", "image_url": {"url": "x"}})),
        (CHAT, "messages", json!({"type": "input_audio", "input_audio": {}})),
        (RESPONSES, "input", json!({"type": "input_image"})),
        (MESSAGES, "messages", json!({"type": "image"})),
    ] {
        let more = json!({list: [{"role": "user", "content": [part]}]});
        let message = refusal(&server, path, &more, &format!("{list}[0].content[0].type"));
        let kind = part["type"].as_str().expect("a type");
        assert!(message.contains(&format!("{kind:?} is not supported")), "{message}");
        assert!(message.contains(", only text"), "{message}");
    }
}

/// So that a stream is refused as well.
#[test]
fn all_prompts_are_checked_before_the_first_is_read() {
    let server = TestServer::start(options());
    for prompt in [json!([[2, 5], []]), json!([[2, 5], [2, 4_000_000_000u32]]), json!([[2, 5], vec![5; 8193]])] {
        for streams in [false, true] {
            let (status, error) = server.post(TEXT, &json!({"prompt": prompt, "max_tokens": 2, "stream": streams}));
            assert_eq!((status, &error["error"]["param"]), (400, &json!("prompt[1]")));
        }
    }
    assert_eq!(server.metric("vllm:prompt_tokens_total"), 0.0, "a prompt was read");
}

/// What is refused above begins right behind these.
#[test]
fn the_largest_values_are_served() {
    let server = TestServer::start(options());
    let tool = |name: String| json!({"type": "function", "function": {"name": name}});
    let variables: serde_json::Map<String, Value> = (0..1024).map(|i| (format!("v{i}"), json!(0))).collect();
    for (path, more) in [
        (TEXT, json!({"prompt": vec!["a"; 64]})),
        (TEXT, json!({"stop": vec!["x"; 16]})),
        (TEXT, json!({"stop": "x".repeat(1024)})),
        (TEXT, json!({"stop_token_ids": vec![5; 1024]})),
        (TEXT, json!({"logprobs": 20})),
        (LLAMA, json!({"n_probs": 20})),
        (LLAMA, json!({"response_fields": vec!["content"; 64]})),
        (TEXT, json!({"logit_bias": vec![(5, 0); 1024]})),
        (TEXT, json!({"logit_bias": {"5": "-1e30"}})),
        (CHAT, json!({"tools": [tool("a".repeat(128))]})),
        (CHAT, json!({"tools": (0..1024).map(|i| tool(format!("f{i}"))).collect::<Vec<_>>()})),
        (CHAT, json!({"n": 8})),
        (CHAT, json!({"chat_template_kwargs": variables})),
        (TEXT, json!({"min_tokens": 2, "max_tokens": 2})),
        (TEXT, json!({"top_p": 1, "min_p": 1, "typical_p": 1, "xtc_probability": 1, "xtc_threshold": 0.5})),
        (TEXT, json!({"dry_multiplier": 100, "dry_base": 16, "dry_sequence_breakers": vec!["a"; 16]})),
    ] {
        server.ask(path, &with(&with(&body(path, json!({})), json!({"max_tokens": 1})), more));
    }
}

#[test]
fn bodies_that_are_wrong() {
    let server = TestServer::start(options());
    let nested = [b"{\"prompt\":".to_vec(), vec![b'['; 100_000]].concat();
    let cases: [&[u8]; 9] = [
        b"",
        b"{",
        b"[]",
        b"\"prompt\"",
        b"{\"prompt\": \"x\", \"temperature\": NaN}",
        b"{\"prompt\": \"x\", \"temperature\": 1e999}",
        b"{\"prompt\": \"\xFF\xFE\"}",
        b"{\"prompt\": \"\\ud800\"}",
        &nested,
    ];
    for bytes in cases {
        let (status, error) = server.post_bytes(TEXT, bytes);
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(50)]).into_owned();
        assert_eq!((status, &error["error"]["param"]), (400, &json!("body")), "{shown}: {error}");
    }
    let large = json!({"prompt": "x".repeat(10 << 20)});
    let (status, error) = server.post(TEXT, &large);
    assert_eq!((status, &error["error"]["param"]), (413, &json!("body")));
    for content_type in ["text/plain", "application/x-www-form-urlencoded"] {
        let request = agent().post(server.url(TEXT)).header("content-type", content_type);
        let response = request.send(json!({"prompt": PROMPT}).to_string()).expect("an answer");
        assert_eq!(response.status().as_u16(), 415, "{content_type}");
    }
    for (encoding, status) in [("gzip", 415), ("identity, br", 415), ("Identity", 400)] {
        let request = agent().post(server.url(TEXT)).content_type("application/json");
        let mut response = request.header("content-encoding", encoding).send("{}").expect("an answer");
        let error = response.body_mut().read_to_string().expect("a text");
        assert_eq!(response.status().as_u16(), status, "{encoding}");
        assert_eq!(error.contains("content-encoding: only identity"), status == 415, "{error}");
    }
    // After all of that it serves.
    server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 4}));
}

#[test]
fn prompts_that_are_too_long() {
    let server = TestServer::start(options());
    // More than the context has room for, as a text and as ids.
    for prompt in [json!("let x = 1;\n".repeat(100_000)), json!(vec![5; 8192 + 1])] {
        let (status, error) = server.post(TEXT, &json!({"prompt": prompt}));
        assert_eq!((status, &error["error"]["code"]), (400, &json!("context_length_exceeded")), "{error}");
    }
    // By the bytes, as 60 is the longest token's length, and not by the tokens of which there would be more.
    let text = "x;".repeat(250_000);
    let assistant = json!({"messages": [{"role": "assistant", "content": text}, {"role": "user", "content": "?"}]});
    let remedy = "shorten the prompt or raise the server's --context";
    let refused = format!("{} tokens do not fit the context of 8192; {remedy}", 500_001_usize.div_ceil(60));
    for (path, body) in [
        (TEXT, json!({"prompt": text.clone() + "?"})),
        ("/tokenize", json!({"content": text.clone() + "?"})),
        (CHAT, assistant.clone()),
    ] {
        let (status, error) = server.post(path, &body);
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(&refused), "{path}: {error}");
    }
    // Anthropic's words, upon which coding agents compact their conversation.
    let tokens = json!({"messages": [{"role": "user", "content": "let x = 1;\n".repeat(20_000)}], "max_tokens": 4});
    for body in [tokens.clone(), with(&tokens, json!({"stream": true}))] {
        let (status, error) = server.post(MESSAGES, &body);
        let message = error["error"]["message"].as_str().unwrap_or_default();
        let numbers = message.strip_prefix("prompt is too long: ").and_then(|rest| rest.split_once(" tokens > "));
        let needed = numbers.and_then(|(needed, _)| needed.parse::<usize>().ok());
        assert!(status == 400 && needed > Some(8192) && message.contains(" > 8192 maximum; "), "{error}");
        assert!(message.ends_with(remedy), "{error}");
    }
    // A template need not write the tools; counts have no limit.
    let tool = json!({"type": "function", "function": {"name": "f", "description": text}});
    let body = json!({"messages": [{"role": "user", "content": "fn"}], "tools": [tool], "max_tokens": 1});
    server.ask(CHAT, &body);
    let user = json!({"messages": [{"role": "user", "content": text}]});
    let count = server.ask("/v1/messages/count_tokens", &user)["input_tokens"].as_u64();
    assert!(count >= Some(200_000), "{count:?}");
}

/// A client that sends all of a long body before it reads has the status, not a connection that is reset.
#[test]
fn refusals_are_read_after_long_bodies() {
    let keys = vec!["key".to_owned()];
    let server = TestServer::start(ServerOptions { api_keys: keys, ..options() });
    // More than the sockets' buffers.
    let body = vec![b' '; 8 << 20];
    for (line, field, status) in [
        ("POST /v1/completions", "x-api-key: other", "401"),
        ("POST /v1/completions", "host: evil.example", "403"),
        ("POST /nothing", "x-api-key: key", "404"),
        ("PUT /v1/completions", "x-api-key: key", "405"),
        ("POST /v1/completions", "x-api-key: key", "415"),
        ("POST /v1/embeddings", "x-api-key: key", "501"),
    ] {
        let mut stream = TcpStream::connect(server.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
        write!(stream, "{line} HTTP/1.1\r\n{field}\r\ncontent-length: {}\r\n\r\n", body.len()).expect("written");
        stream.write_all(&body).unwrap_or_else(|error| panic!("{status}: the body was not read: {error}"));
        assert_eq!(read_head(&stream).get(9..12), Some(status), "{line}");
    }
}

/// A connection on which these bytes were sent.
fn send(server: &TestServer, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("set");
    // The server may have closed already.
    let _ = stream.write_all(bytes);
    stream
}

#[test]
fn heads_that_are_wrong() {
    let server = TestServer::start(options());
    let status = |bytes: &[u8]| read_rest(send(&server, bytes)).get(9..12).unwrap_or("").to_owned();
    assert_eq!(status(b"what is this\r\n\r\n"), "400");
    let many = format!("GET /health HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(100));
    assert_eq!(status(many.as_bytes()), "431");
    let long = format!("GET /health HTTP/1.1\r\na: {}\r\n\r\n", "b".repeat(1 << 20));
    assert_eq!(status(long.as_bytes()), "431");
}

/// Half a head, and nothing after a response: the server closes both connections.
#[test]
fn heads_that_are_late() {
    let idle_timeout = Duration::from_secs(2);
    let server = TestServer::start(ServerOptions { idle_timeout, ..options() });
    let kept = send(&server, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let half = send(&server, b"GET /health HTTP/1.1\r\nhost: l");
    assert!(read_head(&kept).starts_with("HTTP/1.1 200"));
    assert!(read_rest(kept).ends_with('}'));
    read_rest(half);
}
