//! Several texts of one prompt, and biased ones.

use std::collections::BTreeSet;

use foretoken::speculative::{BlockSize, DraftSampling};
use foretoken::{Engine, EngineOptions, GenerateOptions, Sampling, Speculation, SpeculationOptions};
use serde_json::{Value, json};

use crate::qwen;
use crate::support::{
    CHAT, LLAMA, PROMPT, TEXT, TestServer, alone, engine, keeping_nothing, load, long, options, wait_until, with,
};

/// The texts of an answer's choices.
fn texts(answer: &Value) -> Vec<String> {
    let choices = answer["choices"].as_array().expect("a list").iter();
    choices.map(|choice| choice["text"].as_str().expect("a text").to_owned()).collect()
}

/// The texts of so many choices, of a stream.
fn streamed_texts(chunks: &[Value], count: usize) -> Vec<String> {
    let mut texts = vec![String::new(); count];
    for choice in chunks.iter().filter_map(|chunk| chunk["choices"].get(0)) {
        texts[choice["index"].as_u64().expect("a number") as usize] += choice["text"].as_str().expect("a text");
    }
    texts
}

/// Choice `i` is the text of the request's seed plus `i`, from one reading of the prompt.
#[test]
fn choices_are_texts_of_their_seeds() {
    let server = TestServer::start_on(load(), keeping_nothing());
    let sampling = Sampling { temperature: 0.8, top_k: Some(50), ..Sampling::default() };
    let prompts = [PROMPT.to_owned(), PROMPT.repeat(40), "f".into()];
    for (prompt, n) in prompts.iter().zip([4, 8, 2]) {
        let want: Vec<String> = (0..n)
            .map(|i| GenerateOptions {
                max_tokens: 24,
                sampling: sampling.clone(),
                seed: 7 + i,
                speculation: Speculation::Off,
                ..GenerateOptions::default()
            })
            .map(|options| alone(prompt, &options))
            .collect();
        let body = json!({"prompt": prompt, "max_tokens": 24, "temperature": 0.8, "top_k": 50, "seed": 7, "n": n,
            "speculative": {"enabled": false}});
        let whole = server.ask(TEXT, &body);
        assert_eq!(texts(&whole), want);
        let written = whole["usage"]["completion_tokens"].as_u64().expect("a number");
        assert!(written > 24 && written <= 24 * n, "{}", whole["usage"]);

        let streamed = with(&body, json!({"stream": true, "stream_options": {"include_usage": true}}));
        let chunks = server.chunks(TEXT, &streamed);
        assert_eq!(streamed_texts(&chunks, want.len()), want);
        let ends = chunks.iter().filter(|chunk| chunk["choices"][0]["finish_reason"].is_string());
        assert_eq!(ends.count(), want.len());
        assert_eq!(chunks.last().expect("a chunk")["usage"], whole["usage"]);
    }
    // Greedy with drafts: all the same text. With a chat as well.
    let greedy = alone(PROMPT, &GenerateOptions { max_tokens: 40, ..GenerateOptions::default() });
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "n": 3});
    let chat = server.ask(CHAT, &chat);
    for (i, choice) in chat["choices"].as_array().expect("a list").iter().enumerate() {
        assert_eq!((&choice["index"], &choice["message"]["content"]), (&json!(i), &json!(greedy)));
    }
    assert_eq!(chat["choices"].as_array().map(Vec::len), Some(3));
    wait_until("sequences freed", || server.busy_slots() == 0);
    assert_eq!(server.metric("foretoken:kv_cache_bytes"), 0.0);
}

