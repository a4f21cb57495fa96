//! Every route, in the shape that its clients read.

use foretoken::chat::{ChatTemplate, Json, Thinking};
use foretoken_server::{GenerateDefaults, ServerOptions};
use serde_json::{Value, json};

use crate::support::{
    CHAT, LLAMA, MESSAGES, PROMPT, RESPONSES, TEMPLATE, TEXT, TestServer, agent, anthropic_input, options, with,
};

#[test]
fn openai() {
    let server = TestServer::start(options());
    let messages = json!([{"role": "developer", "content": "// Rust\n"}, {"role": "user", "content": [{"type": "text", "text": PROMPT}]}]);
    let inert = json!({
        "model": "demo", "messages": messages, "max_tokens": 16, "user": "u", "metadata": {"a": "b"}, "store": true, "n": 1,
        "tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "frequency_penalty": 0, "presence_penalty": 0.0,
        "logit_bias": {}, "parallel_tool_calls": true, "seed": null, "stop": null, "service_tier": "auto",
    });
    let chat = server.ask(CHAT, &inert);
    assert!(chat["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")), "{chat}");
    assert_eq!((&chat["object"], &chat["model"]), (&json!("chat.completion"), &json!("demo")));
    let choice = &chat["choices"][0];
    assert_eq!((&choice["index"], &choice["message"]["role"]), (&json!(0), &json!("assistant")));
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("length"), &Value::Null));
    let usage = &chat["usage"];
    assert_eq!(usage["completion_tokens"], 16);
    assert_eq!(usage["total_tokens"].as_u64(), Some(16 + usage["prompt_tokens"].as_u64().expect("a number")));
    let timings = &chat["timings"];
    assert_eq!((&timings["prompt_n"], &timings["predicted_n"]), (&usage["prompt_tokens"], &json!(16)));
    for time in ["prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second", "predicted_per_token_ms"] {
        assert!(timings[time].as_f64() > Some(0.0), "{time}: {timings}");
    }
    let off = json!({"prompt": PROMPT, "max_tokens": 16, "speculative": {"enabled": false}});
    assert_eq!(server.ask(TEXT, &off)["timings"]["draft_n"], 0);
    let on = json!({"prompt": PROMPT, "max_tokens": 16, "speculative": {"enabled": true, "draft_block_size": 3}});
    let on = server.ask(TEXT, &on);
    assert!(on["timings"]["draft_n"].as_u64() > Some(0), "{on}");
    assert!(on["id"].as_str().is_some_and(|id| id.starts_with("cmpl-")) && on["object"] == "text_completion", "{on}");

    let stop = json!({"prompt": PROMPT, "max_tokens": 64, "stop": "\n"});
    assert_eq!(server.ask(TEXT, &stop)["choices"][0]["finish_reason"], "stop");

    let stream = json!({"messages": messages, "max_tokens": 16, "stream": true});
    let chunks = server.chunks(CHAT, &stream);
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"]));
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let last = chunks.last().expect("a chunk");
    assert_eq!((&last["choices"][0]["finish_reason"], &last["timings"]["predicted_n"]), (&json!("length"), &json!(16)));
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[test]
fn anthropic() {
    let server = TestServer::start(options());
    let body = json!({
        "model": "demo", "max_tokens": 24, "system": [{"type": "text", "text": "// Rust\n"}], "metadata": {"user_id": "u"},
        "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}], "thinking": {"type": "disabled"},
    });
    let whole = server.ask(MESSAGES, &body);
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("max_tokens"))
    );
    assert_eq!(
        (&whole["usage"]["output_tokens"], &whole["usage"]["cache_creation_input_tokens"]),
        (&json!(24), &json!(0))
    );
    let mut counted = body.clone();
    for field in ["max_tokens", "metadata"] {
        counted.as_object_mut().expect("an object").remove(field);
    }
    let counted = server.ask("/v1/messages/count_tokens", &counted);
    assert_eq!(counted["input_tokens"], anthropic_input(&whole));

    let text = whole["content"][0]["text"].as_str().expect("a text").to_owned();
    let stopped = server.ask(MESSAGES, &with(&body, json!({"stop_sequences": ["never written", &text[8..10]]})));
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(text[8..10])));

    let events = server.events(MESSAGES, &with(&body, json!({"stream": true})));
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert!(names[3..names.len() - 3].iter().all(|name| *name == "content_block_delta"));
    let (_, end) = &events[events.len() - 2];
    assert_eq!((&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(24)));

    let (status, error) = server.post(MESSAGES, &json!({"messages": []}));
    assert_eq!(
        (status, &error["type"], &error["error"]["type"]),
        (400, &json!("error"), &json!("invalid_request_error"))
    );
    let (status, error) = server.post("/v1/messages/none", &json!({}));
    assert_eq!((status, &error["error"]["type"]), (404, &json!("not_found_error")));
}

