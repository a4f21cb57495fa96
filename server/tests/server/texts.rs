//! Texts are the library's own, however many are written at a time, whole and streamed.

use foretoken::chat::Json;
use foretoken::sampler::{Penalties, Xtc};
use foretoken::speculative::{BlockSize, DrafterOptions, Drafters};
use foretoken::{Engine, EngineOptions, GenerateOptions, Sampling, Speculation, SpeculationOptions, Stop};
use foretoken_server::{GenerateDefaults, Server, ServerOptions};
use serde_json::{Value, json};

use crate::support::{CHAT, LLAMA, MESSAGES, PROMPT, TEXT, TestServer, alone, copy_of, engine, options, with};

const PROMPTS: [&str; 8] = [
    PROMPT,
    "fn main() {\n",
    "/// Returns the",
    "use std::collections::HashMap;\n",
    "#[derive(Debug, Clone)]\npub struct ",
    "match self {\n",
    "impl fmt::Display for Error {\n",
    "// é, ü and 漢字\nlet text = \"",
];

/// Greedy by whatever means, and sampled where drafts do not depend on the clock.
fn cases() -> Vec<(Value, GenerateOptions)> {
    let greedy = GenerateOptions { max_tokens: 40, ..GenerateOptions::default() };
    let block = Speculation::With(SpeculationOptions {
        drafters: Drafters::Priority(vec![DrafterOptions::Mtp]),
        block: BlockSize::Fixed(4),
        ..SpeculationOptions::default()
    });
    let sampling = Sampling { temperature: 0.8, top_k: Some(50), top_p: 0.95, min_p: 0.02, ..Sampling::default() };
    let penalties = Penalties { repeat: 1.1, frequency: 0.5, presence: 0.2, last_n: None };
    let penalized = GenerateOptions { sampling: Sampling { penalties, ..Sampling::default() }, ..greedy.clone() };
    let sampled = GenerateOptions { sampling: sampling.clone(), seed: 7, speculation: block, ..greedy.clone() };
    let plain = GenerateOptions { sampling, seed: u64::MAX, speculation: Speculation::Off, ..greedy.clone() };
    let stopped = GenerateOptions {
        stop: Stop { strings: vec!["\n\n".into(), "self".into()], ..Stop::default() },
        ..greedy.clone()
    };
    vec![
        (json!({}), greedy),
        (
            json!({"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "seed": 7,
                "speculative": {"type": "mtp", "draft_block_size": 4}}),
            sampled,
        ),
        (
            json!({"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "seed": u64::MAX,
                "speculative": {"enabled": false}}),
            plain,
        ),
        (json!({"stop": ["\n\n", "self"]}), stopped),
        (
            json!({"repeat_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.2, "repeat_last_n": -1}),
            penalized,
        ),
    ]
}

#[test]
fn texts_of_concurrent_requests_are_the_librarys() {
    let server = TestServer::start(options());
    for (fields, generate) in &cases() {
        let want = PROMPTS.map(|prompt| alone(prompt, generate));
        for concurrent in [1, 4, 8] {
            let got: Vec<_> = std::thread::scope(|scope| {
                let ask = |prompt| {
                    let body = with(fields, json!({"prompt": prompt, "max_tokens": 40}));
                    let server = &server;
                    scope.spawn(move || server.ask(TEXT, &body)["choices"][0]["text"].clone())
                };
                let asked: Vec<_> = PROMPTS[..concurrent].iter().map(ask).collect();
                asked.into_iter().map(|thread| thread.join().expect("an answer")).collect()
            });
            assert_eq!(got, want[..concurrent], "{concurrent} at a time, {fields}");
        }
    }
}

#[test]
fn streams_are_whole_answers_in_pieces() {
    let server = TestServer::start(options());
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}]});
    for (fields, _) in &cases() {
        let fields = with(fields, json!({"max_tokens": 40, "logprobs": 3, "prompt": PROMPT}));
        let whole = server.ask(TEXT, &fields);
        let streamed = with(&fields, json!({"stream": true, "stream_options": {"include_usage": true}}));
        let chunks = server.chunks(TEXT, &streamed);
        let choices = || chunks.iter().filter_map(|chunk| chunk["choices"].get(0));
        let text: String = choices().filter_map(|choice| choice["text"].as_str()).collect();
        assert_eq!(whole["choices"][0]["text"], text);
        for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            let pieces: Vec<_> =
                choices().filter_map(|choice| choice["logprobs"][list].as_array()).flatten().cloned().collect();
            assert_eq!(whole["choices"][0]["logprobs"][list], json!(pieces), "{list}");
        }
        assert_eq!(choices().next_back().expect("one")["finish_reason"], whole["choices"][0]["finish_reason"]);
        assert_eq!(chunks.last().expect("one")["usage"], whole["usage"]);

        // Of a chat, and of llama.cpp's and Anthropic's routes, the same text.
        let mut fields = fields;
        fields.as_object_mut().expect("an object").retain(|name, _| name != "logprobs" && name != "prompt");
        let fields = with(&fields, json!({"stream": true}));
        let chunks = server.chunks(CHAT, &with(&fields, chat.clone()));
        let deltas = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
        assert_eq!(deltas.collect::<String>(), text);
        let own = json!({"prompt": PROMPT, "n_predict": 40, "max_tokens": null});
        let events = server.events(LLAMA, &with(&fields, own));
        assert_eq!(events.iter().filter_map(|(_, event)| event["content"].as_str()).collect::<String>(), text);
        let stop = with(&fields, json!({"stop_sequences": fields["stop"], "stop": null}));
        let events = server.events(MESSAGES, &with(&stop, chat.clone()));
        assert_eq!(events.iter().filter_map(|(_, event)| event["delta"]["text"].as_str()).collect::<String>(), text);
    }
}

