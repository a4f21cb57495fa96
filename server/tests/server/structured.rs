//! Structured output: what is asked for is what comes, streamed, together and under load; what cannot be is a 400.

use serde_json::{Value, json};

use crate::support::{CHAT, LLAMA, PROMPT, RESPONSES, TEXT, TestServer, options, with, with_tokenizer};

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

fn chat(format: Value, more: Value) -> Value {
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300, "response_format": format});
    with(&body, more)
}

fn check_person(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    let name = value["name"].as_str().expect("a name");
    assert!((2..=10).contains(&name.len()) && value["age"].as_u64().expect("an age") <= 130, "{text}");
    assert_eq!(value.as_object().expect("an object").len(), 2, "{text}");
}

#[test]
fn a_format_that_is_asked_for_is_kept() {
    let server = TestServer::start(options());
    let schema = json!({"type": "json_schema", "json_schema": {"name": "person", "strict": true, "schema": person()}});
    let off = json!({"speculative": {"enabled": false}});
    let want = server.ask(CHAT, &chat(schema.clone(), off));
    let content = want["choices"][0]["message"]["content"].as_str().expect("a text");
    check_person(content);
    assert_eq!(want["choices"][0]["finish_reason"], "stop");
    for more in [json!({}), json!({"speculative": {"draft_block_size": 4}})] {
        let got = server.ask(CHAT, &chat(schema.clone(), more));
        assert_eq!(got["choices"][0]["message"]["content"], content);
    }
    let chunks = server.chunks(CHAT, &chat(schema.clone(), json!({"stream": true})));
    let streamed: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, content);
    std::thread::scope(|scope| {
        for seed in 0..6 {
            let (server, schema) = (&server, schema.clone());
            scope.spawn(move || {
                let sampled = server.ask(CHAT, &chat(schema, json!({"temperature": 1.2, "seed": seed})));
                check_person(sampled["choices"][0]["message"]["content"].as_str().expect("a text"));
            });
        }
    });
    // Any object; a text that was cut is its beginning.
    let any = server.ask(CHAT, &chat(json!({"type": "json_object"}), json!({"max_tokens": 8})));
    assert!(any["choices"][0]["message"]["content"].as_str().is_some_and(|text| text.starts_with('{')), "{any}");

    let body = json!({"prompt": PROMPT, "max_tokens": 300, "response_format": schema});
    check_person(server.ask(TEXT, &body)["choices"][0]["text"].as_str().expect("a text"));
    let format = json!({"type": "json_schema", "name": "person", "strict": true, "schema": person()});
    let body = json!({"input": PROMPT, "max_output_tokens": 300, "text": {"format": format}});
    let answer = server.ask(RESPONSES, &body);
    check_person(answer["output"][0]["content"][0]["text"].as_str().expect("a text"));
    assert_eq!(answer["text"]["format"], format);
    let body = json!({"prompt": PROMPT, "n_predict": 300, "json_schema": person()});
    check_person(server.ask(LLAMA, &body)["content"].as_str().expect("a text"));
    let body = json!({"prompt": PROMPT, "grammar": "%llguidance {}\nstart: \"yes\" | \"no\"\n"});
    let answer = server.ask(LLAMA, &body);
    assert!(["yes", "no"].contains(&answer["content"].as_str().expect("a text")), "{answer}");
    assert_eq!(answer["stop_type"], "eos");
}

/// llama.cpp's and vLLM's fields, on the routes of each.
#[test]
fn formats_of_llama_cpp_and_vllm_are_kept() {
    let server = TestServer::start(options());
    let user = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 300});
    let prompt = json!({"prompt": PROMPT, "max_tokens": 300});
    let answers = |format: &Value| {
        let chat = server.ask(CHAT, &with(&user, format.clone()));
        let completion = server.ask(TEXT, &with(&prompt, format.clone()));
        let own = server.ask(LLAMA, &with(&prompt, format.clone()));
        [&chat["choices"][0]["message"]["content"], &completion["choices"][0]["text"], &own["content"]]
            .map(|text| text.as_str().expect("a text").to_owned())
    };
    let of_person = [
        json!({"json_schema": person()}),
        json!({"guided_json": person().to_string(), "guided_decoding_backend": "auto"}),
        json!({"structured_outputs": {"json": person(), "regex": null, "disable_any_whitespace": false}}),
    ];
    for format in of_person {
        answers(&format).iter().for_each(|text| check_person(text));
    }
    let either = "start: \"yes \\\"1\\\"\" | \"no\"";
    let of_choice = [
        json!({"guided_choice": ["yes \"1\"", "no"]}),
        json!({"structured_outputs": {"choice": ["yes \"1\"", "no"]}}),
        json!({"guided_regex": "yes \"[1]\"|no", "grammar": ""}),
        json!({"structured_outputs": {"regex": "(yes \"1\"|no)"}}),
        json!({"grammar": either}),
        json!({"guided_grammar": either}),
        json!({"structured_outputs": {"grammar": format!("%llguidance {{}}\n{either} // ::=")}}),
    ];
    for format in of_choice {
        for text in answers(&format) {
            assert!(["yes \"1\"", "no"].contains(&text.as_str()), "{text:?} {format}");
        }
    }
    let any = json!({"structured_outputs": {"json_object": true}, "max_tokens": 8});
    assert!(answers(&any).iter().all(|text| text.starts_with('{')));
    answers(&json!({"structured_outputs": {"json_object": false}}));
}