#[test]
fn llama_cpp() {
    let server = TestServer::start(options());
    let body = json!({"prompt": PROMPT, "n_predict": 12, "n_probs": 2, "return_tokens": true, "cache_prompt": true});
    let whole = server.ask(LLAMA, &body);
    assert_eq!(
        (&whole["stop"], &whole["stop_type"], &whole["tokens_predicted"]),
        (&json!(true), &json!("limit"), &json!(12))
    );
    assert_eq!(whole["completion_probabilities"].as_array().map(Vec::len), Some(12));
    let back = server.ask("/detokenize", &json!({"tokens": whole["tokens"]}));
    assert_eq!(back["content"], whole["content"]);
    // `max_tokens` is another name of `n_predict`.
    let again = server.ask(LLAMA, &json!({"prompt": PROMPT, "max_tokens": 12}));
    assert_eq!((&again["content"], &again["tokens_predicted"]), (&whole["content"], &json!(12)));
    assert_eq!(again["tokens_cached"], again["timings"]["cache_n"]);
    assert!(again["tokens_cached"].is_u64(), "{again}");
    let both = server.ask(LLAMA, &json!({"prompt": PROMPT, "n_predict": 3, "max_tokens": 12}));
    assert_eq!(both["tokens_predicted"], 3);
    let word = json!({"prompt": PROMPT, "stop": ["\n"]});
    let word = server.ask(LLAMA, &word);
    assert_eq!((&word["stop_type"], &word["stopping_word"]), (&json!("word"), &json!("\n")));

    let text = "fn main() {\n    let x = \"漢\";\n}";
    let tokens = server.ask("/tokenize", &json!({"content": text, "with_pieces": true}))["tokens"].clone();
    let bytes = tokens.as_array().expect("a list").iter().flat_map(|token| match &token["piece"] {
        Value::String(text) => text.as_bytes().to_vec(),
        piece => serde_json::from_value(piece.clone()).expect("bytes"),
    });
    assert_eq!(String::from_utf8(bytes.collect()).as_deref(), Ok(text));
    assert_eq!(server.ask("/tokenize", &json!({"content": ""})), json!({"tokens": []}));
    assert_eq!(server.ask("/tokenize", &json!({"content": "", "add_special": true})), json!({"tokens": [2]}));

    let props: Value = serde_json::from_str(&server.get("/props").1).expect("JSON");
    assert_eq!((&props["total_slots"], &props["default_generation_settings"]["n_ctx"]), (&json!(8), &json!(8192)));
    let defaults = &props["default_generation_settings"]["params"];
    assert_eq!((&defaults["temperature"], &defaults["seed"]), (&json!(0.0), &json!(-1)), "a random seed");
    let slots: Value = serde_json::from_str(&server.get("/slots").1).expect("JSON");
    assert_eq!(slots.as_array().map(Vec::len), Some(8));
}

