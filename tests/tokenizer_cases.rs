//! Ids equal those of PyPI's tokenizers on 2 000 cases (scripts/tokenizer_cases.py), from tokenizer.json and from a
//! GGUF file without a tokenizer.json next to it; and those of the `tokenizers` crate's model on random models.

mod gguf_writer;
mod twins;

use std::path::{Path, PathBuf};

use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGgufOptions, to_gguf};
use foretoken::tokenizer::Tokenizer;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};
use twins::Twin;

const BOS: u32 = 2;

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizer_cases").join(name)
}

/// The texts, and the ids of each by the tokenizer `name`.
fn cases(name: &str) -> Vec<(String, Vec<u32>)> {
    let cases: Value = serde_json::from_slice(&std::fs::read(file("cases.json")).expect("the cases")).expect("JSON");
    let list = |name: &str| cases[name].as_array().expect("a list").clone();
    let ids =
        |ids: Value| ids.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id") as u32).collect();
    let text = |text: Value| text.as_str().expect("a text").to_owned();
    list("texts").into_iter().map(text).zip(list(name).into_iter().map(ids)).collect()
}

/// Checks every case: the reference's ids after one `<bos>`, whether or not the text contains one.
fn has_the_ids(tokenizer: &Tokenizer, name: &str, what: &str) {
    let cases = cases(name);
    assert_eq!(cases.len(), 1000);
    for (text, want) in cases {
        let own = want.iter().take_while(|id| **id == BOS).count();
        let got = tokenizer.encode(&text).expect("ids");
        assert_eq!((got[0], &got[1..]), (BOS, &want[own..]), "{what}: {text:?}");
    }
}

#[test]
fn tokenizer_json_has_the_ids_of_the_reference() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
    has_the_ids(&Tokenizer::read(demo, 4096).expect("a tokenizer"), "demo", "the demo's tokenizer.json");
    has_the_ids(&Tokenizer::read(file("twin.json"), 512).expect("a tokenizer"), "twin", "the twin's tokenizer.json");
}

#[test]
fn a_gguf_file_alone_has_the_ids_of_its_tokenizer_json() {
    let twin = Twin::of("edge");
    std::fs::copy(file("twin.json"), twin.path("target/tokenizer.json")).expect("a copy");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    for (name, directory, vocabulary) in [("twin", twin.path("target"), 512), ("demo", demo, 4096)] {
        let path = twin.path(&format!("{name}.gguf"));
        let options = ToGgufOptions { outtype: Outtype::F16, ..ToGgufOptions::default() };
        to_gguf(&Checkpoint::open(directory).expect("a checkpoint"), &path, &options).expect("a file");
        let checkpoint = Checkpoint::open(&path).expect("the file");
        let tokenizer = checkpoint.tokenizer(vocabulary).expect("readable").expect("a tokenizer");
        has_the_ids(&tokenizer, name, &format!("{name}.gguf"));
    }
}

/// Ids, and texts of ids, of a source file and of control tokens are those of the `tokenizers` crate.
#[test]
fn the_demos_tokenizer_is_that_of_the_tokenizers_crate() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target/tokenizer.json");
    let ours = Tokenizer::read(&demo, 4096).expect("the demo's");
    let theirs: tokenizers::Tokenizer = std::fs::read_to_string(&demo).expect("a file").parse().expect("a tokenizer");
    let text = include_str!("tokenizer_cases.rs");
    let ids = ours.encode(text).expect("ids");
    assert_eq!(ids, theirs.encode_fast(text, true).expect("ids").get_ids());
    assert_eq!(ours.decode(&ids).expect("a text"), theirs.decode(&ids, true).expect("a text"));
    for text in ["<|turn>user\n größe 你好\u{1F980}", " ", "<unk>  <mask>x"] {
        assert_eq!(ours.encode(text).expect("ids"), theirs.encode_fast(text, true).expect("ids").get_ids(), "{text:?}");
    }
}

/// A tokenizer.json with random merges of few characters, of which some, and some bytes, have no token.
fn random_model(rng: &mut StdRng) -> Value {
    let characters = ["a", "b", "c", "\u{e9}", "\u{1f980}"];
    let mut tokens: Vec<String> = characters[..rng.random_range(1..=5)].iter().map(|c| (*c).to_owned()).collect();
    let mut merges: Vec<[String; 2]> = Vec::new();
    for _ in 0..rng.random_range(0..40) {
        let part = |rng: &mut StdRng| tokens.choose(rng).expect("a token").clone();
        let pair = [part(rng), part(rng)];
        if pair.concat().len() < 12 {
            // A pair may be listed twice.
            tokens.extend(Some(pair.concat()).filter(|whole| !tokens.contains(whole)));
            merges.push(pair);
        }
    }
    let bytes = rng.random_range(0..3) * 128;
    tokens.extend((0..bytes).map(|byte| format!("<0x{byte:02X}>")));
    let unknown = rng.random_bool(0.7).then_some("<unk>");
    tokens.extend(unknown.map(str::to_owned));
    // Ids in any order, with gaps.
    let vocab = tokens.iter().enumerate().map(|(i, token)| (token.clone(), json!(i * 7 % 499))).collect();
    let joined = rng.random_bool(0.5);
    let merges: Vec<_> = merges.iter().map(|pair| if joined { json!(pair.join(" ")) } else { json!(pair) }).collect();
    json!({
        "added_tokens": [],
        "model": {
            "type": "BPE",
            "unk_token": unknown,
            "fuse_unk": rng.random_bool(0.5),
            "byte_fallback": rng.random_bool(0.5),
            "ignore_merges": rng.random_bool(0.3),
            "vocab": Value::Object(vocab),
            "merges": merges,
        },
    })
}

#[test]
fn random_models_have_the_ids_of_the_tokenizers_crate() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("tokenizer.json");
    let mut rng = StdRng::seed_from_u64(1);
    let mut tokens = 0;
    for _ in 0..400 {
        let model = random_model(&mut rng).to_string();
        std::fs::write(&path, &model).expect("a file");
        let ours = Tokenizer::read(&path, 512).expect("a tokenizer");
        let theirs = model.parse::<tokenizers::Tokenizer>().expect("a tokenizer");
        for _ in 0..20 {
            let length = rng.random_range(1..40);
            let text: String = (0..length).map(|_| *b"abc\xe9dabc".choose(&mut rng).expect("one") as char).collect();
            let text = text.replace('d', if rng.random_bool(0.5) { "\u{1f980}" } else { "d" });
            let want = theirs.encode(text.as_str(), true).expect("ids");
            let got = ours.encode(&text).expect("ids");
            assert_eq!(got, want.get_ids(), "{text:?} of {model}");
            assert_eq!(
                ours.decode(&got).expect("text"),
                theirs.decode(&got, true).expect("text"),
                "{text:?} of {model}"
            );
            tokens += got.len();
        }
    }
    assert!(tokens > 50_000, "{tokens}");
}