/// Every text begins with its own prompt, whole and streamed.
#[test]
fn prompts_are_echoed() {
    let server = TestServer::start(options());
    for prompt in [json!(PROMPT), json!(server.tokens(PROMPT)), json!(["fn main() {\n", PROMPT])] {
        let mut body = json!({"prompt": prompt, "max_tokens": 8, "n": 2});
        let plain = server.ask(TEXT, &body);
        body["echo"] = json!(true);
        let echoed = server.ask(TEXT, &body);
        assert_eq!(echoed["usage"]["completion_tokens"], plain["usage"]["completion_tokens"]);
        let last = texts(&echoed).len() - 2;
        let with_prompt =
            |(i, text): (usize, String)| format!("{}{text}", if i < last { "fn main() {\n" } else { PROMPT });
        let want: Vec<_> = texts(&plain).into_iter().enumerate().map(with_prompt).collect();
        assert_eq!(texts(&echoed), want);
        body["stream"] = json!(true);
        assert_eq!(streamed_texts(&server.chunks(TEXT, &body), want.len()), want);
    }
    let nothing = server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 0, "echo": true}));
    assert_eq!(texts(&nothing), [PROMPT]);
}

/// With log-probabilities, those of the prompt come first, of which the first token has none: what they are of a text
/// that is generated.
#[test]
fn prompts_are_echoed_with_log_probabilities() {
    let server = TestServer::start(options());
    let prompt = server.tokens(PROMPT);
    let body = json!({"prompt": PROMPT, "max_tokens": 40, "ignore_eos": true, "logprobs": 2});
    let written = server.ask(TEXT, &body)["choices"][0]["logprobs"].clone();
    let body = json!({"prompt": PROMPT, "n_predict": 40, "ignore_eos": true, "return_tokens": true});
    let text = server.ask(LLAMA, &body);
    let all = [prompt.as_slice(), text["tokens"].as_array().expect("a list")].concat();
    let read = server.ask(TEXT, &json!({"prompt": all, "max_tokens": 0, "echo": true, "logprobs": 2}));
    let read = read["choices"][0]["logprobs"].clone();
    let list = |of: &Value, name: &str| of[name].as_array().expect("a list").clone();
    assert_eq!((&read["token_logprobs"][0], &read["top_logprobs"][0]), (&Value::Null, &Value::Null));
    assert_eq!(list(&read, "tokens")[prompt.len()..], list(&written, "tokens"));
    let numbers = |of: &Value, name: &str| -> Vec<f64> {
        list(of, name).iter().map(|number| number.as_f64().unwrap_or(1.0)).collect()
    };
    let of_text = numbers(&read, "token_logprobs").split_off(prompt.len());
    for (read, written) in of_text.iter().zip(numbers(&written, "token_logprobs")) {
        assert!((read - written).abs() < 1e-3, "{read} and {written}");
    }
    let offsets = numbers(&written, "text_offset").into_iter().map(|offset| offset + PROMPT.len() as f64);
    assert_eq!(numbers(&read, "text_offset").split_off(prompt.len()), offsets.collect::<Vec<_>>());

    // Of every choice, whole and streamed. The prompts are cached by now, and read again.
    for max_tokens in [0, 4] {
        let mut body = json!({"prompt": [PROMPT, "fn main() {\n"], "max_tokens": max_tokens, "n": 2, "echo": true,
            "logprobs": 1, "ignore_eos": true});
        let whole = server.ask(TEXT, &body)["choices"].as_array().expect("a list").clone();
        assert_eq!(list(&whole[0]["logprobs"], "tokens").len(), prompt.len() + max_tokens);
        assert_eq!([&whole[0]["logprobs"], &whole[2]["logprobs"]], [&whole[1]["logprobs"], &whole[3]["logprobs"]]);
        body["stream"] = json!(true);
        let chunks = server.chunks(TEXT, &body);
        for (i, choice) in whole.iter().enumerate() {
            let of_choice =
                || chunks.iter().map(|chunk| &chunk["choices"][0]).filter(move |choice| choice["index"] == i);
            assert_eq!(of_choice().filter_map(|choice| choice["text"].as_str()).collect::<String>(), choice["text"]);
            for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let pieces = of_choice().flat_map(|choice| list(&choice["logprobs"], name)).collect::<Vec<_>>();
                assert_eq!(choice["logprobs"][name], json!(pieces), "{name} of choice {i}");
            }
        }
    }
}