#[test]
fn other_names_of_routes() {
    let server = TestServer::start(options());
    let text = json!({"prompt": PROMPT, "max_tokens": 4});
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4});
    for (path, twin, body) in [("/completions", TEXT, &text), ("/chat/completions", CHAT, &chat)] {
        assert_eq!(server.ask(path, body)["choices"], server.ask(twin, body)["choices"]);
    }
    for (path, twin) in [("/models", "/v1/models"), ("/v1/health", "/health")] {
        assert_eq!(server.get(path), server.get(twin));
    }
    for path in ["/v1/models/%ff", "/v1/models/", "/%ff", "/v1/models/a%2f..%ff"] {
        let (status, body) = server.get(path);
        let error: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"));
        assert_eq!((status, &error["error"]["type"]), (404, &json!("not_found_error")), "{path}");
    }
}

#[test]
fn templates_and_control_tokens() {
    let server = TestServer::start(options());
    let props: Value = serde_json::from_str(&server.get("/props").1).expect("JSON");
    let want = [json!(TEMPLATE), json!("<bos>"), json!("<eos>"), json!("demo")];
    assert_eq!(["chat_template", "bos_token", "eos_token", "model_path"].map(|name| props[name].clone()), want);

    let messages = json!([{"role": "system", "content": "// Rust\n"}, {"role": "user", "content": PROMPT}]);
    let prompt = server.ask("/apply-template", &json!({"messages": messages, "model": "demo"}))["prompt"].clone();
    assert_eq!(prompt, format!("// Rust\n{PROMPT}"));
    // As one: templates refuse a second one.
    let (first, second) = (json!({"role": "system", "content": "a"}), json!({"role": "system", "content": "b"}));
    let several = json!({"messages": [first, second, {"role": "user", "content": "c"}]});
    assert_eq!(server.ask("/apply-template", &several)["prompt"], "a\n\nbc");
    let chat = server.ask(CHAT, &json!({"messages": messages, "max_tokens": 8}));
    let text = server.ask(TEXT, &json!({"prompt": prompt, "max_tokens": 8}));
    assert_eq!(chat["choices"][0]["message"]["content"], text["choices"][0]["text"]);

    let with_content = |more: Value, content: &str| with(&more, json!({"content": content}));
    let tokens = |more: Value| {
        let body = with(&json!({"content": "a<eos>b"}), more);
        server.ask("/tokenize", &body)["tokens"].as_array().expect("a list").clone()
    };
    let (parsed, plain) = (tokens(json!({})), tokens(json!({"parse_special": false})));
    assert_eq!(tokens(json!({"parse_special": true})), parsed);
    assert!(parsed.len() == 3 && plain.len() > 3 && !plain.contains(&parsed[1]), "{parsed:?} {plain:?}");
    assert_eq!(server.ask("/detokenize", &json!({"tokens": plain}))["content"], "a<eos>b");
    let begun = tokens(json!({"parse_special": false, "add_special": true}));
    assert_eq!(begun, [&[json!(2)], plain.as_slice()].concat());
    // Templates spell <bos>, which is then a token of the text; never two.
    let begun = [&[json!(2)], parsed.as_slice()].concat();
    for more in [json!({}), json!({"add_special": true})] {
        assert_eq!(tokens(with_content(more, "<bos>a<eos>b")), begun);
    }
    assert_eq!(tokens(with_content(json!({}), "<bos>")), [json!(2)]);
    assert!(!tokens(with_content(json!({"parse_special": false}), "<bos>a")).contains(&json!(2)));
}

