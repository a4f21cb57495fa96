//! What clients of OpenAI's, vLLM's and llama.cpp's servers send and ask for.

use foretoken::sampler::Dry;
use foretoken::{GenerateOptions, Sampling};
use serde_json::{Value, json};

use crate::support::{
    CHAT, LLAMA, MESSAGES, PROMPT, RESPONSES, TEXT, TestServer, alone, anthropic_input, engine, options, with,
};

/// The text of an answer, whatever its route.
fn text(answer: &Value) -> &str {
    let places =
        ["/choices/0/message/content", "/choices/0/text", "/content", "/content/0/text", "/output/0/content/0/text"];
    places.iter().find_map(|place| answer.pointer(place)?.as_str()).expect("a text")
}

/// The library's samplers, on every route: each of these leaves one token at every place, whatever the seed.
#[test]
fn samplers_of_llama_cpp() {
    let server = TestServer::start(options());
    let greedy = text(&server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 8}))).to_owned();
    let bodies = [
        (TEXT, json!({"prompt": PROMPT, "max_tokens": 8})),
        (CHAT, json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8})),
        (LLAMA, json!({"prompt": PROMPT, "n_predict": 8})),
        (RESPONSES, json!({"input": PROMPT, "max_output_tokens": 8})),
    ];
    let samplers = [
        (json!({"top_n_sigma": 1e-4}), true),
        (json!({"typical_p": 1e-6}), false),
        (json!({"xtc_probability": 1, "xtc_threshold": 0}), false),
    ];
    for (sampler, is_greedy) in &samplers {
        let mut texts = Vec::new();
        for (path, body) in &bodies {
            for seed in [1, 2] {
                let sampled = with(body, json!({"temperature": 1.5, "seed": seed}));
                texts.push(text(&server.ask(path, &with(&sampled, sampler))).to_owned());
            }
        }
        assert!(texts.iter().all(|text| *text == texts[0]), "{sampler}: {texts:?}");
        assert_eq!(texts[0] == greedy, *is_greedy, "{sampler}: {texts:?}");
    }
}

