//! Perplexity: each window's value equals that of one plain pass over it; invalid requests are rejected.

mod cases;

use std::path::{Path, PathBuf};

use cases::{cache, on_every_isa, pass, values};
use foretoken::OutputRows;
use foretoken::kv::KvOptions;
use foretoken::perplexity::{PerplexityOptions, perplexity};
use foretoken::{ElementType, Engine, EngineOptions, Isa};
use serde_json::{Value, json};

fn engine(isa: Isa) -> Engine {
    let options = EngineOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target"));
    Engine::load(&EngineOptions { isa: Some(isa), ..options }).expect("the demo")
}

fn options(window: usize) -> PerplexityOptions {
    let kv = KvOptions { key: ElementType::F32.into(), value: ElementType::F32.into(), ..KvOptions::default() };
    PerplexityOptions { window, max_windows: None, kv }
}

#[test]
fn windows_are_scored_in_their_second_half() {
    on_every_isa(second_halves_are_scored);
}

fn second_halves_are_scored(isa: Isa) {
    let engine = engine(isa);
    let text = std::fs::read_to_string(file!()).expect("this file");
    let mut tokens = engine.tokenizer().expect("one").encode(&text).expect("tokens");
    // All on the widest instruction set; two shorter windows on the others, which are slower.
    let window = if isa == Isa::best() { 200 } else { 64 };
    if isa != Isa::best() {
        tokens.truncate(2 * window + 1);
    }
    let mut windows = 0;
    let result = perplexity(&engine, &tokens, &options(window), |so_far| {
        windows += 1;
        assert_eq!((so_far.windows, so_far.tokens), (windows, windows * (window / 2 - 1)));
    })
    .expect("a result");
    assert_eq!(windows, tokens.len() / window);

    let (mut sum, mut squares, mut count) = (0.0, 0.0, 0);
    for text in tokens.chunks_exact(window) {
        let mut ids = text.to_vec();
        ids[0] = 2;
        let target = engine.gemma4().expect("a Gemma 4");
        let output = pass(target, &mut cache(target, ElementType::F32, isa), &ids, OutputRows::All);
        let logits = values(&output.logits);
        for (row, next) in logits.chunks_exact(4096).zip(&ids[1..]).skip(window / 2) {
            let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            let surprisal = total.ln() - f64::from(row[*next as usize]);
            (sum, squares, count) = (sum + surprisal, squares + surprisal * surprisal, count + 1);
        }
    }
    let (mean, count) = (sum / f64::from(count), f64::from(count));
    let want = mean.exp();
    assert!((result.value() / want - 1.0).abs() < 1e-9, "{} is not {want}", result.value());
    let want = want * ((squares / count - mean * mean) / (count - 1.0)).sqrt();
    assert!((result.error() / want - 1.0).abs() < 1e-6, "{} is not {want}", result.error());
    // It was trained on Rust; a uniform model has 4096. Two short windows say less.
    let most = if isa == Isa::best() { 100.0 } else { 400.0 };
    assert!(result.value() < most && result.error() > 0.0, "{} +/- {}", result.value(), result.error());
}

/// The shortest and odd windows, texts of whole windows and of some tokens more, and a number of windows. The last token
/// of a window predicts none.
#[test]
fn full_windows_are_counted() {
    let engine = engine(Isa::best());
    let text: Vec<u32> = (0..15).map(|i| 300 + i * 7).collect();
    let measure = |len: usize, window, max_windows| {
        let options = PerplexityOptions { max_windows, ..options(window) };
        perplexity(&engine, &text[..len], &options, |_| {}).expect("a result")
    };
    for (len, window, max_windows, windows, scored) in [
        (4, 4, None, 1, 1),
        (7, 4, None, 1, 1),
        (8, 4, None, 2, 2),
        (15, 5, None, 3, 6),
        (15, 5, Some(1), 1, 2),
        (15, 5, Some(2), 2, 4),
        (15, 5, Some(9), 3, 6),
    ] {
        let result = measure(len, window, max_windows);
        assert_eq!((result.windows, result.tokens), (windows, scored), "{len} in {window}, at most {max_windows:?}");
    }
    assert_eq!(measure(15, 5, Some(1)), measure(5, 5, None));
}