#[test]
fn token_ids_and_log_probabilities() {
    let server = TestServer::start(options());
    let text = server.ask(TEXT, &json!({"prompt": PROMPT, "max_tokens": 12}));
    let tokens = server.tokens(PROMPT);
    let ids = server.ask(TEXT, &json!({"prompt": tokens, "max_tokens": 12}));
    assert_eq!(text["choices"], ids["choices"]);
    assert_eq!(text["usage"]["prompt_tokens"], tokens.len());

    let messages = json!([{"role": "user", "content": PROMPT}]);
    let body = json!({"messages": messages, "max_tokens": 12, "logprobs": true, "top_logprobs": 2});
    let chat = server.ask(CHAT, &body);
    assert_eq!(chat["choices"][0]["message"]["content"], text["choices"][0]["text"]);
    let content = chat["choices"][0]["logprobs"]["content"].as_array().expect("a list").clone();
    assert_eq!(content.len(), 12);
    let bytes = content.iter().flat_map(|token| token["bytes"].as_array().expect("a list").clone());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().expect("a byte") as u8).collect();
    assert_eq!(text["choices"][0]["text"], String::from_utf8(bytes).expect("a text"));
    for token in &content {
        let top = token["top_logprobs"].as_array().expect("a list");
        // Greedy: the token is the first of the most probable ones.
        assert_eq!((top.len(), &top[0]["token"], &top[0]["logprob"]), (2, &token["token"], &token["logprob"]));
        let [own, first, second] = [token, &top[0], &top[1]].map(|of| of["logprob"].as_f64().expect("a number"));
        assert!(first >= second && own <= 0.0 && token["token"].is_string(), "{token}");
    }
    // Sampled: the token is in the list, whether it is one of the most probable ones or not.
    let body = json!({"prompt": PROMPT, "max_tokens": 24, "logprobs": 1, "temperature": 2.0, "seed": 5});
    let sampled = server.ask(TEXT, &body)["choices"][0]["logprobs"].clone();
    let list = |name: &str| sampled[name].as_array().expect("a list").clone();
    let mut lengths = Vec::new();
    for ((token, logprob), top) in list("tokens").iter().zip(list("token_logprobs")).zip(list("top_logprobs")) {
        assert_eq!(top[token.as_str().expect("a text")], logprob, "{top}");
        lengths.push(top.as_object().expect("an object").len());
    }
    assert!(lengths.contains(&1) && lengths.contains(&2), "{lengths:?}");
    let none = server.ask(TEXT, &with(&body, json!({"logprobs": 0})));
    assert_eq!(none["choices"][0]["logprobs"]["top_logprobs"], json!(vec![json!({}); 24]));
}

