//! A tokenizer as large as Gemma's takes no more memory than its file and 64 MiB.

use std::fmt::Write;
use std::sync::atomic::Ordering;

use foretoken::checkpoint::gguf::{self, Gguf};
use foretoken::tokenizer::Tokenizer;

use crate::counting::{HELD, PEAK, alone};
use crate::gguf_writer::*;

/// Memory besides the file.
const ROOM: usize = 64 << 20;

/// Characters of three bytes; tokens have up to three of them.
const CHARACTERS: u32 = 64;

/// 262 144 tokens with 520 064 merges, every split of each.
fn lists() -> (Vec<String>, Vec<[String; 2]>) {
    let one: Vec<String> =
        (0x4e00..0x4e00 + CHARACTERS).filter_map(char::from_u32).map(|character| character.to_string()).collect();
    let longer = |tokens: &[String]| -> Vec<String> {
        tokens.iter().flat_map(|token| one.iter().map(move |character| token.clone() + character)).collect()
    };
    let two = longer(&one);
    let three = longer(&two);
    let mut tokens = [&one[..], &two, &three].concat();
    tokens.truncate(1 << 18);
    let merges = tokens.iter().flat_map(|token| {
        (3..token.len())
            .step_by(3)
            .map(|at| token.split_at(at))
            .map(|(left, right)| [left.to_owned(), right.to_owned()])
    });
    let merges = merges.collect();
    (tokens, merges)
}

/// What `read` takes at most, and leaves.
fn taken<T>(read: impl FnOnce() -> T) -> (usize, T) {
    let before = HELD.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let read = read();
    (PEAK.load(Ordering::Relaxed) - before, read)
}

#[test]
fn a_large_vocabulary_takes_its_file_and_little_more() {
    let _alone = alone();
    let (tokens, merges) = lists();
    assert_eq!((tokens.len(), merges.len()), (262_144, 520_064));
    let directory = tempfile::tempdir().expect("a directory");

    let mut json = String::from("{\"model\": {\"type\": \"BPE\", \"vocab\": {");
    let comma = |i: usize| if i == 0 { "" } else { "," };
    for (i, token) in tokens.iter().enumerate() {
        write!(json, "{}\n{token:?}: {i}", comma(i)).expect("a string");
    }
    json += "}, \"merges\": [";
    for (i, [left, right]) in merges.iter().enumerate() {
        write!(json, "{}\n[{left:?}, {right:?}]", comma(i)).expect("a string");
    }
    json += "]}}";
    let path = directory.path().join("tokenizer.json");
    std::fs::write(&path, &json).expect("a file");
    let (of_json, read) = taken(|| Tokenizer::read(&path, tokens.len()).expect("a tokenizer"));
    println!("tokenizer.json: {of_json} bytes for a file of {}", json.len());
    assert!(of_json <= json.len() + ROOM, "{of_json} bytes for a file of {}", json.len());
    let text = &tokens[100_000];
    assert_eq!(read.encode(text).expect("ids"), [100_000], "{text}");

    let file = GgufFile::new()
        .key("tokenizer.ggml.model", str_value("gemma4"))
        .key("tokenizer.ggml.tokens", strings(&tokens))
        .key("tokenizer.ggml.merges", strings(merges.iter().map(|pair| pair.join(" "))));
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, file.bytes()).expect("a file");
    drop((file, json, merges));
    let (of_gguf, read) = taken(|| {
        let gguf = Gguf::open(&path).expect("a file");
        let pipeline = gguf::tokenizer(&gguf).expect("a tokenizer").expect("one");
        Tokenizer::new(pipeline, &path, tokens.len()).expect("a tokenizer")
    });
    // The file is mapped.
    println!("GGUF: {of_gguf} bytes");
    assert!(of_gguf <= ROOM, "{of_gguf} bytes");
    assert_eq!(read.encode(text).expect("ids"), [100_000], "{text}");
}