/// The rows of a round may be fewer than those whose logits are taken at once.
#[test]
fn short_rounds_give_the_same() {
    let engine = engine(Isa::best());
    let tokens: Vec<u32> = (0..128).map(|i| 300 + i * 7 % 3000).collect();
    let measure = |max_round_rows: usize| {
        let kv = KvOptions { max_round_rows, ..options(64).kv };
        let options = PerplexityOptions { kv, ..options(64) };
        perplexity(&engine, &tokens, &options, |_| {}).expect("a result").value()
    };
    assert_eq!(measure(5), measure(512));
}

/// A copy of Qwen3.5's demo with a changed JSON file.
fn demo_qwen(directory: PathBuf, name: &str, change: impl FnOnce(&mut Value)) -> Engine {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo-qwen");
    std::fs::create_dir(&directory).expect("a directory");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(demo.join(file), directory.join(file)).expect("a copy");
    }
    let mut file = serde_json::from_slice(&std::fs::read(demo.join(name)).expect("the demo")).expect("JSON");
    change(&mut file);
    std::fs::write(directory.join(name), file.to_string()).expect("written");
    Engine::load(&EngineOptions::new(directory)).expect("an engine")
}

/// As in llama.cpp, the tokenizer decides whether windows begin with BOS: Qwen3.5's adds none, although configurations
/// name one.
#[test]
fn the_tokenizer_decides_what_windows_begin_with() {
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    let measure =
        |engine: &Engine, tokens: &[u32]| perplexity(engine, tokens, &options(64), |_| {}).expect("a result").value();
    let tokens: Vec<u32> = (0..128).map(|i| 300 + i * 7 % 3000).collect();
    let named = demo_qwen(at("named"), "config.json", |config| config["bos_token_id"] = 0.into());
    let plain = demo_qwen(at("plain"), "config.json", |_| {});
    assert_eq!(named.tokenizer().expect("one").bos(), None);
    assert_eq!(measure(&named, &tokens), measure(&plain, &tokens));

    let bos = "<|endoftext|>";
    let single = json!([{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    let special_tokens = json!({bos: {"id": bos, "ids": [0], "tokens": [bos]}});
    let adding = demo_qwen(at("adding"), "tokenizer.json", |file| {
        file["post_processor"] =
            json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special_tokens});
    });
    assert_eq!(adding.tokenizer().expect("one").bos(), Some(0));
    let mut replaced = tokens.clone();
    replaced.iter_mut().step_by(64).for_each(|first| *first = 0);
    assert_eq!(measure(&adding, &tokens), measure(&plain, &replaced));
    assert_ne!(measure(&adding, &tokens), measure(&plain, &tokens));
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let engine = engine(Isa::best());
    let refused = |tokens: &[u32], window: usize, what: &str| {
        let message = perplexity(&engine, tokens, &options(window), |_| {}).expect_err(what).to_string();
        assert!(message.contains(what), "{message:?} does not say {what:?}");
    };
    refused(&[2; 100], 3, "must be at least 4");
    refused(&[2; 100], 101, "are 100, fewer than a window of 101");
    refused(&[2; 10_000], 9_000, "window: is 9000 tokens, which do not fit the context of 8192; use a shorter window");
    // At any place: BOS replaces the first one, and nothing is predicted after the last one.
    for at in [0, 1, 63] {
        let mut tokens = [2; 64];
        tokens[at] = 5000;
        refused(&tokens, 64, "token id 5000 is outside the vocabulary");
    }
    let none = PerplexityOptions { max_windows: Some(0), ..options(64) };
    let message = perplexity(&engine, &[2; 64], &none, |_| {}).expect_err("no windows").to_string();
    assert!(message.starts_with("max_windows: is 0, must be at least 1"), "{message}");
}