/// The library's DRY, on every route, by the request's breakers or llama.cpp's.
#[test]
fn dry_of_llama_cpp() {
    let server = TestServer::start(options());
    let tokenizer = engine().tokenizer().expect("a tokenizer");
    let messages = json!([{"role": "user", "content": PROMPT}]);
    let bodies = [
        (TEXT, json!({"prompt": PROMPT, "max_tokens": 48})),
        (CHAT, json!({"messages": messages, "max_tokens": 48})),
        (LLAMA, json!({"prompt": PROMPT, "n_predict": 48})),
        (RESPONSES, json!({"input": PROMPT, "max_output_tokens": 48})),
        (MESSAGES, json!({"messages": messages, "max_tokens": 48})),
    ];
    let library = |dry: Option<Dry>| {
        let sampling = Sampling { dry, ..Sampling::default() };
        alone(PROMPT, &GenerateOptions { max_tokens: 48, sampling, ..GenerateOptions::default() })
    };
    let greedy = library(None);
    let dry = Dry { multiplier: 20.0, base: 2.0, allowed_length: 1, ..Dry::default() };
    assert_ne!(library(Some(dry.clone())), greedy);
    let fields = json!({"dry_multiplier": 20, "dry_base": 2, "dry_allowed_length": 1});
    for (more, last_n, breakers) in [
        (json!({"dry_sequence_breakers": []}), None, vec![]),
        (json!({"dry_penalty_last_n": -1}), None, vec!["\n", ":", "\"", "*"]),
        (json!({"dry_sequence_breakers": ["(", "e"], "dry_penalty_last_n": 20}), Some(20), vec!["e", "("]),
    ] {
        let breakers = breakers.iter().flat_map(|breaker| tokenizer.ids_with(breaker)).collect();
        let want = library(Some(Dry { last_n, breakers, ..dry.clone() }));
        for (path, body) in &bodies {
            let body = with(body, with(&fields, &more));
            assert_eq!(text(&server.ask(path, &body)), want, "{path} {more}");
            let off = text(&server.ask(path, &with(&body, json!({"dry_multiplier": 0})))).to_owned();
            assert_eq!(off, greedy, "{path} {more}");
        }
    }
    let body = with(&fields, json!({"prompt": PROMPT, "n_predict": 1, "samplers": "edskypmxt"}));
    let settings = server.ask(LLAMA, &body)["generation_settings"].clone();
    let names = ["dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "temperature"];
    assert_eq!(names.map(|name| settings[name].as_f64()), [20.0, 2.0, 1.0, -1.0, 0.0].map(Some), "{settings}");
}

/// The server's parameters of DRY: of requests that turn it on, or of all.
#[test]
fn dry_by_default() {
    let body = json!({"prompt": PROMPT, "max_tokens": 48});
    let start = |dry: Option<Dry>| {
        let mut options = options();
        options.defaults.sampling.dry = dry;
        TestServer::start(options)
    };
    let ask = |server: &TestServer, more: Value| text(&server.ask(TEXT, &with(&body, &more))).to_owned();
    let dry = Dry { multiplier: 2.0, base: 2.0, allowed_length: 1, ..Dry::default() };
    let fields = json!({"dry_multiplier": 2, "dry_base": 2, "dry_allowed_length": 1, "dry_sequence_breakers": []});
    let plain = start(None);
    let (greedy, want) = (ask(&plain, json!({})), ask(&plain, fields));
    assert_ne!(greedy, want);
    let on = start(Some(dry.clone()));
    assert_eq!(ask(&on, json!({})), want);
    assert_eq!(ask(&on, json!({"dry_multiplier": 0})), greedy);
    // Left out by a client that does not know of it.
    assert_eq!(ask(&on, json!({"samplers": ["top_k", "temperature"]})), greedy);
    let off = start(Some(Dry { multiplier: 0.0, ..dry }));
    assert_eq!(ask(&off, json!({})), greedy);
    assert_eq!(ask(&off, json!({"dry_multiplier": 2})), want);
}

#[test]
fn neutral_values_do_not_change_the_text() {
    let server = TestServer::start(options());
    let text_body = json!({"prompt": PROMPT, "max_tokens": 8});
    let want = text(&server.ask(TEXT, &text_body)).to_owned();
    let everywhere = [
        json!({"stop": ""}),
        json!({"stop": [""]}),
        json!({"seed": -7}),
        json!({"seed": -1}),
        json!({"seed": i64::MIN}),
        json!({"seed": u64::MAX}),
        json!({"logit_bias": {"5": "0"}}),
        json!({"max_tokens": 8.0}),
        json!({"samplers": "edskypmxt"}),
        json!({"samplers": "edkypmxt"}),
        json!({"samplers": ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]}),
        json!({"id_slot": 0, "timings_per_token": true, "return_progress": true, "reasoning_format": "auto"}),
        json!({"verbosity": "low", "functions": [], "function_call": "none", "best_of": 1, "echo": false}),
        json!({"length_penalty": 1.0, "use_beam_search": false, "bad_words": [], "priority": 0}),
        json!({"xtc_threshold": 0.1, "xtc_probability": 0, "dynatemp_exponent": 1.0, "dynatemp_range": 0.0}),
        json!({"dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dry_multiplier": 0}),
        json!({"dry_base": 0, "dry_allowed_length": 0, "dry_sequence_breakers": ["\n"]}),
        json!({"min_keep": 1, "image_data": [], "t_max_predict_ms": 0, "top_n_sigma": -1, "typical_p": 1.0}),
        json!({"backend_sampling": false, "n_cache_reuse": 0, "adaptive_target": -1.0, "adaptive_decay": 0.9}),
        json!({"min_tokens": 0}),
        json!({"min_tokens": 8, "ignore_eos": true}),
    ];
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8});
    let llama = json!({"prompt": PROMPT, "n_predict": 8});
    for more in &everywhere {
        assert_eq!(text(&server.ask(TEXT, &with(&text_body, more))), want, "{more}");
        assert_eq!(text(&server.ask(CHAT, &with(&chat, more))), want, "{more}");
        let mut more = more.clone();
        more.as_object_mut().expect("an object").remove("max_tokens");
        assert_eq!(text(&server.ask(LLAMA, &with(&llama, &more))), want, "{more}");
    }
    assert_eq!(text(&server.ask(CHAT, &with(&chat, json!({"top_logprobs": 0, "logprobs": false})))), want);
    let responses = json!({"input": PROMPT, "max_output_tokens": 8});
    for more in [
        json!({"truncation": "auto"}),
        json!({"include": ["reasoning.encrypted_content", "file_search_call.results"]}),
        json!({"max_tool_calls": 3, "client_metadata": {"a": "b"}}),
        json!({"prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": false}}),
    ] {
        assert_eq!(text(&server.ask(RESPONSES, &with(&responses, &more))), want, "{more}");
    }
    // One text per seed, negative ones too; a string is a bias.
    let sampled = with(&text_body, json!({"temperature": 1, "seed": -7, "max_tokens": 24}));
    assert_eq!(text(&server.ask(TEXT, &sampled)), text(&server.ask(TEXT, &sampled)));
    let x = server.ask("/tokenize", &json!({"content": "x"}))["tokens"][0].clone();
    let biased = with(&text_body, json!({"logit_bias": {x.to_string(): "100"}}));
    assert_eq!(text(&server.ask(TEXT, &biased)), "xxxxxxxx");
}

