//! Bad input gives a one-line error that names the file, field or tensor and the remedy: no panic, no allocation of an
//! unchecked size, and exit code 1 on the command line.

#[path = "../tools/tests/example/mod.rs"]
mod example;
mod gguf_writer;
mod refusal;
#[path = "../kernels/tests/skipped/mod.rs"]
mod skipped;
mod twins;

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::ops::Deref;
use std::path::Path;
use std::process::{Command, Output};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use example::example;
use foretoken::chat::{ChatOptions, ChatTemplate, Message};
use foretoken::hub::{self, HubOptions};
use foretoken::speculative::{
    BlockSize, DrafterOptions, Drafters, MtpPreset, NgramCache, NgramCacheOptions, NgramSimpleOptions, Trace,
};
use foretoken::tokenizer::Tokenizer;
use foretoken::{
    Cancel, DeviceChoice, ElementType, Engine, EngineOptions, Error, GenerateOptions, Isa, Result, Sampling,
    SessionOptions, Speculation, SpeculationOptions, Stop, WeightType,
};
use refusal::{refused, says};
use safetensors::Dtype;
use serde_json::{Value, json};
use twins::Twin;

/// The `edge` fixture's pair, to be corrupted.
struct Pair(Twin);

impl Deref for Pair {
    type Target = Twin;

    fn deref(&self) -> &Twin {
        &self.0
    }
}

impl Pair {
    fn new() -> Self {
        Self(Twin::of("edge"))
    }

    /// Changes a field of a configuration; `name` is a path (`text_config.head_dim`).
    fn set(&self, file: &str, name: &str, value: Value) {
        self.json(file, |config| {
            let (parents, field) = name.rsplit_once('.').unwrap_or(("", name));
            let parents = parents.split('.').filter(|parent| !parent.is_empty());
            parents.fold(config, |at, name| &mut at[name])[field] = value;
        });
    }

    fn engine(&self) -> Result<Engine> {
        let options = EngineOptions::new(self.path("target")).with_assistant(self.path("assistant"));
        Engine::load(&EngineOptions { threads: Some(1), ..options })
    }

    /// Checks that loading the pair fails with an error that contains everything in `about`.
    #[track_caller]
    fn refused(&self, about: &[&str]) {
        refused(self.engine(), about);
    }
}

const TARGET: &str = "target/config.json";
const ASSISTANT: &str = "assistant/config.json";
const WEIGHTS: &str = "target/model.safetensors";
const DRAFTER: &str = "assistant/model.safetensors";

#[test]
fn the_untouched_pair_is_accepted() {
    let pair = Pair::new();
    let engine = pair.engine().expect("an engine");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let generation = session.generate(&[2, 3], &GenerateOptions::default()).expect("a generation");
    assert!(generation.map(|piece| piece.expect("a piece").tokens.len()).sum::<usize>() > 0);
}

#[test]
fn missing_files() {
    for (file, remedy) in [(TARGET, "check the path"), (WEIGHTS, "check the path"), (DRAFTER, "check the path")] {
        let pair = Pair::new();
        std::fs::remove_file(pair.path(file)).expect("it was there");
        pair.refused(&[file, remedy]);
    }
    let pair = Pair::new();
    refused(Engine::load(&EngineOptions::new(pair.path("nowhere"))), &["nowhere", "check the path"]);
    let options = EngineOptions::new(pair.path("target")).with_assistant(pair.path("nothing"));
    refused(Engine::load(&options), &["nothing", "check the path"]);
    // Token ids work without a tokenizer; text does not.
    let engine = pair.engine().expect("an engine");
    refused(engine.tokenizer(), &["no tokenizer", "token ids"]);
    let stop = Stop { strings: vec!["x".into()], ..Stop::default() };
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let generation = session.generate(&[5], &GenerateOptions { stop, ..GenerateOptions::default() });
    refused(generation.map(drop), &["stop.strings: need a tokenizer"]);
    let message = Message::user("Hello");
    refused(engine.encode_chat(&[message], &ChatOptions::default()), &["chat template", "plain prompt"]);
}

#[test]
fn a_directory_where_a_file_is_expected_and_the_reverse() {
    for file in [TARGET, WEIGHTS, "target/generation_config.json", ASSISTANT, DRAFTER, "target/tokenizer.json"] {
        let pair = Pair::new();
        let _ = std::fs::remove_file(pair.path(file));
        std::fs::create_dir(pair.path(file)).expect("a directory");
        pair.refused(&[file, "directory", "expected"]);
    }
    let pair = Pair::new();
    refused(Engine::load(&EngineOptions::new(pair.path(WEIGHTS))), &[WEIGHTS, "is a file", "directory"]);
    // The directory around both checkpoints is none.
    let around = Engine::load(&EngineOptions::new(pair.path("target").parent().expect("a directory")));
    refused(around, &["contains checkpoints; use one of them: assistant, target"]);
}

#[test]
fn safetensors_headers() {
    let pair = Pair::new();
    let whole = std::fs::read(pair.path(WEIGHTS)).expect("a file");
    let header = usize::try_from(u64::from_le_bytes(whole[..8].try_into().expect("8 bytes"))).expect("a length");
    // Truncated in the length, in the header, right after it, and in the data.
    for len in [0, 1, 7, 8, 100, 8 + header - 1, 8 + header, whole.len() / 2, whole.len() - 1] {
        pair.write(WEIGHTS, &whole[..len]);
        pair.refused(&[WEIGHTS, "download it again"]);
    }
    // Header lengths beyond the file, or beyond any file.
    for claimed in [whole.len() as u64, 1 << 32, 1 << 62, u64::MAX] {
        let mut bytes = whole.clone();
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        pair.write(WEIGHTS, &bytes);
        pair.refused(&[WEIGHTS, "download it again"]);
    }
    // Trailing bytes that belong to no tensor.
    pair.write(WEIGHTS, [&whole[..], &[0; 16]].concat());
    pair.refused(&[WEIGHTS, "download it again"]);
    // Well-formed but wrong headers: offsets beyond the file or reversed, sizes that overflow.
    for (shape, offsets) in [
        (json!([4]), json!([0, 1_u64 << 40])),
        (json!([4]), json!([16, 0])),
        (json!([4]), json!([u64::MAX - 3, u64::MAX])),
        (json!([1_u64 << 33, 1_u64 << 33]), json!([0, 16])),
        (json!([u64::MAX]), json!([0, 16])),
        (json!([5]), json!([0, 16])),
        (json!([-4]), json!([0, 16])),
    ] {
        let header = json!({"x": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).to_string();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 16]].concat();
        pair.write(WEIGHTS, bytes);
        pair.refused(&[WEIGHTS, "download it again"]);
    }
    for header in ["{", "[]", "nonsense", "\u{FFFD}"] {
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        pair.write(WEIGHTS, bytes);
        pair.refused(&[WEIGHTS, "download it again"]);
    }
}