/// Offsets are places in the text, which has the names of control tokens if the prompt is a text.
#[test]
fn offsets_of_prompts_with_control_tokens() {
    let server = TestServer::start(options());
    let tokenize = |text: &str, parse: bool| {
        let body = json!({"content": text, "parse_special": parse});
        server.ask("/tokenize", &body)["tokens"].as_array().expect("a list").clone()
    };
    let ids = [tokenize("<|turn>", true), tokenize("<|turn>fn", false)].concat();
    // The first tokens, so many, are not in the text.
    for (prompt, text, left_out) in [
        (json!("<|turn>user\nfn<turn|>"), "<|turn>user\nfn<turn|>", 1),
        (json!("<bos>fn<|turn>"), "<bos>fn<|turn>", 0),
        (json!(ids), "<|turn>fn", 1),
    ] {
        let body = json!({"prompt": prompt, "max_tokens": 1, "echo": true, "logprobs": 1, "ignore_eos": true});
        let answer = server.ask(TEXT, &body);
        let (choice, read) = (&answer["choices"][0], answer["usage"]["prompt_tokens"].as_u64().expect("a number"));
        assert!(choice["text"].as_str().is_some_and(|all| all.starts_with(text)), "{choice}");
        let lists = ["tokens", "text_offset"].map(|name| choice["logprobs"][name].as_array().expect("a list"));
        let mut characters = 0;
        for (i, (token, offset)) in lists[0].iter().zip(lists[1]).enumerate() {
            assert_eq!(*offset, characters, "token {i} of {choice}");
            characters += if i < left_out { 0 } else { token.as_str().expect("a text").chars().count() };
        }
        assert_eq!(lists[1][read as usize], text.chars().count(), "{choice}");
    }
}

/// The choices of several prompts are those of a request for each, in their order.
#[test]
fn several_prompts() {
    let server = TestServer::start_on(load(), keeping_nothing());
    let prompts = [PROMPT, "fn main() {\n", "f", "use std::collections::HashMap;\n", "match self {\n"];
    let tokens = prompts.map(|prompt| server.tokens(prompt));
    let body = json!({"max_tokens": 16, "temperature": 0.8, "seed": 3, "n": 2, "logprobs": 1, "frequency_penalty": 0.5,
        "speculative": {"enabled": false}});
    let of = |prompt: Value| with(&body, json!({"prompt": prompt}));
    let alone = prompts.map(|prompt| server.ask(TEXT, &of(json!(prompt))));
    let mut want: Vec<Value> =
        alone.iter().flat_map(|answer| answer["choices"].as_array().expect("a list").clone()).collect();
    want.iter_mut().enumerate().for_each(|(i, choice)| choice["index"] = json!(i));
    let count =
        |name: &str| -> u64 { alone.iter().map(|answer| answer["usage"][name].as_u64().expect("a number")).sum() };
    for prompt in [json!(prompts), json!(tokens)] {
        let all = server.ask(TEXT, &of(prompt.clone()));
        assert_eq!(all["choices"], json!(want));
        for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(all["usage"][name], count(name), "{name}");
        }
        let streamed = with(&of(prompt), json!({"stream": true, "stream_options": {"include_usage": true}}));
        let chunks = server.chunks(TEXT, &streamed);
        assert_eq!(streamed_texts(&chunks, want.len()), texts(&all));
        assert_eq!(chunks.last().expect("a chunk")["usage"], all["usage"]);
    }
    // More prompts than are decoded at a time.
    let many = json!({"prompt": vec!["f"; 20], "max_tokens": 2, "n": 2});
    assert_eq!(server.ask(TEXT, &many)["choices"].as_array().map(Vec::len), Some(40));
    wait_until("sequences freed", || server.busy_slots() == 0);
    assert_eq!(server.metric("foretoken:kv_cache_bytes"), 0.0);
}