/// A template that takes system messages anywhere has them where they are.
#[test]
fn system_messages_stay_where_the_template_takes_them() {
    let source = "{% for message in messages %}{{ message.role }}={{ message.content }};{% endfor %}";
    let template = ChatTemplate::new(source.into(), "<bos>".into(), "<eos>".into()).expect("a template");
    let server = TestServer::start(ServerOptions { chat_template: Some(template), ..options() });
    let messages = json!([{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]);
    assert_eq!(server.ask("/apply-template", &json!({"messages": messages}))["prompt"], "user=a;system=b;");
}

/// The server's variables of the template are beside those of requests, on all routes of chats.
#[test]
fn default_variables_of_the_template() {
    let source = "{% if enable_thinking %}think {% endif %}{{ x }} {{ y }}: {{ messages[-1].content }}";
    let template = ChatTemplate::new(source.into(), "<bos>".into(), "<eos>".into()).expect("a template");
    let variables = vec![("x".to_owned(), Json::from("a")), ("y".to_owned(), Json::from("b"))];
    let defaults = GenerateDefaults { thinking: Thinking::On, variables, ..GenerateDefaults::default() };
    let server = TestServer::start(ServerOptions { chat_template: Some(template), defaults, ..options() });
    let messages = json!([{"role": "user", "content": "c"}]);
    for (more, want) in [
        (json!({}), "think a b: c"),
        (json!({"chat_template_kwargs": {"y": "d", "x": null}}), "think a d: c"),
        (json!({"chat_template_kwargs": {"enable_thinking": false}}), "a b: c"),
        (json!({"reasoning_effort": "none"}), "a b: c"),
        (json!({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": true}}), "think a b: c"),
    ] {
        let body = with(&json!({"messages": messages}), &more);
        assert_eq!(server.ask("/apply-template", &body)["prompt"], want, "{more}");
    }
    let tokens = |text: &str| json!(server.tokens(text).len());
    let on = json!({"messages": messages});
    let off = json!({"messages": messages, "thinking": {"type": "disabled"}});
    assert_eq!(server.ask("/v1/messages/count_tokens", &on)["input_tokens"], tokens("think a b: c"));
    assert_eq!(server.ask("/v1/messages/count_tokens", &off)["input_tokens"], tokens("a b: c"));
    let answer = server.ask(RESPONSES, &json!({"input": "c", "max_output_tokens": 1}));
    assert_eq!(answer["usage"]["input_tokens"], tokens("think a b: c"));
}

#[test]
fn the_model_is_described_in_both_apis() {
    let server = TestServer::start(options());
    let models: Value = serde_json::from_str(&server.get("/v1/models").1).expect("JSON");
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("demo"), &json!(8192)));
    // Anthropic's fields beside OpenAI's.
    let page = ["first_id", "last_id", "has_more"].map(|name| models[name].clone());
    assert_eq!(page, [json!("demo"), json!("demo"), json!(false)]);
    let (status, model) = server.get("/v1/models/demo");
    let model: Value = serde_json::from_str(&model).expect("JSON");
    assert_eq!((status, &model), (200, &models["data"][0]));
    assert_eq!((&model["type"], &model["display_name"]), (&json!("model"), &json!("demo")));
    assert_eq!((&model["created_at"], &model["lifecycle"]), (&json!("1970-01-01T00:00:00Z"), &json!("active")));
    assert_eq!(server.get("/v1/models/other").0, 404);
    // Errors, and the header of the id, are those of the client's API.
    let other = agent().get(server.url("/v1/models/other")).header("anthropic-version", "2023-06-01");
    let mut other = other.call().expect("an answer");
    assert_eq!((other.status().as_u16(), other.headers().contains_key("request-id")), (404, true));
    let error: Value = other.body_mut().read_json().expect("JSON");
    assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("not_found_error")));
}