#[test]
fn tensors_that_are_not_what_the_configuration_implies() {
    let name = "model.layers.1.mlp.down_proj.weight";
    let pair = Pair::new();
    pair.tensors(WEIGHTS, |tensors| drop(tensors.remove(name)));
    pair.refused(&["target", name, "is missing"]);

    let pair = Pair::new();
    pair.tensors(WEIGHTS, |tensors| tensors.get_mut(name).expect("a tensor").1.reverse());
    pair.refused(&["target", name, "[96, 64]", "[64, 96]"]);

    let pair = Pair::new();
    pair.tensors(WEIGHTS, |tensors| tensors.get_mut(name).expect("a tensor").0 = Dtype::I32);
    pair.refused(&["target", name, "is i32", "convert"]);

    let pair = Pair::new();
    pair.tensors(WEIGHTS, |tensors| tensors.retain(|name, _| !name.contains("embed_tokens.")));
    pair.refused(&["target", "embed_tokens.weight", "is missing"]);

    let pair = Pair::new();
    pair.tensors(DRAFTER, |tensors| drop(tensors.remove("pre_projection.weight")));
    pair.refused(&["assistant", "pre_projection.weight", "is missing"]);

    let pair = Pair::new();
    pair.tensors(DRAFTER, |tensors| drop(tensors.remove("model.layers.0.layer_scalar")));
    pair.refused(&["assistant", "model.layers.0.layer_scalar", "is missing"]);
}

#[test]
fn values_that_are_unknown() {
    for (field, value, about) in [
        ("model_type", json!("gemma5"), ["model_type", "gemma5"]),
        ("model_type", json!("gemma4_assistant"), ["model_type", "use it as the assistant"]),
        ("hidden_activation", json!("swiglu"), ["hidden_activation", "gelu_pytorch_tanh"]),
        ("layer_types", json!(["sliding_attention", "linear_attention"]), ["layer_types", "linear_attention"]),
        ("layer_types", json!(["full_attention"]), ["layer_types", "8 layers"]),
        ("layer_types", json!("full_attention"), ["layer_types", "a list of strings"]),
        (
            "rope_parameters.full_attention.rope_type",
            json!("yarn"),
            ["rope_parameters.full_attention.rope_type", "yarn"],
        ),
        ("rope_parameters.sliding_attention.rope_type", json!(7), ["rope_type", "a string"]),
        ("rope_parameters.full_attention.partial_rotary_factor", json!(2.0), ["partial_rotary_factor", "0 to 1"]),
        ("rope_parameters.full_attention.rope_theta", json!(-1), ["rope_theta", "positive"]),
        ("attention_bias", json!(true), ["attention_bias", "not implemented"]),
        ("use_bidirectional_attention", json!("all"), ["use_bidirectional_attention", "causally"]),
        ("attn_logit_softcapping", json!(50.0), ["attn_logit_softcapping", "not implemented"]),
        ("rms_norm_eps", json!(-1e-6), ["rms_norm_eps", "negative"]),
        ("final_logit_softcapping", json!(0.0), ["final_logit_softcapping", "positive"]),
        ("num_kv_shared_layers", json!(8), ["num_kv_shared_layers", "leaves no layer"]),
        ("num_kv_shared_layers", json!(9), ["num_kv_shared_layers", "8 layers"]),
        ("num_key_value_heads", json!(3), ["num_key_value_heads", "do not divide"]),
        ("head_dim", json!(33), ["head_dim", "even"]),
        ("eos_token_id", json!("</s>"), ["eos_token_id", "token id"]),
        ("hidden_size", Value::Null, ["tensor", "implies"]),
        ("hidden_size", json!("64"), ["hidden_size", "an integer"]),
        ("hidden_size", json!(64.5), ["hidden_size", "an integer"]),
        ("hidden_size", json!(-64), ["hidden_size", "an integer"]),
        ("hidden_size", json!(0), ["hidden_size", "is 0"]),
    ] {
        let pair = Pair::new();
        pair.set(TARGET, field, value);
        pair.refused(&[&["target"][..], &about].concat());
    }
    let pair = Pair::new();
    pair.set(TARGET, "layer_types", Value::Null);
    pair.set(TARGET, "sliding_window_pattern", json!(5));
    pair.refused(&["target", "sliding_window_pattern", "layer_types"]);
}

/// Sizes beyond any machine are rejected before anything of that size is allocated or computed,
/// which would abort or overflow.
#[test]
fn absurd_numbers() {
    let sizes = [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "global_head_dim",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "num_kv_shared_layers",
    ];
    for size in sizes {
        for absurd in [json!(1_000_000_000), json!(2_147_483_646), json!(1_u64 << 31), json!(u64::MAX), json!(1e300)] {
            let pair = Pair::new();
            pair.set(TARGET, size, absurd);
            // Layers are derived from the count; with a list of types, that would fail first.
            pair.set(TARGET, "layer_types", Value::Null);
            pair.refused(&["target"]);
        }
    }
    for (field, about) in [
        ("num_centroids", "num_centroids"),
        ("centroid_intermediate_top_k", "centroid_intermediate_top_k"),
        ("text_config.num_hidden_layers", "num_hidden_layers"),
        ("text_config.hidden_size", "assistant"),
        ("text_config.intermediate_size", "assistant"),
        ("backbone_hidden_size", "hidden_size"),
    ] {
        for absurd in [json!(1_000_000_000), json!(u64::MAX)] {
            let pair = Pair::new();
            pair.set(ASSISTANT, field, absurd);
            pair.refused(&[about]);
        }
    }
    // A window or context of any size takes no memory until it is filled.
    let pair = Pair::new();
    pair.set(TARGET, "sliding_window", json!(2_147_483_647));
    pair.set(ASSISTANT, "text_config.sliding_window", json!(2_147_483_647));
    pair.set(TARGET, "max_position_embeddings", json!(2_147_483_647));
    let engine = pair.engine().expect("an engine");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let generation = session.generate(&[2, 3], &GenerateOptions::default()).expect("a generation");
    generation.for_each(|piece| drop(piece.expect("a piece")));
    assert!(session.kv().bytes() < 16 << 20, "{} bytes", session.kv().bytes());
}