/// The prompt of a later choice is the whole one, of which it computes the last token, also if the model has a recurrent
/// state.
#[test]
fn timings_of_later_choices() {
    [engine(), qwen::engine()].into_iter().for_each(check_timings);
}

fn check_timings(engine: &Engine) {
    let server = TestServer::start_on(engine.clone(), keeping_nothing());
    let stream =
        json!({"prompt": PROMPT, "max_tokens": 4, "n": 2, "stream": true, "stream_options": {"include_usage": true}});
    let chunks = server.chunks(TEXT, &stream);
    let prompt = chunks.last().expect("a chunk")["usage"]["prompt_tokens"].as_u64().expect("a number");
    let mut timings = [None, None];
    for chunk in &chunks {
        if let Some([cached, computed]) =
            chunk.get("timings").map(|of| ["cache_n", "prompt_n"].map(|name| of[name].as_u64()))
        {
            timings[chunk["choices"][0]["index"].as_u64().expect("an index") as usize] = cached.zip(computed);
        }
    }
    assert_eq!(timings, [Some((0, prompt)), Some((prompt - 1, 1))]);
}

/// Without a seed, a prompt given several times gets several samples. Seeds are random 32-bit numbers: of four pairs, two
/// are equal once in 10^9 runs. Texts do not end early, where they would be equal more often.
#[test]
fn equal_prompts_are_sampled_apart() {
    let server = TestServer::start(options());
    for (path, most, prompts, seed) in [(TEXT, "max_tokens", 3, None), (LLAMA, "n_predict", 2, Some(-1))] {
        let mut body = json!({"prompt": vec![PROMPT; prompts], "temperature": 1.5, "ignore_eos": true,
            "speculative": {"enabled": false}});
        body[most] = json!(48);
        if let Some(seed) = seed {
            body["seed"] = json!(seed);
        }
        let answer = server.ask(path, &body);
        let (choices, text) = if path == TEXT { (&answer["choices"], "text") } else { (&answer, "content") };
        let texts: BTreeSet<_> =
            choices.as_array().expect("a list").iter().map(|choice| choice[text].as_str().expect("a text")).collect();
        assert_eq!(texts.len(), prompts, "{path}: {texts:?}");
        // The seed that a response names gives the same text again.
        for answer in answer.as_array().into_iter().flatten() {
            body["prompt"] = json!(PROMPT);
            body["seed"] = answer["generation_settings"]["seed"].clone();
            let exact_in_javascript = body["seed"].as_u64().is_some_and(|seed| seed <= u32::MAX.into());
            assert!(exact_in_javascript, "{}", body["seed"]);
            assert_eq!(server.ask(path, &body)["content"], answer["content"]);
        }
    }
}

/// On llama.cpp's route, several prompts get an array of what each gets alone.
#[test]
fn several_prompts_of_llama_cpp() {
    let server = TestServer::start(keeping_nothing());
    let prompts = [PROMPT, "fn main() {\n", "f"];
    let tokens = prompts.map(|prompt| server.tokens(prompt));
    let with = |prompt: Value, streams: bool| {
        json!({"prompt": prompt, "n_predict": 12, "temperature": 0.8, "seed": 3, "n_probs": 1, "return_tokens": true,
            "stream": streams, "speculative": {"enabled": false},
            "response_fields": ["index", "content", "tokens", "tokens_predicted", "tokens_evaluated",
            "completion_probabilities"]})
    };
    let mut want = prompts.map(|prompt| server.ask(LLAMA, &with(json!(prompt), false)));
    want.iter_mut().enumerate().for_each(|(i, choice)| choice["index"] = json!(i));
    for prompt in [json!(prompts), json!(tokens), json!([prompts[0], tokens[1], prompts[2]])] {
        assert_eq!(server.ask(LLAMA, &with(prompt.clone(), false)), json!(want));
        let mut texts = vec![String::new(); want.len()];
        for (_, chunk) in server.events(LLAMA, &with(prompt, true)) {
            texts[chunk["index"].as_u64().expect("an index") as usize] += chunk["content"].as_str().expect("a text");
        }
        assert_eq!(texts, want.iter().map(|choice| choice["content"].as_str().expect("a text")).collect::<Vec<_>>());
    }
    // One prompt in an array is that prompt.
    assert_eq!(server.ask(LLAMA, &with(json!([prompts[0]]), false)), want[0]);
}