#[test]
fn metrics_count_what_was_generated() {
    let server = TestServer::start(options());
    let body = json!({"prompt": PROMPT, "max_tokens": 20, "ignore_eos": true, "speculative": {"type": "mtp", "draft_block_size": 3}});
    let timings = server.ask(TEXT, &body)["timings"].clone();
    let of = |name: &str| server.metric(&format!("{name}{{model_name=\"demo\"}}"));
    assert_eq!(of("vllm:generation_tokens_total"), 20.0);
    assert_eq!(Some(of("vllm:prompt_tokens_total")), timings["prompt_n"].as_f64());
    assert_eq!(Some(of("vllm:spec_decode_num_draft_tokens_total")), timings["draft_n"].as_f64());
    assert_eq!(Some(of("vllm:spec_decode_num_accepted_tokens_total")), timings["draft_n_accepted"].as_f64());
    let (_, text) = server.get("/metrics");
    let by_drafter = |name: &str| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with(&format!("foretoken:drafter_{name}_tokens_total{{")));
        lines.map(|line| line.rsplit(' ').next().and_then(|count| count.parse::<f64>().ok()).expect("a number")).sum()
    };
    assert_eq!(Some(by_drafter("draft")), timings["draft_n"].as_f64(), "{text}");
    assert_eq!(Some(by_drafter("accepted")), timings["draft_n_accepted"].as_f64());
    assert!(text.contains("drafter=\"mtp\",position=\"0\""), "{text}");
    assert_eq!(of("vllm:e2e_request_latency_seconds_count"), 1.0);
    assert_eq!(server.metric("vllm:request_success_total{model_name=\"demo\",finished_reason=\"length\"}"), 1.0);
    assert_eq!(of("vllm:num_requests_running") + of("vllm:num_requests_waiting"), 0.0);
    let families = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let of_kind =
        |kind: &str| -> Vec<&str> { families.clone().filter(|(_, of)| *of == kind).map(|(name, _)| name).collect() };
    let counters = [
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:generation_tokens_total",
        "foretoken:rounds_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "foretoken:requests_refused_total",
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "foretoken:drafter_draft_tokens_total",
        "foretoken:drafter_accepted_tokens_total",
        "vllm:request_success_total",
    ];
    assert_eq!(of_kind("counter"), counters);
    assert_eq!(of_kind("histogram").len(), 4, "{text}");
    assert!(of_kind("gauge").contains(&"foretoken:kv_cache_bytes"), "{text}");
}