#[test]
fn files_that_are_no_json() {
    for file in [TARGET, ASSISTANT, "target/generation_config.json", "target/tokenizer_config.json"] {
        for (content, about) in [
            (&b""[..], "valid JSON"),
            (b"{\"hidden_size\": 64", "correct it, or download it again"),
            (b"{\n\n\"hidden_size\": 64,,\n}", "valid JSON"),
            (b"[1, 2]", "is not a JSON object; download it again"),
            (b"null", "JSON object"),
            (b"{\"a\": \xFF}", "is not UTF-8 from byte 6 on; save it as UTF-8"),
            (b"{\"a\": NaN}", "NaN is not a JSON number; write null"),
            (&[b'['; 100_000], "valid JSON"),
        ] {
            let pair = Pair::new();
            pair.write(file, content);
            pair.refused(&[file, about]);
        }
    }
}

#[test]
fn tokenizers() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
    let pair = Pair::new();
    std::fs::copy(&demo, pair.path("target/tokenizer.json")).expect("a copy");
    // The fixture's vocabulary has 512 entries, this tokenizer 4096.
    pair.refused(&["target/tokenizer.json", "id 4095", "512", "came with the checkpoint"]);

    for content in [&b"{}"[..], b"", b"{\"model\": {\n\"type\": \"Unheard\"}}", b"\xFF\xFE"] {
        pair.write("target/tokenizer.json", content);
        pair.refused(&["target/tokenizer.json"]);
    }
    let tokenizer = Tokenizer::read(&demo, 4096).expect("the demo's tokenizer");
    refused(tokenizer.encode(""), &["prompt: is empty"]);
}

#[test]
fn chat_templates() {
    let pair = Pair::new();
    // One that does not compile is an error of chats alone.
    pair.write("target/chat_template.jinja", "{% for message in messages %}\nno end");
    let engine = pair.engine().expect("an engine");
    let chat = engine.encode_chat(&[Message::user("Hello")], &ChatOptions::default());
    refused(chat, &["chat template", "syntax error"]);
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let options = GenerateOptions { max_tokens: 1, ..GenerateOptions::default() };
    session.generate(&[2, 3], &options).expect("a generation").for_each(|piece| drop(piece.expect("a piece")));
    pair.write("target/chat_template.jinja", b"\xFF");
    pair.refused(&["chat_template.jinja", "UTF-8"]);

    let source = "{{ raise_exception('roles must\nalternate') }}";
    let template = ChatTemplate::new(source.into(), "<bos>".into(), "<eos>".into()).expect("a template");
    let message = Message::user("Hello");
    refused(template.render(&[message], &ChatOptions::default()), &["chat template", "roles must", "alternate"]);
}

/// Every way in which an assistant can belong to another target; the error names both sides.
#[test]
fn pairs_that_do_not_fit() {
    for (field, value, about) in [
        ("backbone_hidden_size", json!(96), ["hidden_size 96", "64"]),
        ("text_config.vocab_size", json!(1024), ["vocab_size is 1024", "512"]),
        ("text_config.head_dim", json!(64), ["head_dim 64", "32"]),
        ("text_config.global_head_dim", json!(32), ["head_dim 32", "64"]),
        ("text_config.num_key_value_heads", json!(4), ["4 K/V heads", "2"]),
        ("text_config.sliding_window", json!(16), ["sliding_window is 16", "8"]),
    ] {
        let pair = Pair::new();
        pair.set(ASSISTANT, field, value);
        pair.refused(&[&["does not fit the target", "published for this target"][..], &about].concat());
    }
    // A target whose own K and V are of only one attention type.
    let pair = Pair::new();
    pair.set(TARGET, "num_kv_shared_layers", json!(0));
    pair.set(TARGET, "layer_types", json!(vec!["full_attention"; 8]));
    let problem = pair.engine().expect_err("the shapes differ, too").to_string();
    says(&problem, &["target"]);

    let pair = Pair::new();
    pair.set(ASSISTANT, "model_type", json!("gemma4_text"));
    pair.refused(&[ASSISTANT, "model_type", "not a Gemma 4 assistant"]);
    // Target and assistant swapped.
    let options = EngineOptions::new(pair.path("assistant")).with_assistant(pair.path("target"));
    refused(Engine::load(&options), &["assistant"]);
}

#[test]
fn token_ordering_is_a_permutation() {
    let name = "masked_embedding.token_ordering";
    for (at, id) in [(0, 512_i64), (5, -1), (7, i64::MAX), (9, i64::MIN), (511, 1 << 32)] {
        let pair = Pair::new();
        pair.tensors(DRAFTER, |tensors| {
            tensors.get_mut(name).expect("a tensor").2[8 * at..8 * at + 8].copy_from_slice(&id.to_le_bytes());
        });
        pair.refused(&["assistant", name, &id.to_string(), "permutation"]);
    }
    let pair = Pair::new();
    pair.tensors(DRAFTER, |tensors| tensors.get_mut(name).expect("a tensor").2.copy_within(0..8, 8));
    pair.refused(&["assistant", name, "permutation"]);

    let pair = Pair::new();
    pair.tensors(DRAFTER, |tensors| {
        let ordering = tensors.get_mut(name).expect("a tensor");
        (ordering.0, ordering.1) = (Dtype::F64, vec![512]);
    });
    pair.refused(&["assistant", name, "I64"]);
}