/// `best_of` that selects nothing.
#[test]
fn best_of_all_choices() {
    let server = TestServer::start(options());
    let body = json!({"prompt": PROMPT, "max_tokens": 4, "n": 2, "seed": 1, "temperature": 1,
        "speculative": {"enabled": false}});
    let all = server.ask(TEXT, &with(&body, json!({"best_of": 2})));
    assert_eq!(all["choices"], server.ask(TEXT, &body)["choices"]);
}

/// The places of all prompts are taken, or none.
#[test]
fn several_prompts_and_a_full_queue() {
    let server = TestServer::start(foretoken_server::ServerOptions { parallel: 2, max_queue: 2, ..options() });
    let stream = server.open(TEXT, &long(4000));
    wait_until("a sequence", || server.busy_slots() == 1);
    let four = json!({"prompt": ["a", "b", "c", "d"], "max_tokens": 1});
    let (status, error) = server.post(TEXT, &four);
    assert_eq!((status, &error["error"]["code"]), (429, &json!("queue_full")));
    drop(stream);
    wait_until("sequences freed", || server.busy_slots() == 0 && server.metric("vllm:num_requests_running") == 0.0);
    assert_eq!(server.ask(TEXT, &four)["choices"].as_array().map(Vec::len), Some(4));
}

/// A client that leaves frees all of its sequences, also while the prompt is read.
#[test]
fn choices_leave_together() {
    let server = TestServer::start_on(load(), keeping_nothing());
    for prompt in [json!(PROMPT), json!("let x = 1;\n".repeat(1000)), json!([PROMPT, "fn main() {\n"])] {
        let body = json!({"prompt": prompt, "max_tokens": 4000, "ignore_eos": true, "n": 4, "stream": true});
        let stream = server.open(TEXT, &body);
        wait_until("a sequence", || server.busy_slots() > 0);
        drop(stream);
        wait_until("sequences freed", || server.busy_slots() == 0 && server.metric("vllm:num_requests_running") == 0.0);
        // All eight places are free.
        let all = json!({"prompt": PROMPT, "max_tokens": 2, "n": 8});
        assert_eq!(server.ask(TEXT, &all)["choices"].as_array().map(Vec::len), Some(8));
    }
    assert_eq!(server.metric("foretoken:kv_cache_bytes"), 0.0);
}

#[test]
fn biased_tokens_and_origins() {
    let server = TestServer::start(options());
    let body = json!({"prompt": PROMPT, "max_tokens": 6, "logprobs": 1});
    let first =
        server.ask(LLAMA, &json!({"prompt": PROMPT, "n_predict": 1, "return_tokens": true}))["tokens"][0].clone();
    let biased = |bias: Value| texts(&server.ask(TEXT, &with(&body, json!({"logit_bias": bias}))));
    let plain = texts(&server.ask(TEXT, &body));
    assert_ne!(biased(json!({first.to_string(): -100})), plain);
    assert_ne!(biased(json!([[first, false]])), plain);
    assert_eq!(biased(json!({first.to_string(): 0})), plain);
    let x = server.ask("/tokenize", &json!({"content": "x"}))["tokens"][0].clone();
    assert_eq!(biased(json!({x.to_string(): 100})), ["xxxxxx"]);

    // Every token with its text, and whether it was drafted: as many as the timings say.
    let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 40, "stream": true,
        "token_origins": true, "speculative": {"draft_block_size": 4}});
    let chunks = server.chunks(CHAT, &body);
    let tokens: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["tokens"].as_array()).flatten().collect();
    let texts: String = tokens.iter().map(|token| token["text"].as_str().expect("a text")).collect();
    let contents: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    let drafted = tokens.iter().filter(|token| token["drafted"] == true).count();
    let timings = &chunks.last().expect("a chunk")["timings"];
    assert_eq!((texts.as_str(), tokens.len()), (contents.as_str(), 40));
    assert!(drafted > 0 && timings["draft_n_accepted"] == drafted, "{drafted}: {timings}");
}

