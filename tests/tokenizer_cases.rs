//! Ids equal those of PyPI's tokenizers on 2 000 cases (scripts/tokenizer_cases.py), from tokenizer.json and from a GGUF file
//! without a tokenizer.json next to it.

mod gguf_writer;
mod twins;

use std::path::{Path, PathBuf};

use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::convert::{Outtype, ToGguf, to_gguf};
use foretoken::tokenizer::Tokenizer;
use serde_json::Value;
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
    has_the_ids(&Tokenizer::read(&demo, 4096).expect("a tokenizer"), "demo", "the demo's tokenizer.json");
    has_the_ids(&Tokenizer::read(&file("twin.json"), 512).expect("a tokenizer"), "twin", "the twin's tokenizer.json");
}

#[test]
fn a_gguf_file_alone_has_the_ids_of_its_tokenizer_json() {
    let twin = Twin::of("edge");
    std::fs::copy(file("twin.json"), twin.path("target/tokenizer.json")).expect("a copy");
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    for (name, directory, vocabulary) in [("twin", twin.path("target"), 512), ("demo", demo, 4096)] {
        let path = twin.path(&format!("{name}.gguf"));
        let options = ToGguf { outtype: Outtype::F16, ..ToGguf::default() };
        to_gguf(&Checkpoint::open(directory).expect("a checkpoint"), &path, &options).expect("a file");
        let checkpoint = Checkpoint::open(&path).expect("the file");
        let tokenizer = checkpoint.tokenizer(vocabulary).expect("readable").expect("a tokenizer");
        has_the_ids(&tokenizer, name, &format!("{name}.gguf"));
    }
}