/// Prompts and options that a session rejects without changing its state.
#[test]
fn prompts_and_options() {
    let engine = Pair::new().engine().expect("an engine");
    let mut options = SessionOptions::default();
    options.kv.max_context = Some(32);
    let mut session = engine.session(&options).expect("a session");
    let with = |sampling| GenerateOptions { sampling, ..GenerateOptions::default() };
    let block = |block_size| {
        let speculation = Speculation::With(SpeculationOptions::mtp(block_size));
        GenerateOptions { speculation, ..GenerateOptions::default() }
    };
    let sampling =
        |temperature, top_k, top_p, min_p| with(Sampling { temperature, top_k, top_p, min_p, ..Sampling::default() });
    let prompt: &[u32] = &[2, 3, 4];
    for (prompt, options, about) in [
        (&[][..], with(Sampling::default()), ["prompt: is empty", "at least one token"]),
        (&[2, 512], with(Sampling::default()), ["token id 512", "vocabulary of 512"]),
        (&[u32::MAX], with(Sampling::default()), ["token id 4294967295", "vocabulary"]),
        (&[2; 33], with(Sampling::default()), ["33 tokens", "context of 32"]),
        (&[2; 5000], with(Sampling::default()), ["5000 tokens", "shorten the prompt"]),
        (prompt, block(0), ["block: is 0", "from 1"]),
        (prompt, block(513), ["block: is 513", "512"]),
        (prompt, block(usize::MAX), ["block: is 18446744073709551615", "512"]),
        (prompt, sampling(-1.0, None, 1.0, 0.0), ["temperature", "0 or more"]),
        (prompt, sampling(f32::NAN, None, 1.0, 0.0), ["temperature", "0 or more"]),
        (prompt, sampling(f32::INFINITY, None, 1.0, 0.0), ["temperature", "0 or more"]),
        (prompt, sampling(1.0, Some(0), 1.0, 0.0), ["top_k", "at least 1"]),
        (prompt, sampling(1.0, None, 0.0, 0.0), ["top_p", "above 0"]),
        (prompt, sampling(1.0, None, 1.5, 0.0), ["top_p", "at most 1"]),
        (prompt, sampling(1.0, None, f32::NAN, 0.0), ["top_p", "above 0"]),
        (prompt, sampling(1.0, None, 1.0, -0.5), ["min_p", "0 to 1"]),
        (prompt, sampling(1.0, None, 1.0, f32::NAN), ["min_p", "0 to 1"]),
    ] {
        refused(session.generate(prompt, &options).map(|_| ()), &about);
        assert!(session.kv().is_empty(), "{about:?}: something of the prompt was kept");
    }
    // Extreme but valid values are accepted.
    for options in
        [sampling(f32::MIN_POSITIVE, Some(usize::MAX), f32::MIN_POSITIVE, 1.0), sampling(1e30, None, 1.0, 0.0)]
    {
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let generation = session.generate(prompt, &options).expect("a generation");
        generation.for_each(|piece| drop(piece.expect("a piece")));
    }
    let generation = session.generate(prompt, &GenerateOptions::default()).expect("a generation");
    generation.for_each(|piece| drop(piece.expect("a piece")));
}

#[test]
fn speculation_without_an_assistant() {
    let pair = Pair::new();
    let engine = Engine::load(&EngineOptions::new(pair.path("target"))).expect("an engine");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let options = GenerateOptions { speculation: Speculation::With(SpeculationOptions::mtp(4)), ..Default::default() };
    refused(session.generate(&[2], &options).map(|_| ()), &["assistant", "turn speculation off"]);
}

/// The demo pair's tokenizer does not fit a fixture's weights, so the target is its own draft
/// model, with a corrupted tokenizer.
#[test]
fn draft_models_of_another_vocabulary() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let directory = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo.join(file), directory.path().join(file)).expect("a copy");
    }
    let options =
        EngineOptions { draft_model: Some(directory.path().into()), threads: Some(1), ..EngineOptions::new(&demo) };
    assert!(Engine::load(&options).expect("the same vocabulary").draft_model().is_some());

    // Two ordinary tokens swapped.
    let path = directory.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).expect("a file");
    let mut tokenizer: Value = serde_json::from_str(&text).expect("JSON");
    let vocabulary = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let name_of = |vocabulary: &serde_json::Map<String, Value>, id: u64| {
        vocabulary.iter().find(|(_, of)| **of == id).expect("an id").0.clone()
    };
    let (a, b) = (name_of(vocabulary, 3000), name_of(vocabulary, 3001));
    vocabulary.insert(a.clone(), json!(3001));
    vocabulary.insert(b.clone(), json!(3000));
    std::fs::write(&path, tokenizer.to_string()).expect("a file");
    refused(
        Engine::load(&options),
        &["draft model", "token 3000", &format!("{a:?}"), &format!("{b:?}"), "same tokenizer"],
    );
    std::fs::remove_file(&path).expect("it was there");
    refused(Engine::load(&options), &["draft model", "no tokenizer"]);
    let smaller = Pair::new();
    let options = EngineOptions { draft_model: Some(smaller.path("target")), ..options };
    refused(Engine::load(&options), &["draft model", "vocab_size is 512", "4096"]);
    let options = EngineOptions { draft_model: Some(smaller.path("nowhere")), ..options };
    refused(Engine::load(&options), &["nowhere", "check the path"]);
}

/// The kernels' names are parsed with this library's error.
#[test]
fn names_of_types_and_instruction_sets() {
    fn parse<T: FromStr<Err: Into<Error>>>(name: &str) -> Result<()> {
        name.parse::<T>().map(drop).map_err(Into::into)
    }
    refused(parse::<Isa>("q9"), &["instruction set: \"q9\"", "scalar"]);
    refused(parse::<WeightType>("q9"), &["weight type: \"q9\"", "q4_k"]);
    refused(parse::<ElementType>("q9"), &["element type: \"q9\"", "bf16"]);
}

/// Invalid speculation options are rejected without changing the session.
#[test]
fn speculation_options() {
    let engine = Pair::new().engine().expect("an engine");
    let mut narrow = SessionOptions::default();
    narrow.kv.max_round_rows = 8;
    let mut session = engine.session(&narrow).expect("a session");
    let with = |options| GenerateOptions { speculation: Speculation::With(options), ..GenerateOptions::default() };
    let list = |text: &str| -> Drafters { text.parse().expect("drafters") };
    let block = |block| with(SpeculationOptions { block, ..SpeculationOptions::default() });
    let streak = |rounds| with(SpeculationOptions { skip_streak: Some(rounds), ..SpeculationOptions::default() });
    let mut foreign = NgramCache::default();
    foreign.learn(&[1, 2, 512], 0, 2);
    let foreign = NgramCacheOptions { corpus: Some(Arc::new(foreign)), ..NgramCacheOptions::default() };
    let zero = DrafterOptions::NgramSimple(NgramSimpleOptions { ngram_len: 0, max_draft_tokens: 4 });
    let drafters = |drafters| with(SpeculationOptions { drafters, ..SpeculationOptions::default() });
    let simulated = |chance| GenerateOptions { simulate_acceptance: chance, ..GenerateOptions::default() };
    for (options, about) in [
        (block(BlockSize::Fixed(9)), &["block: is 9", "from 1 to 8", "sliding window"][..]),
        (block(BlockSize::Preset(MtpPreset::Quality)), &["block: is 16", "from 1 to 8"]),
        (streak(0), &["skip_streak: is 0", "1 to 32"]),
        (streak(33), &["skip_streak: is 33", "1 to 32"]),
        (drafters(list("draft-model")), &["draft-model", "load one"]),
        (
            drafters(Drafters::Priority(vec![DrafterOptions::NgramCache(foreign)])),
            &["token 512", "the vocabulary has 512"],
        ),
        (drafters(Drafters::Best(vec![zero])), &["ngram-simple", "n is 0"]),
        (simulated(vec![1.5]), &["simulate_acceptance: is 1.5", "0 to 1"]),
        (simulated(vec![0.5, f64::NAN]), &["simulate_acceptance: is NaN"]),
        (simulated(vec![0.5, 0.4, 0.6]), &["simulate_acceptance: is 0.6 at position 3, 0.4 before it"]),
    ] {
        refused(session.generate(&[2, 3], &options).map(|_| ()), about);
        assert!(session.kv().is_empty(), "{about:?}: something of the prompt was kept");
    }
    // The planner is not asked for more rows than a round may stage.
    let wide = drafters(Drafters::Best(vec![DrafterOptions::Mtp, "ngram-simple:n=1".parse().expect("a drafter")]));
    let generation = session.generate(&[2, 3], &GenerateOptions { max_tokens: 40, ..wide }).expect("a generation");
    generation.for_each(|piece| drop(piece.expect("a piece")));
}