#[test]
fn routes_that_are_not_there() {
    let server = TestServer::start(options());
    assert_eq!(server.get("/health"), (200, r#"{"status":"ok"}"#.to_owned()));
    assert_eq!(server.get("/version"), (200, json!({"version": env!("CARGO_PKG_VERSION")}).to_string()));
    let (status, error) = server.post("/v1/embeddings", &json!({"input": "x"}));
    let message = error["error"]["message"].as_str().expect("a message");
    assert!(status == 501 && message.contains("embeddings"), "{error}");
    assert_eq!(server.get("/v1/nothing").0, 404);
    let response = agent().get(server.url(TEXT)).call().expect("an answer");
    assert_eq!((response.status().as_u16(), &response.headers()["allow"]), (405, &"POST".parse().expect("a value")));
}

/// The page is one file that runs by its nonce alone, and the description has every route.
#[test]
fn the_page_and_the_description() {
    let server = TestServer::start(ServerOptions { api_keys: vec!["key".into()], ..options() });
    let mut response = agent().get(server.url("/")).call().expect("an answer");
    let policy = response.headers()["content-security-policy"].to_str().expect("a text").to_owned();
    let page = response.body_mut().read_to_string().expect("a text");
    let nonce = policy.split("script-src 'nonce-").nth(1).and_then(|rest| rest.split('\'').next()).expect("a nonce");
    assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(page.matches(&format!("nonce=\"{nonce}\"")).count(), 2);
    assert!(!page.contains("{nonce}") && !page.contains("src=") && !page.contains("innerHTML"));
    let other = agent().get(server.url("/")).call().expect("an answer");
    assert_ne!(other.headers()["content-security-policy"], policy.as_str(), "a nonce is for one answer");

    assert_eq!(server.get("/openapi.json").0, 401);
    let mut described = agent().get(server.url("/openapi.json")).header("x-api-key", "key").call().expect("an answer");
    let text = described.body_mut().read_to_string().expect("a text");
    let described: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(described["info"]["version"], env!("CARGO_PKG_VERSION"));
    // The numbers that the page offers are those of requests.
    let fields = &described["components"]["schemas"]["ChatRequest"]["properties"];
    for input in page.split("<input id=\"").skip(1) {
        let id = input.split('"').next().expect("an id");
        let attribute = |name: &str| {
            let value = input.split('>').next()?.split(&format!(" {name}=\"")).nth(1)?.split('"').next()?;
            value.parse::<f64>().ok()
        };
        let is_within = |own: Option<f64>, limit: &str, sign: f64| {
            own.zip(fields[id][limit].as_f64()).is_none_or(|(own, limit)| sign * own >= sign * limit)
        };
        assert!(is_within(attribute("min"), "minimum", 1.0), "{id}");
        assert!(is_within(attribute("max"), "maximum", -1.0), "{id}");
    }
    for (path, methods) in described["paths"].as_object().expect("an object") {
        let url = server.url(&path.replace("{id}", "demo"));
        let status = match methods.get("post") {
            Some(_) => agent().post(url).header("x-api-key", "key").content_type("application/json").send("{}"),
            None => agent().get(url).header("x-api-key", "key").call(),
        };
        let want = if methods.get("post").is_some() { 400 } else { 200 };
        assert_eq!(status.expect("an answer").status().as_u16(), want, "{path}");
    }
}

/// What the description allows is served, and what it excludes is refused.
#[test]
fn requests_are_as_described() {
    let server = TestServer::start(options());
    let described: Value = serde_json::from_str(&server.get("/openapi.json").1).expect("JSON");
    let is_described = |path: &str, body: &Value| {
        let schema = &described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"];
        jsonschema::is_valid(&with(schema, json!({"components": described["components"]})), body)
    };
    let text = |kind: &str, text: &str| json!({"type": kind, "text": text});
    // The items of a response, sent back.
    let items = json!([
        {"role": "user", "content": PROMPT},
        {"type": "reasoning", "id": "rs_1", "status": "completed", "summary": [], "content": [text("reasoning_text", "a")]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
            "content": [with(&text("output_text", "b"), json!({"annotations": [], "logprobs": []}))]},
        {"type": "function_call", "id": "fc_1", "status": "completed", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [text("input_text", "c")]},
    ]);
    let messages = json!([{"role": "user", "content": PROMPT}]);
    let tool = json!({"type": "custom", "name": "f", "input_schema": {"type": "object"}});
    let prompt = json!({"prompt": PROMPT, "max_tokens": 1});
    let chat = json!({"messages": messages, "max_tokens": 1});
    let response = json!({"input": items, "max_output_tokens": 1});
    let (plain, no_schema) = (json!({"type": "text"}), json!({"type": "json_schema"}));
    let bodies = [
        (CHAT, &chat, json!({"reasoning_effort": "max"}), json!({"reasoning_effort": "most"})),
        (
            CHAT,
            &chat,
            json!({"add_generation_prompt": false}),
            json!({"add_generation_prompt": false, "continue_final_message": 1}),
        ),
        (TEXT, &prompt, json!({"frequency_penalty": -100}), json!({"frequency_penalty": -101})),
        (TEXT, &prompt, json!({"repeat_penalty": 10}), json!({"repeat_penalty": 0.05})),
        (TEXT, &prompt, json!({"echo": true}), json!({"echo": 1})),
        (TEXT, &prompt, json!({"logit_bias": {"300": "-1.5"}}), json!({"logit_bias": {"300": 1e31}})),
        (TEXT, &prompt, json!({"seed": u64::MAX}), json!({"seed": 1e30})),
        (
            TEXT,
            &prompt,
            json!({"speculative": {"draft_block_size": 512}}),
            json!({"speculative": {"draft_block_size": 513}}),
        ),
        (CHAT, &chat, json!({"logit_bias": [[300, -5], [301, false]]}), json!({"max_tokens": 0})),
        (RESPONSES, &response, json!({"text": {"format": plain}}), json!({"text": {"format": no_schema}})),
        (RESPONSES, &response, json!({"chat_template_kwargs": {"a": 1}}), json!({"chat_template_kwargs": 1})),
        (RESPONSES, &response, json!({"reasoning_effort": "none"}), json!({"reasoning_effort": "most"})),
        (
            RESPONSES,
            &response,
            json!({"include": ["reasoning.encrypted_content", "web_search_call.results"], "truncation": "auto"}),
            json!({"include": ["message.output_text.logprobs"]}),
        ),
        (MESSAGES, &chat, json!({"tools": [tool], "stop_sequences": [""]}), json!({"tools": vec![tool; 1025]})),
        (LLAMA, &prompt, json!({"response_fields": ["content"]}), json!({"response_fields": vec!["a"; 65]})),
        (LLAMA, &prompt, json!({"response_format": plain}), json!({"response_format": no_schema})),
    ];
    for (path, body, allowed, excluded) in &bodies {
        let allowed = with(&with(body, allowed), json!({"repetition_penalty": 1.5, "min_tokens": 1}));
        assert!(is_described(path, &allowed), "{path}: {allowed}");
        server.ask(path, &allowed);
        let excluded = with(body, excluded);
        assert!(!is_described(path, &excluded), "{path}: {excluded}");
        assert_eq!(server.post(path, &excluded).0, 400, "{path}: {excluded}");
    }
}

#[test]
fn request_ids_and_keys() {
    let keys = vec!["first key".to_owned(), "second".to_owned()];
    let server = TestServer::start(ServerOptions { api_keys: keys, ..options() });
    let models = |header: &str, value: &str| {
        let response = agent().get(server.url("/v1/models")).header(header, value).call().expect("an answer");
        assert!(response.headers().get("access-control-allow-origin").is_none());
        (response.status().as_u16(), response.headers()["x-request-id"].to_str().expect("a text").to_owned())
    };
    for (header, value, status) in [
        ("authorization", "Bearer second", 200),
        ("authorization", "bearer first key", 200),
        ("x-api-key", "first key", 200),
        ("authorization", "Bearer", 401),
        ("authorization", "Bearer secon", 401),
        ("authorization", "Bearer second ", 200), // white space around a header's value is not part of it
        ("authorization", "Basic second", 401),
        ("x-api-key", "", 401),
        ("x-other", "second", 401),
    ] {
        assert_eq!(models(header, value).0, status, "{header}: {value:?}");
    }
    assert_eq!(server.get("/health").0, 200);
    assert_eq!(server.get("/nothing").0, 401, "routes are told to those with a key");
    let (status, error) = server.post(TEXT, &json!({"prompt": PROMPT}));
    assert_eq!((status, &error["error"]["code"]), (401, &json!("invalid_api_key")));
    let (status, error) = server.post(MESSAGES, &json!({}));
    assert_eq!((status, &error["error"]["type"]), (401, &json!("authentication_error")));

    // Another site's name that resolves to this address.
    for (host, status) in [("localhost:1", 200), ("evil.example", 403), ("evil.example:80", 403)] {
        let get = agent().get(server.url("/v1/models")).header("host", host).header("x-api-key", "second");
        assert_eq!(get.call().expect("an answer").status().as_u16(), status, "{host}");
    }
    let other = agent().post(server.url(MESSAGES)).header("host", "evil.example").header("x-api-key", "second");
    let refused = other.content_type("application/json").send("{}").expect("an answer").body_mut().read_to_string();
    assert!(refused.as_ref().is_ok_and(|error| error.contains("\"permission_error\"")), "{refused:?}");

    assert_eq!(models("x-request-id", "my-id_1.2").1, "my-id_1.2");
    assert_eq!(models("x-request-id", "not a plain id").1.len(), 32);
    let longest = "a".repeat(64);
    assert_eq!(models("x-request-id", &longest).1, longest);
    assert_eq!(models("x-request-id", &format!("{longest}a")).1.len(), 32);
    // Anthropic's clients read another header.
    for (path, is_anthropics) in [(MESSAGES, true), ("/v1/messages/count_tokens", true), (TEXT, false)] {
        let request = agent().post(server.url(path)).header("x-api-key", "second").content_type("application/json");
        let response = request.send("{}").expect("an answer");
        let [own, other] = ["x-request-id", "request-id"].map(|name| response.headers().get(name));
        assert_eq!(other, own.filter(|_| is_anthropics), "{path}");
    }
}