#[test]
fn no_limit_and_no_tokens() {
    let small = foretoken_server::ServerOptions { session: short_context(), ..options() };
    let server = TestServer::start(small);
    let prompt = server.tokens(PROMPT).len();
    let all = 64 - prompt + 1; // the last token takes no position
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}], "ignore_eos": true});
    for (path, body) in [
        (CHAT, with(&chat, json!({"max_tokens": -1}))),
        (CHAT, with(&chat, json!({"max_completion_tokens": -1}))),
        (TEXT, json!({"prompt": PROMPT, "ignore_eos": true, "max_tokens": -1})),
    ] {
        let answer = server.ask(path, &body);
        assert_eq!(
            (&answer["choices"][0]["finish_reason"], &answer["usage"]["completion_tokens"]),
            (&json!("length"), &json!(all))
        );
    }
    for n in [1, 2] {
        let answer = server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 0, "n": n}));
        assert_eq!(answer["choices"].as_array().map(Vec::len), Some(n));
        assert_eq!((text(&answer), &answer["choices"][n - 1]["finish_reason"]), ("", &json!("length")));
        let usage = &answer["usage"];
        assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(prompt), &json!(0)));
    }
    let chunks = server.chunks(TEXT, &json!({"prompt": PROMPT, "max_tokens": 0, "stream": true}));
    assert_eq!(chunks.last().expect("a chunk")["choices"][0]["finish_reason"], "length");
    let read = server.ask(LLAMA, &json!({"prompt": PROMPT, "n_predict": 0}));
    assert_eq!((text(&read), &read["tokens_predicted"], &read["stop_type"]), ("", &json!(0), &json!("limit")));
    assert_eq!(read["tokens_evaluated"], prompt);
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 0});
    let read = server.ask(MESSAGES, &body);
    assert_eq!((&read["content"], &read["stop_reason"]), (&json!([]), &json!("max_tokens")));
    assert_eq!((anthropic_input(&read), &read["usage"]["output_tokens"]), (json!(prompt), &json!(0)));
    let events = server.events(MESSAGES, &with(&body, json!({"stream": true})));
    let names: Vec<_> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["message_start", "ping", "message_delta", "message_stop"]);
}

fn short_context() -> foretoken::SessionOptions {
    let mut session = foretoken::SessionOptions::default();
    session.kv.max_context = Some(64);
    session
}

/// As in vLLM: a stop token is generated, and not part of the text.
#[test]
fn stop_tokens_are_not_part_of_the_text() {
    let server = TestServer::start(options());
    let body = json!({"prompt": PROMPT, "n_predict": 24, "return_tokens": true});
    let whole = server.ask(LLAMA, &body);
    let ids = whole["tokens"].as_array().expect("a list");
    let at = (6..).find(|at| ids[..*at].iter().all(|id| *id != ids[*at])).expect("a token that is new");
    let want = server.ask("/detokenize", &json!({"tokens": ids[..at]}))["content"].clone();
    let stop = json!({"stop_token_ids": [ids[at]]});
    let stopped = server.ask(LLAMA, &with(&body, &stop));
    assert_eq!(
        (&stopped["content"], &stopped["tokens"], &stopped["stop_type"]),
        (&want, &json!(ids[..=at]), &json!("eos"))
    );
    let messages = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24});
    for (path, body) in [(CHAT, messages), (TEXT, json!({"prompt": PROMPT, "max_tokens": 24, "logprobs": 0}))] {
        let answer = server.ask(path, &with(&body, &stop));
        assert_eq!(
            (text(&answer), &answer["choices"][0]["finish_reason"]),
            (want.as_str().expect("a text"), &json!("stop"))
        );
        assert_eq!(answer["usage"]["completion_tokens"], at + 1);
    }
}