/// A trace that cannot be opened is an error before anything is generated; one that fails later
/// ends, and the generation continues.
#[test]
fn traces() {
    let engine = Pair::new().engine().expect("an engine");
    let directory = tempfile::tempdir().expect("a directory");
    refused(Trace::file(directory.path().join("no/trace")), &["no/trace", "directory does not exist"]);
    refused(Trace::file(directory.path()), &["cannot be written", "another path"]);
    let other = directory.path().join("other");
    std::fs::write(&other, "{\"model_type\": 1}\n").expect("a file");
    refused(Trace::file(&other), &["is not a trace", "another path"]);
    assert_eq!(std::fs::read(&other).expect("a file"), b"{\"model_type\": 1}\n");
    std::fs::write(&other, "{\"event\": \"begin\"}\n").expect("a file");
    assert!(Trace::file(&other).is_ok());

    let ids = |trace| {
        let mut session = engine.session(&SessionOptions::default()).expect("a session");
        let speculation = Speculation::With(SpeculationOptions::mtp(4));
        let options = GenerateOptions { trace, speculation, max_tokens: 24, ..GenerateOptions::default() };
        let generation = session.generate(&[2, 3], &options).expect("a generation");
        generation.flat_map(|piece| piece.expect("a piece").tokens).collect::<Vec<u32>>()
    };
    let want = ids(None);
    let path = directory.path().join("trace");
    assert_eq!(ids(Some(Trace::file(&path).expect("a file"))), want);
    let lines: Vec<Value> = (std::fs::read_to_string(&path).expect("a trace").lines())
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!((&lines[0]["event"], &lines[lines.len() - 1]["event"]), (&json!("begin"), &json!("end")));
    let traced: Vec<u64> = (lines.iter())
        .flat_map(|line| line["tokens"].as_array().into_iter().flatten())
        .map(|token| token["id"].as_u64().expect("an id"))
        .collect();
    assert_eq!(traced, want.iter().map(|id| u64::from(*id)).collect::<Vec<_>>());
    for round in lines.iter().filter(|line| line["event"] == "round") {
        let draft = round["draft"].as_array().expect("a draft");
        assert_eq!(round["rows"], json!(draft.len() + 1));
        assert!(
            draft.iter().all(|token| (0.0..=1.0).contains(&token["p"].as_f64().expect("a probability"))),
            "{round}"
        );
        assert!(round["hidden_l2"].as_f64().expect("a length") > 0.0);
    }
    // A disk that is full at once, and one that fills after a few lines.
    match Path::new("/dev/full").exists() {
        true => assert_eq!(ids(Some(Trace::file("/dev/full").expect("it can be opened"))), want),
        false => skipped::skipped("a trace on a full disk", "this system has no /dev/full"),
    }
    struct Filling(usize);
    impl std::io::Write for Filling {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(ErrorKind::StorageFull)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    assert_eq!(ids(Some(Trace::to(Filling(1500), "a small disk".into()))), want);
}

#[test]
fn no_threads() {
    let pair = Pair::new();
    let options = EngineOptions { threads: Some(0), ..EngineOptions::new(pair.path("target")) };
    refused(Engine::load(&options), &["threads: is 0", "from 1 to"]);
}

/// NaN or infinity in weights gives an error, not token 0; the session is unchanged.
#[test]
fn weights_that_are_not_finite() {
    for value in [f32::NAN, f32::INFINITY] {
        let pair = Pair::new();
        pair.tensors(WEIGHTS, |tensors| {
            let norm = &mut tensors.get_mut("model.norm.weight").expect("a tensor").2;
            // All of them: one infinite logit would be within the soft cap again, but their sums are NaN.
            norm.chunks_exact_mut(4).for_each(|weight| weight.copy_from_slice(&value.to_le_bytes()));
        });
        let engine = pair.engine().expect("values are not looked at while loading");
        for sampling in [Sampling::default(), Sampling { temperature: 1.0, ..Sampling::default() }] {
            let mut session = engine.session(&SessionOptions::default()).expect("a session");
            let options = GenerateOptions { sampling, ..GenerateOptions::default() };
            let error = session.generate(&[2, 3], &options).expect_err("no finite logits");
            assert!(matches!(error, Error::NotFinite { what: "logits", layer: None, found: Some(_), .. }), "{error:?}");
            says(&error.to_string(), &["logits: not finite", "damaged"]);
        }
    }
    // NaN or infinity in a drafter's output is also reported, although the target could continue.
    let pair = Pair::new();
    pair.tensors(DRAFTER, |tensors| {
        tensors.get_mut("model.norm.weight").expect("a tensor").2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    let engine = pair.engine().expect("an engine");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let mtp = GenerateOptions { speculation: Speculation::With(SpeculationOptions::mtp(4)), ..Default::default() };
    let mut generation = session.generate(&[2, 3], &mtp).expect("the target is sound");
    let first = generation.next().expect("a first piece").expect("the target's own token");
    assert_eq!(first.tokens.len(), 1);
    refused(generation.next().expect("a second piece"), &["logits of a draft: not finite"]);
    assert!(generation.next().is_none(), "an error is the end");
    drop(generation);
    assert_eq!(session.kv().len(), 2, "a round that failed left nothing");
    let plain = GenerateOptions { speculation: Speculation::Off, max_tokens: 4, ..GenerateOptions::default() };
    let generation = session.generate(&[4], &plain).expect("the session can be used again");
    assert_eq!(generation.map(|piece| piece.expect("a piece").tokens.len()).sum::<usize>(), 4);
}

/// Names from files are in messages, including line breaks.
#[test]
fn names_with_line_breaks() {
    let pair = Pair::new();
    pair.set(TARGET, "per_layer_config", json!({"0": {"a\nb": 1, "head_dim": 32}}));
    pair.refused(&[TARGET, "per_layer_config.0.a b", "not implemented"]);
    let pair = Pair::new();
    pair.set(TARGET, "layer_types", json!(["a\r\nb"]));
    pair.refused(&[TARGET, "layer_types"]);
}

/// Files on which the `tokenizers` crate would panic, or read beyond a token.
#[test]
fn tokenizer_files() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("tokenizer.json");
    let file = |change: &dyn Fn(&mut Value)| {
        let mut file = json!({
            "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
            "decoder": {"type": "Fuse"},
            "post_processor": {
                "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
                "special_tokens": {},
            },
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
        });
        change(&mut file);
        std::fs::write(&path, file.to_string()).expect("a file");
        Tokenizer::read(&path, 3)
    };
    assert_eq!(file(&|_| ()).expect("sound").encode("abba").expect("ids"), [2, 1, 0]);
    let bad = |change: &dyn Fn(&mut Value), about: &str| refused(file(change), &["tokenizer.json", about]);
    // A valid file of another kind is not to be downloaded again.
    for (part, kind) in [("normalizer", "Lowercase"), ("pre_tokenizer", "FixedLength"), ("model", "Unigram")] {
        let error = file(&|file| file[part]["type"] = json!(kind)).expect_err("an error");
        let message = error.to_string();
        assert!(matches!(&error, Error::Unsupported { what, .. } if what == part), "{error:?}");
        says(&message, &["tokenizer.json", kind, "is not implemented; expected", "published with the model"]);
        assert!(!message.contains("download"), "{message}");
    }
    bad(&|file| file["model"]["merges"] = json!(["a b", "ab ab"]), "merges: entry 1");
    bad(&|file| file["model"]["merges"] = json!([["ab", "b"]]), "merges: entry 0");
    bad(&|file| file["model"]["continuing_subword_prefix"] = json!("ééé"), "continuing_subword_prefix");
    bad(&|file| file["model"]["dropout"] = json!(0.5), "dropout");
    bad(&|file| file["model"] = json!({"type": "Unigram", "unk_id": 9, "vocab": {}, "merges": []}), "Unigram");
    bad(&|file| file["decoder"] = json!({"type": "Strip", "content": "a", "start": 0, "stop": 9}), "stop");
    bad(&|file| file["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}), "FixedLength");
    bad(&|file| file["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Precompiled");
    let added = |content: &str, id: u32| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
    bad(&|file| file["added_tokens"] = json!([added("b", 1), added("<c>", 3), added("<e>", 5)]), "\"<e>\" has id 5");
    bad(&|file| file["added_tokens"] = json!([added("b", 2)]), "\"b\" has id 2");
    // A position would be one in another text than the file's.
    bad(&|file| file["normalizer"] = json!({"type": "Prepend"}), "missing field `prepend`; download it again");
    let sequence = json!({"type": "Sequence", "pretokenizers": [{"type": "FixedLength", "length": 0}]});
    bad(&|file| file["pre_tokenizer"] = sequence.clone(), "FixedLength");
    for piece in
        [json!({"SpecialToken": {"id": "<bos>", "type_id": 0}}), json!({"Sequence": {"id": "B", "type_id": 0}})]
    {
        bad(&|file| file["post_processor"]["single"] = json!([piece]), "special_tokens");
    }
}

/// Counts that a template may not use: minijinja would allocate them, or panic.
#[test]
fn chat_templates_that_ask_for_too_much() {
    let message = [Message::user("Hello")];
    let render = |source: &str| {
        ChatTemplate::new(source.into(), "<bos>".into(), "<eos>".into())?.render(&message, &ChatOptions::default())
    };
    assert_eq!(render("{{ 'a' | indent(2, true) }}{{ [1, 2] | slice(2) | tojson }}").expect("small"), "  a[[1], [2]]");
    assert_eq!(render("{{ '{:>4}|'.format('a') }}{{ '%4d' | format(12345678) }}").expect("small"), "   a|12345678");
    for source in [
        "{{ 'a' | indent(18446744073709551615) }}",
        "{{ 'a' | indent(width=1000000000000) }}",
        "{{ [1] | slice(1000000000000) }}",
        "{{ [1] | batch(1000000000000, 'x') }}",
        "{{ [1] | tojson(indent=1000000000000) }}",
        "{{ '%1000000000000d' | format(1) }}",
        "{{ '{:>1000000000000}'.format(1) }}",
    ] {
        refused(render(source), &["chat template", "larger than"]);
    }
}

#[test]
fn names_on_the_hub_without_the_feature() {
    let resolve = |path: &str| hub::resolve(path, &HubOptions::default());
    for path in ["google/gemma-4-E2B-it", "some_one/a.model-1"] {
        if cfg!(not(feature = "hub")) {
            let command = format!("hf download {path} --local-dir models/{path}");
            refused(resolve(path), &[path, "rebuild with --features hub", &command]);
            let command = format!("hf download {path} --revision v1.0 --local-dir models/{path}");
            refused(resolve(&format!("{path}@v1.0")), &[path, &command]);
        }
    }
    // Anything that could be a path is not a Hub name.
    for path in ["models", "./a/b", "../a", "a/b/c", "/a/b", "a//b", "a/", "~/b", "a/b\n"] {
        assert_eq!(resolve(path).expect("a path"), Path::new(path));
    }
}

fn generate() -> Command {
    let mut command = example("generate");
    // Errors are one line even with backtraces enabled.
    command.env_remove("RUST_LOG").env("RUST_BACKTRACE", "1");
    command
}

fn arguments(arguments: &[&str]) -> Vec<OsString> {
    arguments.iter().map(OsString::from).collect()
}

/// Runs the example; it must fail as promised.
fn fails(arguments: &[OsString], about: &[&str]) {
    let Output { status, stdout, stderr } = generate().args(arguments).output().expect("a run");
    let stderr = String::from_utf8_lossy(&stderr);
    let what = format!("{arguments:?}: {status}: {stderr}");
    assert_eq!(status.code(), Some(1), "{what}");
    assert!(stdout.is_empty(), "{what}: something on stdout");
    assert!(!stderr.contains("panicked"), "{what}");
    assert!(stderr.starts_with("Error: "), "{what}");
    assert_eq!(stderr.lines().count(), 1, "{what}: more than one line");
    about.iter().for_each(|part| assert!(stderr.contains(part), "{what} does not mention {part:?}"));
}

#[test]
fn the_command_line() {
    let pair = Pair::new();
    let path = |file: &str| pair.path(file).into_os_string().into_string().expect("UTF-8");
    let model = path("target");
    fails(&arguments(&["x", "--model", &path("nowhere")]), &["nowhere", "check the path"]);
    fails(&arguments(&["x", "--model", &path(WEIGHTS)]), &[WEIGHTS, "is a file"]);
    fails(&arguments(&["x", "--model", &model]), &["tokenizer.json", "token ids"]);
    if cfg!(not(feature = "hub")) {
        fails(&arguments(&["x", "--model", "nobody/nothing"]), &["--features hub", "hf download nobody/nothing"]);
    }
    let ids = ["--model", &model, "--assistant", &path("assistant"), "--prompt-ids", "2,3"];
    let with = |more: &[&str]| arguments(&[&ids[..], more].concat());
    fails(&with(&["--draft-block-size", "0"]), &["--draft-block-size: is 0"]);
    fails(&with(&["--threads", "0"]), &["--threads: is 0"]);
    fails(&with(&["--skip-streak", "33"]), &["--skip-streak: is 33"]);
    fails(&with(&["--simulate-acceptance", "2"]), &["--simulate-acceptance: is 2"]);
    fails(&with(&["--spec-type", "draft-model"]), &["--spec-type: draft-model", "pass --draft-model"]);
    fails(&with(&["--draft-model", &path("nowhere")]), &["nowhere", "check the path"]);
    fails(&with(&["--trace", &path("nowhere/trace")]), &["nowhere/trace", "directory does not exist"]);
    fails(&with(&["--trace", &model]), &["is a directory"]);
    pair.write("static.ngrams", b"ngrams\0\x01\x09\0\0\0\0\0\0\0");
    fails(
        &with(&["--spec-type", "ngram-cache", "--ngram-static", &path("static.ngrams")]),
        &["static.ngrams", "9 entries", "write the n-gram cache again"],
    );
    pair.write("costs.json", "{}");
    fails(&with(&["--costs", &path("costs.json")]), &["costs.json", "delete it to measure again"]);
    fails(&with(&["--temperature=-1"]), &["temperature"]);
    fails(&with(&["--temperature", "NaN"]), &["temperature"]);
    fails(&with(&["--temperature", "1", "--top-p", "0"]), &["--top-p: "]);
    fails(&with(&["--context", "1"]), &["2 tokens", "context of 1", "raise --context"]);
    fails(&with(&["--context", "0"]), &["--context: is 0"]);
    fails(&arguments(&["--model", &model, "--prompt-ids", "2,600"]), &["token id 600"]);
    pair.write(TARGET, "{");
    fails(&with(&[]), &[TARGET, "valid JSON"]);
    fails(&arguments(&[""]), &["prompt: is empty"]);
    fails(&arguments(&["--chat", "x"]), &["chat template"]);
}

/// Wrong usage is an error like any other: one line, exit code 1.
#[test]
fn usage() {
    fails(&arguments(&["--no-such-flag"]), &["--no-such-flag"]);
    fails(&arguments(&["--threads", "many"]), &["--threads", "many"]);
    fails(&arguments(&["--max-tokens=-2"]), &["-2"]);
    fails(&arguments(&["--cache-type-k", "f8"]), &["--cache-type-k", "f8"]);
    fails(&arguments(&["--prompt-ids", "2,x"]), &["--prompt-ids", "x"]);
    fails(&arguments(&["--prompt-ids", ""]), &["--prompt-ids"]);
    fails(&arguments(&["text", "--prompt-ids", "2"]), &["--prompt-ids"]);
    fails(&arguments(&["x", "--system", "y"]), &["--chat"]);
    fails(&arguments(&["--spec-type", "ngram-best"]), &["ngram-best", "mtp, draft-model, ngram-simple, ngram-map-k"]);
    fails(&arguments(&["--mtp-preset", "fast"]), &["fast", "throughput, balanced, quality"]);
    fails(&arguments(&["--pipeline-depth", "3"]), &["--pipeline-depth", "3"]);
    fails(&arguments(&["--draft-block-size", "4", "--mtp-preset", "balanced"]), &["--mtp-preset"]);
    let help = generate().arg("--help").output().expect("a run");
    assert!(help.status.success() && !help.stdout.is_empty() && help.stderr.is_empty());
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_utf_8() {
    use std::os::unix::ffi::OsStrExt;
    let bytes = |bytes: &[u8]| OsStr::from_bytes(bytes).to_owned();
    fails(&[bytes(b"fn main\xFF")], &["UTF-8"]);
    fails(&[bytes(b"--stop"), bytes(b"\xC3\x28")], &["UTF-8"]);
    // A path need not be UTF-8; this one is missing.
    fails(&[bytes(b"x"), bytes(b"--model"), bytes(b"/nowhere/\xFF")], &["/nowhere/", "check the path"]);
    fails(&[bytes(b"x"), bytes(b"--model"), bytes(b"\xFF/\xFE")], &["check the path"]);
}

/// Defects of a file: missing, truncated, incomplete, malformed, of another model, or of an unsupported kind.
#[test]
fn causes_in_files() {
    let tensor = "model.layers.1.mlp.down_proj.weight";
    let cause = |spoil: &dyn Fn(&Pair)| {
        let pair = Pair::new();
        spoil(&pair);
        pair.engine().expect_err("a spoilt pair")
    };
    let missing = cause(&|pair| std::fs::remove_file(pair.path(TARGET)).expect("it was there"));
    assert!(matches!(&missing, Error::Io { path, .. } if path.ends_with(TARGET)), "{missing:?}");
    let not_utf8 = cause(&|pair| drop(pair.write(TARGET, b"\xFF\xFE{\0}\0")));
    assert!(matches!(&not_utf8, Error::File { path, .. } if path.ends_with(TARGET)), "{not_utf8:?}");
    let cut = cause(&|pair| {
        let whole = std::fs::read(pair.path(WEIGHTS)).expect("a file");
        pair.write(WEIGHTS, &whole[..whole.len() - 1]);
    });
    assert!(matches!(&cut, Error::File { path, .. } if path.ends_with(WEIGHTS)), "{cut:?}");
    let incomplete = cause(&|pair| pair.tensors(WEIGHTS, |tensors| drop(tensors.remove(tensor))));
    assert!(matches!(&incomplete, Error::Tensor { tensor: name, .. } if name == tensor), "{incomplete:?}");
    let malformed = cause(&|pair| pair.set(TARGET, "hidden_size", json!("64")));
    assert!(matches!(&malformed, Error::Config { field, .. } if field == "hidden_size"), "{malformed:?}");
    let another = cause(&|pair| pair.set(ASSISTANT, "backbone_hidden_size", json!(96)));
    assert!(matches!(&another, Error::AssistantMismatch { .. }), "{another:?}");
    let activation = cause(&|pair| pair.set(TARGET, "hidden_activation", json!("relu")));
    assert!(matches!(&activation, Error::Unsupported { what, .. } if what == "hidden_activation"), "{activation:?}");
    let integers = cause(&|pair| {
        pair.tensors(WEIGHTS, |tensors| tensors.get_mut(tensor).expect("a tensor").0 = Dtype::I32);
    });
    assert!(matches!(&integers, Error::Unsupported { what, .. } if what.ends_with(tensor)), "{integers:?}");
}

/// A file that its file system cannot take is to be written elsewhere.
#[test]
fn file_systems_that_cannot_take_a_file() {
    for kind in [ErrorKind::FileTooLarge, ErrorKind::ReadOnlyFilesystem] {
        let error = Error::Io { path: "model.gguf".into(), cause: kind.into() }.to_string();
        assert!(error.starts_with("model.gguf: ") && error.ends_with("; write elsewhere"), "{error}");
    }
}

/// A path through a file is wrong, and a file that may not be opened has the wrong permissions.
#[test]
fn paths_that_cannot_be_opened() {
    for (kind, remedy) in [
        (ErrorKind::NotADirectory, "; check the path, or download it there"),
        (ErrorKind::PermissionDenied, "; check the permissions of the file and its directory"),
    ] {
        let error = Error::Io { path: "model.gguf".into(), cause: kind.into() }.to_string();
        assert!(error.starts_with("model.gguf: ") && error.ends_with(remedy), "{error}");
    }
}

/// A load that its caller cancels ends before the next tensor.
#[test]
fn a_load_that_is_cancelled() {
    let (pair, cancel, seen) = (Pair::new(), Cancel::default(), Arc::new(AtomicUsize::new(0)));
    let (own, count) = (cancel.clone(), Arc::clone(&seen));
    let options = EngineOptions {
        progress: Some(Arc::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            own.cancel();
        })),
        cancel,
        ..EngineOptions::new(pair.path("target"))
    };
    let error = Engine::load(&options).expect_err("cancelled");
    assert!(matches!(error, Error::Cancelled), "{error:?}");
    assert_eq!(seen.load(Ordering::Relaxed), 1, "tensors were loaded after it");
    Engine::load(&EngineOptions { cancel: Cancel::default(), ..options }).expect("an engine");
}

/// NaN in K, with its layer and position.
#[test]
fn causes_in_weights() {
    let pair = Pair::new();
    // What token 5 adds to the first layer's output.
    pair.tensors(WEIGHTS, |tensors| {
        let (_, shape, data) = tensors.get_mut("model.embed_tokens_per_layer.weight").expect("a tensor");
        let row = data.len() / shape[0];
        data[5 * row..][..row].as_chunks_mut().0.iter_mut().for_each(|x| *x = f32::NAN.to_le_bytes());
    });
    let engine = pair.engine().expect("values are not looked at while loading");
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let error = session.generate(&[2, 3, 5], &GenerateOptions::default()).expect_err("no finite numbers");
    let Error::NotFinite { what: "K", layer: Some(1), position: Some(2), found: Some(found) } = error else {
        panic!("{error:?}");
    };
    assert!(found.is_nan());
    says(&error.to_string(), &["K of layer 1 at position 2", "NaN", "checkpoint is damaged"]);
}

/// Errors of requests: wrong arguments by name, memory by bytes, a full context by tokens.
#[test]
fn causes_in_requests() {
    let engine = Pair::new().engine().expect("an engine");
    let session = |change: &dyn Fn(&mut SessionOptions)| {
        let mut options = SessionOptions::default();
        options.kv.max_context = Some(32);
        change(&mut options);
        engine.session(&options)
    };
    let error = session(&|options| options.kv.memory = Some(1000)).expect_err("1000 bytes are too few");
    let Error::Memory { needed: Some(needed), available: Some(1000), fits: Some(fits), .. } = error else {
        panic!("{error:?}");
    };
    assert!(needed > 1000 && fits < 32, "{error:?}");
    says(&error.to_string(), &["context of 32", "1000 bytes available", "use a smaller cache type or context"]);

    let error = session(&|options| options.kv.max_round_rows = 0).expect_err("a round has rows");
    assert!(matches!(error, Error::Argument { name: "max_round_rows", .. }), "{error:?}");
    let mut session = session(&|_| ()).expect("a session");
    let mut refuse = |prompt: &[u32], sampling| {
        let options = GenerateOptions { sampling, ..GenerateOptions::default() };
        session.generate(prompt, &options).expect_err("a refusal")
    };
    let greedy = Sampling::default;
    let error = refuse(&[2; 33], greedy());
    assert!(matches!(error, Error::Context { needed: 33, limit: 32 }), "{error:?}");
    for (prompt, sampling, argument) in [
        (&[][..], greedy(), "prompt"),
        (&[512], greedy(), "prompt"),
        (&[2], Sampling { top_k: Some(0), ..greedy() }, "top_k"),
        (&[2], Sampling { temperature: f32::NAN, ..greedy() }, "temperature"),
    ] {
        let error = refuse(prompt, sampling);
        assert!(matches!(error, Error::Argument { name, .. } if name == argument), "{argument}: {error:?}");
    }
    let unknown = "tpu".parse::<DeviceChoice>().expect_err("no device");
    assert!(matches!(unknown, Error::Argument { name: "device", .. }), "{unknown:?}");
    let message = Message::user("Hello");
    let error = engine.encode_chat(&[message], &ChatOptions::default()).expect_err("no template");
    assert!(matches!(error, Error::Template(_)), "{error:?}");
    assert!(matches!(engine.tokenizer(), Err(Error::Tokenizer(_))));
}

/// On a Mac there may be one.
#[cfg(not(target_os = "macos"))]
#[test]
fn a_device_that_is_not_there_is_an_error_and_the_processor_still_works() {
    let pair = Pair::new();
    let load = |device| Engine::load(&EngineOptions { device, ..EngineOptions::new(pair.path("target")) });
    let error = load(DeviceChoice::Metal(0)).expect_err("no Mac");
    assert!(matches!(&error, Error::Device { device, .. } if device == "Metal"), "{error:?}");
    assert!(error.to_string().contains("use the CPU"), "{error}");
    load(DeviceChoice::Cpu).expect("an engine");
}