#[test]
fn the_smallest_top_p_is_greedy() {
    let server = TestServer::start(options());
    let text = |more: Value| {
        let body = with(&json!({"prompt": PROMPT, "max_tokens": 24}), more);
        server.ask(TEXT, &body)["choices"][0]["text"].clone()
    };
    assert_eq!(text(json!({"temperature": 1.5, "top_p": 0, "seed": 5})), text(json!({"temperature": 0})));
}

/// Chats have the checkpoint's sampling parameters, or the server's.
#[test]
fn defaults_of_chats_replace_the_checkpoints() {
    let demo = foretoken_tools::demo("target");
    let directory = copy_of(&demo, &["config.json", "tokenizer.json", "model.safetensors"]);
    let config = r#"{"do_sample": true, "temperature": 2.0, "top_k": 1, "eos_token_id": [1]}"#;
    std::fs::write(directory.path().join("generation_config.json"), config).expect("written");
    let engine = Engine::load(&EngineOptions::new(directory.path())).expect("an engine");
    let start = |chat_sampling| {
        let mut options = options();
        options.defaults.chat_sampling = chat_sampling;
        TestServer::start_on(engine.clone(), options)
    };
    let text = |server: &TestServer, more: Value| {
        let body = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "seed": 5});
        server.ask(CHAT, &with(&body, more))["choices"][0]["message"]["content"].clone()
    };
    let (own, replaced) = (start(None), start(Some(Sampling { temperature: 2.0, ..Sampling::default() })));
    let greedy = text(&own, json!({"temperature": 0}));
    assert_eq!(text(&own, json!({})), greedy, "the checkpoint's top-k of 1");
    let all = text(&replaced, json!({}));
    assert_ne!(all, greedy);
    assert_eq!(all, text(&own, json!({"top_k": 0})));
}

/// The server's sampling parameters are those of requests without their own, and no others.
#[test]
fn defaults_of_sampling_are_those_of_requests() {
    let start = |sampling: Sampling| {
        let mut options = options();
        options.defaults.sampling = sampling;
        TestServer::start(options)
    };
    let text = |server: &TestServer, more: Value| {
        let body = with(&json!({"prompt": PROMPT, "n_predict": 32}), more);
        server.ask(LLAMA, &body)["content"].clone()
    };
    let penalties = Penalties { repeat: 1.5, frequency: 2.0, presence: 3.0, last_n: None };
    let xtc = Xtc { probability: 0.0, threshold: 0.0 };
    let defaults = Sampling { penalties, xtc: Some(xtc), top_n_sigma: Some(1e-4), ..Sampling::default() };
    let (none, some) = (start(Sampling::default()), start(defaults));
    let off = json!({"repeat_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0, "top_n_sigma": 0});
    let on = json!({"repeat_penalty": 1.5, "frequency_penalty": 2, "presence_penalty": 3, "repeat_last_n": -1});
    let (plain, penalized) = (text(&none, json!({})), text(&some, json!({})));
    assert_ne!(plain, penalized);
    assert_eq!(text(&none, on), penalized);
    assert_eq!(text(&some, off.clone()), plain);
    // A threshold alone is that of requests with a probability.
    let sampled = with(&off, json!({"temperature": 1.5, "seed": 3, "xtc_probability": 1}));
    let without = text(&none, with(&sampled, json!({"xtc_threshold": 0})));
    assert_eq!(text(&some, sampled.clone()), without);
    assert_ne!(text(&none, sampled), without);
}

/// Out of range they are refused at the start.
#[tokio::test]
async fn defaults_out_of_range_are_said_at_the_start() {
    let out = Sampling { min_p: 2.0, ..Sampling::default() };
    let of_chats = GenerateDefaults { chat_sampling: Some(out.clone()), ..GenerateDefaults::default() };
    let own = |name: &str| GenerateDefaults {
        variables: vec![(name.into(), Json::parse("[]").expect("JSON"))],
        ..GenerateDefaults::default()
    };
    for (defaults, problem) in [
        (GenerateDefaults { sampling: out, ..GenerateDefaults::default() }, "min_p: must be from 0 to 1"),
        (of_chats, "min_p: must be from 0 to 1"),
        (own("tools"), "variables: tools has a dedicated option; use that instead"),
    ] {
        let bound = Server::bind(engine(), ServerOptions { defaults, ..options() }).await;
        assert_eq!(bound.err().expect("an error").to_string(), problem);
    }
}