/// As in vLLM: no stop token is among the first ones, and what is written before it is the same.
#[test]
fn stop_tokens_end_no_text_before_its_minimum() {
    let server = TestServer::start(options());
    let body = json!({"prompt": PROMPT, "n_predict": 64, "return_tokens": true});
    let whole = server.ask(LLAMA, &body);
    let ids = whole["tokens"].as_array().expect("a list");
    let at = (6..).find(|at| ids[..*at].iter().all(|id| *id != ids[*at])).expect("a token that is new");
    let stop = with(&body, json!({"stop_token_ids": [ids[at]]}));
    for (least, ends_there) in [(at, true), (at + 1, false), (at + 4, false)] {
        let answer = server.ask(LLAMA, &with(&stop, json!({"min_tokens": least})));
        let written = answer["tokens"].as_array().expect("a list");
        assert_eq!(written[..at], ids[..at], "{least}");
        assert_eq!(written.len() == at + 1 && written[at] == ids[at], ends_there, "{least}: {written:?}");
        assert!(written.len() > least && !written[..least].contains(&ids[at]), "{least}: {written:?}");
    }
}

#[test]
fn usage_of_every_chunk_and_selected_fields() {
    let server = TestServer::start(options());
    let stream = json!({"max_tokens": 12, "stream": true,
        "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    for (path, body) in
        [(TEXT, json!({"prompt": PROMPT})), (CHAT, json!({"messages": [{"role": "user", "content": PROMPT}]}))]
    {
        let chunks = server.chunks(path, &with(&body, &stream));
        let counts: Vec<_> = chunks.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64()).collect();
        assert!(counts.is_sorted() && counts[0].is_some(), "{path}: {counts:?}");
        assert_eq!(counts.last(), Some(&Some(12)));
    }
    let fields = json!(["content", "generation_settings/n_predict", "none"]);
    let body = json!({"prompt": PROMPT, "n_predict": 4, "response_fields": fields});
    let answer = server.ask(LLAMA, &body);
    assert_eq!(answer["n_predict"], 4);
    assert!(answer["content"].is_string() && answer.as_object().map(serde_json::Map::len) == Some(2), "{answer}");
    assert!(server.ask(LLAMA, &with(&body, json!({"response_fields": []})))["timings"].is_object());
}

#[test]
fn numbers_out_of_range_get_true_messages() {
    let server = TestServer::start(options());
    for (body, want) in [
        (r#"{"prompt": "fn", "temperature": 1e39}"#, "temperature: is 1e39, outside the range of 32-bit numbers"),
        (r#"{"prompt": "fn", "max_tokens": 99999999999999999999}"#, "max_tokens: is 1e20, must be an integer between"),
        (r#"{"prompt": "fn", "max_tokens": -2}"#, "max_tokens: is -2, must be at least 0, or -1 for no limit"),
        (r#"{"prompt": "fn", "max_tokens": 1.5}"#, "max_tokens: is a fractional number, must be an integer"),
        (
            r#"{"prompt": "fn", "response_format": {"type": "json_object", "schema": {"const": 18446744073709551617}}}"#,
            "response_format.schema: #: has the constant 1.8446744073709552e+19, of 2^63 or above",
        ),
    ] {
        let (status, error) = server.post_bytes(TEXT, body.as_bytes());
        let message = error["error"]["message"].as_str().expect("a message");
        assert!(status == 400 && message.starts_with(want), "{body}: {message}");
    }
}

/// vLLM's penalty counts the whole context, llama.cpp's the last 64 tokens.
#[test]
fn the_range_of_repetition_penalties() {
    let server = TestServer::start(options());
    let settings = |more: Value| {
        let body = with(&json!({"prompt": PROMPT, "n_predict": 1}), &more);
        server.ask(LLAMA, &body)["generation_settings"].clone()
    };
    for (more, want) in [
        (json!({"repeat_penalty": 1.5}), 64),
        (json!({"repetition_penalty": 1.5}), -1),
        (json!({"repetition_penalty": 1.5, "repeat_last_n": 32}), 32),
        (json!({"repeat_penalty": 1.5, "repetition_penalty": 1.2}), 64),
    ] {
        let settings = settings(more.clone());
        assert_eq!((&settings["repeat_last_n"], &settings["repeat_penalty"]), (&json!(want), &json!(1.5)), "{more}");
    }
}