/// A block size alone selects the assistant only if the server has no other drafters, and the draft model if there is no
/// assistant, as on the command line.
#[test]
fn block_sizes_without_an_assistant() {
    let target = EngineOptions::new(foretoken_tools::demo("target"));
    let with_draft_model = EngineOptions { draft_model: Some(target.model.clone()), ..target.clone() };
    let [target, with_draft_model] =
        [target, with_draft_model].map(|options| Engine::load(&options).expect("the demo model"));
    let listed = Speculation::With(SpeculationOptions {
        drafters: "ngram-map-k".parse().expect("a drafter"),
        ..SpeculationOptions::default()
    });
    let body = json!({"prompt": PROMPT, "max_tokens": 16, "speculative": {"draft_block_size": 4}});
    let want = alone(PROMPT, &GenerateOptions { max_tokens: 16, ..GenerateOptions::default() });
    let drafted = [(&target, listed), (&with_draft_model, Speculation::Auto)].map(|(engine, speculation)| {
        let mut options = options();
        options.defaults.speculation = speculation;
        let answer = TestServer::start_on(engine.clone(), options).ask(TEXT, &body);
        assert_eq!(answer["choices"][0]["text"], want);
        answer["timings"]["draft_n"].as_u64()
    });
    assert!(drafted[1] > Some(0), "{drafted:?}");
    let (status, error) = TestServer::start_on(target, options()).post(TEXT, &body);
    assert_eq!((status, &error["error"]["param"]), (400, &json!("speculative.draft_block_size")), "{error}");
}

/// A seed alone determines a sampled text, though the default drafts depend on measured times, and those of `ngram-mod`
/// on other requests.
#[test]
fn a_seed_determines_the_text() {
    let mut shared = options();
    shared.defaults.speculation = Speculation::With(SpeculationOptions {
        drafters: "ngram-mod".parse().expect("a drafter"),
        block: BlockSize::Fixed(8),
        ..SpeculationOptions::default()
    });
    let mut sampled = options();
    sampled.defaults.speculation = Speculation::With(SpeculationOptions {
        drafts: DraftSampling::Sampled,
        block: BlockSize::Fixed(4),
        ..SpeculationOptions::default()
    });
    // The server's seed is as good as the request's.
    sampled.defaults.seed = Some(11);
    let body = json!({"prompt": PROMPT, "max_tokens": 64, "temperature": 1, "seed": 11});
    let plain = with(&body, json!({"speculative": {"enabled": false}}));
    let without_seed = json!({"prompt": PROMPT, "max_tokens": 64, "temperature": 1});
    let want = TestServer::start(options()).ask(TEXT, &plain)["choices"].clone();
    let mut drafted = Vec::new();
    for (server, body) in [(options(), &body), (shared, &body), (sampled, &without_seed)] {
        let server = TestServer::start_on(load(), server);
        for _ in 0..2 {
            let response = server.ask(TEXT, body);
            assert_eq!(response["choices"], want);
            drafted.push(response["timings"]["draft_n"].as_u64());
        }
    }
    // Of the others, the clock and earlier requests decide.
    assert!(drafted[4] > Some(0), "{drafted:?}");
}