#[test]
fn a_schema_that_cannot_be_used_is_named_by_its_place() {
    let server = TestServer::start(options());
    let schema = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
    let unsatisfiable = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 2, "maximum": 1}},
        "required": ["a"]});
    let bomb: serde_json::Map<_, _> = (0..9000).map(|i| (format!("p{i}"), json!({}))).collect();
    let pattern = |i: usize| format!(".*a.{{{i}}}");
    let intersection: Vec<_> = (12..40).map(|i| json!({"type": "string", "pattern": pattern(i)})).collect();
    let intersection = json!({"allOf": intersection});
    let terms: Vec<_> = (12..40).map(|i| format!("/{}/", pattern(i))).collect();
    let terms = format!("%llguidance {{}}\nstart: X\nX: {}", terms.join(" & "));
    let of_schema = "response_format.json_schema.schema";
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let cases = [
        (CHAT, chat(schema(unsatisfiable.clone()), json!({})), of_schema, "#/properties/a: "),
        (CHAT, chat(schema(json!({"type": "object", "properties": bomb})), json!({})), of_schema, "#: has 9000"),
        (CHAT, chat(schema(json!(3)), json!({})), of_schema, "is a number"),
        (
            RESPONSES,
            json!({"input": "x", "text": {"format": {"type": "json_schema", "schema": unsatisfiable}}}),
            "text.format.schema",
            "#/properties/a: ",
        ),
        (CHAT, chat(json!({"type": "json_schema"}), json!({})), "response_format.json_schema", "is required"),
        (CHAT, chat(json!({"type": "xml"}), json!({})), "response_format.type", "must be one of"),
        (RESPONSES, json!({"input": "x", "text": {"format": {}}}), "text.format.type", "is required"),
        (
            RESPONSES,
            json!({"input": "x", "text": {"format": {"type": "json_object", "schema": unsatisfiable}}}),
            "text.format.schema",
            "#/properties/a: ",
        ),
        (CHAT, chat(json!({}), json!({})), "response_format.type", "is required"),
        (CHAT, chat(json!("json"), json!({})), "response_format", "is a string"),
        (CHAT, chat(json!({"type": "json_object", "strict": 1}), json!({})), "response_format.strict", "unknown"),
        (LLAMA, json!({"prompt": PROMPT, "json_schema": unsatisfiable}), "json_schema", "#/properties/a: "),
        // Time exponential in the number of expressions, if it were compiled.
        (CHAT, chat(schema(intersection), json!({})), of_schema, "#: intersects 28"),
        (LLAMA, json!({"prompt": PROMPT, "grammar": terms}), "grammar", "intersects 28"),
        (LLAMA, json!({"prompt": PROMPT, "grammar": "root ::= \"x\""}), "grammar", "GBNF"),
        (LLAMA, json!({"prompt": PROMPT, "grammar": "%llguidance {}\nstart: a\n"}), "grammar", "at 2(8)"),
        (
            LLAMA,
            json!({"prompt": PROMPT, "grammar": "%llguidance {}", "json_schema": {}}),
            "grammar",
            "cannot be combined with json_schema",
        ),
        (
            CHAT,
            chat(json!({"type": "json_object"}), json!({"structured_outputs": {"regex": "a"}})),
            "structured_outputs.regex",
            "cannot be combined with response_format.type",
        ),
        (CHAT, chat(json!({"type": "text"}), json!({"guided_choice": ["a", ""]})), "guided_choice", "must be an array"),
        (
            CHAT,
            chat(json!({"type": "text"}), json!({"structured_outputs": {"structural_tag": "{}"}})),
            "structured_outputs.structural_tag",
            "unknown",
        ),
        (
            CHAT,
            chat(json!({"type": "text"}), json!({"guided_json": "{"})),
            "guided_json",
            "the schema is not valid JSON",
        ),
        (
            CHAT,
            chat(json!({"type": "text"}), json!({"guided_regex": "a", "tools": [tool]})),
            "guided_regex",
            "cannot be combined with tools",
        ),
    ];
    for (path, body, field, problem) in cases {
        let (status, answer) = server.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{message}");
        assert!(message.starts_with(&format!("{field}: {problem}")), "{message}");
    }
    assert_eq!(server.busy_slots(), 0);
}

/// The bytes of tokens are known only for byte-fallback and byte-level decoders.
#[test]
fn a_format_for_tokens_of_unknown_bytes_is_refused() {
    let files = ["config.json", "generation_config.json", "model.safetensors"];
    let engine = with_tokenizer(&foretoken_tools::demo("target"), &files, |tokenizer| {
        tokenizer["decoder"] = json!({"type": "Fuse"});
    });
    let server = TestServer::start_on(engine, options());
    for (path, body, field) in [
        (CHAT, chat(json!({"type": "json_object"}), json!({})), "response_format.type"),
        (LLAMA, json!({"prompt": PROMPT, "grammar": "start: \"a\"\n"}), "grammar"),
    ] {
        let (status, answer) = server.post(path, &body);
        let error = &answer["error"];
        assert_eq!((status, &error["param"]), (400, &json!(field)), "{answer}");
        assert_eq!(error["code"], "unsupported_parameter", "{answer}");
        let message = error["message"].as_str().unwrap_or_default();
        assert!(message.starts_with(&format!("{field}: decoder of the tokenizer: is \"Fuse\"")), "{message}");
    }
}
