//! Text is emitted in whole characters, cut exactly before a stop string.

mod cases;

use std::path::Path;

use foretoken::tokenizer::{StreamDecoder, Tokenizer};
use foretoken::{
    EndOfGeneration, Engine, EngineOptions, FinishReason, GenerateOptions, SessionOptions, Speculation,
    SpeculationOptions, Stop,
};
use serde_json::json;

/// The fixtures' vocabulary.
const VOCABULARY: usize = 512;

/// A tokenizer in Gemma's form: BPE with byte fallback, U+2581 for a space. `pieces` are its ordinary tokens by id; the
/// other ids that a fixture can write are bytes and fillers.
fn tokenizer(directory: &Path, pieces: &[(u32, &str)]) -> Tokenizer {
    let specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"];
    let mut vocabulary = serde_json::Map::new();
    pieces.iter().for_each(|(id, piece)| drop(vocabulary.insert((*piece).into(), json!(id))));
    let mut free = (0..VOCABULARY as u32).filter(|id| !pieces.iter().any(|(taken, _)| taken == id));
    let mut added = Vec::new();
    for special in specials {
        let id = free.next().expect("a free id");
        vocabulary.insert(special.into(), json!(id));
        added.push(json!({"id": id, "content": special, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}));
    }
    for byte in 0..=255 {
        let name = format!("<0x{byte:02X}>");
        if !vocabulary.contains_key(&name) {
            vocabulary.insert(name, json!(free.next().expect("a free id")));
        }
    }
    free.for_each(|id| drop(vocabulary.insert(format!("filler{id}"), json!(id))));
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false},
        "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "vocab": vocabulary, "merges": []},
    });
    let path = directory.join("tokenizer.json");
    std::fs::write(&path, file.to_string()).expect("tokenizer.json");
    Tokenizer::read(&path, VOCABULARY).expect("a tokenizer")
}

/// The pieces of a stream of `ids`; the last is what was held back at the end.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    let mut decoder = StreamDecoder::default();
    let mut pieces: Vec<_> = ids.iter().map(|id| decoder.push(tokenizer, *id).expect("text")).collect();
    pieces.push(decoder.finish(tokenizer).expect("text"));
    pieces
}

fn byte_ids(tokenizer: &Tokenizer, bytes: &[u8]) -> Vec<u32> {
    bytes.iter().map(|byte| tokenizer.id(&format!("<0x{byte:02X}>")).expect("a byte token")).collect()
}

/// Tokens of bytes may end within characters, one after the other: each character comes out with
/// the token that ends it.
#[test]
fn tokens_that_end_within_characters() {
    let directory = tempfile::tempdir().expect("a directory");
    // The bytes of U+4F60 and U+597D, e4 bd a0 and e5 a5 bd, as byte-level vocabularies spell them.
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "merges": [],
            "vocab": {"\u{120}": 0, "\u{e4}": 1, "\u{bd}\u{142}\u{e5}": 2, "\u{a5}\u{bd}\u{e4}": 3, "\u{a5}\u{bd}": 4, "\u{ff}": 5}},
    });
    let path = directory.path().join("tokenizer.json");
    std::fs::write(&path, file.to_string()).expect("tokenizer.json");
    let tokenizer = Tokenizer::read(&path, 6).expect("a tokenizer");
    let (you, good) = ("\u{4f60}", "\u{597d}");
    assert_eq!(
        stream(&tokenizer, &[1, 2, 3, 2, 3, 2, 3, 2, 4, 0]),
        ["", you, good, you, good, you, good, you, good, " ", ""]
    );
    assert_eq!(stream(&tokenizer, &[1, 2, 3]).concat(), format!("{you}{good}\u{fffd}"));
    // Nothing is waited for behind bytes that begin no character, or do not go on with one.
    assert_eq!(stream(&tokenizer, &[5, 5, 0]), ["\u{fffd}", "\u{fffd}", " ", ""]);
    let replaced = "\u{fffd}";
    assert_eq!(stream(&tokenizer, &[1, 1, 1, 1, 2, 4]), ["", replaced, replaced, replaced, you, good, ""]);
}

#[test]
fn a_character_comes_out_with_its_last_byte() {
    let directory = tempfile::tempdir().expect("a directory");
    let tokenizer = tokenizer(directory.path(), &[(300, "\u{2581}Hello"), (301, "!")]);
    for character in ['\u{e9}', '\u{4e2d}', '\u{1f600}', '\u{10FFFF}', 'a', '\0', '\u{FFFD}'] {
        let bytes = character.to_string().into_bytes();
        let pieces = stream(&tokenizer, &byte_ids(&tokenizer, &bytes));
        let (held, whole) = pieces.split_at(bytes.len() - 1);
        assert!(held.iter().all(String::is_empty), "{character:?}: {pieces:?}");
        assert_eq!(whole.concat(), character.to_string(), "{pieces:?}");
        assert_eq!(whole[0], character.to_string(), "{pieces:?}");
    }
}

/// Characters of one to four bytes, in byte tokens and in words of their own, spaces before and after them.
#[test]
fn pieces_add_up_to_the_whole_text() {
    let directory = tempfile::tempdir().expect("a directory");
    let words =
        [(300, "\u{2581}Hello"), (301, "\u{2581}"), (302, "\u{4e2d}\u{6587}"), (303, "wor"), (304, "ld\u{2581}")];
    let tokenizer = tokenizer(directory.path(), &words);
    let mut texts: Vec<Vec<u32>> = vec![
        vec![300, 301, 303, 304],
        [&[300][..], &byte_ids(&tokenizer, "\u{1f980}\u{e9}\u{4e2d}".as_bytes()), &[301, 302, 304]].concat(),
        [&byte_ids(&tokenizer, "\u{4e2d}\u{6587}\u{1f600}".as_bytes())[..], &[302]].concat(),
        byte_ids(&tokenizer, "\u{fffd}\u{1f980}".as_bytes()),
        tokenizer.encode(" Hello wo\u{308}rld \u{1f1e9}\u{1f1ea} \u{6f22}\u{5b57}  ").expect("tokens"),
        tokenizer.encode("\u{1f468}\u{200d}\u{1f469}\u{200d}\u{1f467}").expect("tokens"),
    ];
    let specials = ["<|turn>", "<eos>"].map(|name| tokenizer.id(name).expect("a special token"));
    texts.push([&texts[1][..1], &specials, &texts[1][1..], &specials].concat());
    for ids in texts {
        let pieces = stream(&tokenizer, &ids);
        assert_eq!(pieces.concat(), tokenizer.decode(&ids).expect("text"), "{pieces:?}");
        assert!(!pieces.concat().contains('\u{2581}'), "{pieces:?}");
    }
}

/// Bytes that are not UTF-8: nothing after them is lost or repeated, and nothing waits forever.
#[test]
fn invalid_bytes_become_replacements() {
    let directory = tempfile::tempdir().expect("a directory");
    let tokenizer = tokenizer(directory.path(), &[(300, "\u{2581}Hello"), (301, "!")]);
    for (bytes, least) in [
        (&b"\xFF"[..], 1),
        (b"\xF0\x9F\x98", 3),
        (b"\xC3", 1),
        (b"\x80\x80\x80\x80\x80\x80\x80\x80\x80", 9),
        (b"\xF0\xF0\x9F\x98\x80", 5),
        (b"\xED\xA0\x80", 3),
        (b"\xFF\xFE\xC3\xA9", 4),
    ] {
        // The whole decode replaces every byte of a run that is invalid anywhere, and so does the stream.
        let ids = [&[300][..], &byte_ids(&tokenizer, bytes), &[300, 301]].concat();
        let pieces = stream(&tokenizer, &ids);
        assert_eq!(pieces.concat(), tokenizer.decode(&ids).expect("text"), "{bytes:X?}: {pieces:?}");
        assert_eq!(pieces.concat().matches('\u{FFFD}').count(), least, "{bytes:X?}: {pieces:?}");
        let longest_wait = pieces[1..=bytes.len()].split(|piece| !piece.is_empty()).map(<[_]>::len).max();
        assert!(longest_wait < Some(4), "{bytes:X?}: {pieces:?}");
    }
    // An emitted character cannot be retracted when bytes after it turn out to be invalid; what follows still comes.
    for (valid, invalid) in [("\u{e9}", &b"\xFF"[..]), ("\u{4e2d}", b"\xFF"), ("\u{1f600}", b"\xFF\xFE\xFD\xFC\xFB")] {
        let bytes = [valid.as_bytes(), invalid].concat();
        let ids = [&[300][..], &byte_ids(&tokenizer, &bytes), &[300, 301]].concat();
        let pieces = stream(&tokenizer, &ids);
        let want = format!(" Hello{valid}{} Hello!", "\u{FFFD}".repeat(invalid.len()));
        assert_eq!(pieces.concat(), want, "{pieces:?}");
    }
}

/// The edge fixture with a tokenizer under which its greedy ids spell `words`, each id the next word at its first
/// occurrence, and the ids.
fn spelling(directory: &Path, words: &[&str], tokens: usize) -> (Engine, Vec<u32>, Vec<u32>) {
    let case = cases::named("edge");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(case.path.join("target").join(file), directory.join(file)).expect("a copy");
    }
    let prompt = case.ids("input_ids");
    let options = EngineOptions::new(directory).with_assistant(case.assistant_path().expect("an assistant"));
    let mute = Engine::load(&options).expect("an engine without a tokenizer");
    let mut session = mute.session(&SessionOptions::default()).expect("a session");
    let generation = session.generate(&prompt, &greedy(tokens, Vec::new())).expect("a generation");
    let ids: Vec<u32> = generation.flat_map(|piece| piece.expect("a piece").tokens).collect();
    let mut pieces: Vec<(u32, &str)> = Vec::new();
    for id in &ids {
        if pieces.len() < words.len() && !pieces.iter().any(|(known, _)| known == id) {
            pieces.push((*id, words[pieces.len()]));
        }
    }
    assert_eq!(pieces.len(), words.len(), "the fixture writes too few different tokens for this test");
    drop(tokenizer(directory, &pieces));
    (Engine::load(&options).expect("an engine"), prompt, ids)
}

fn greedy(max_tokens: usize, strings: Vec<String>) -> GenerateOptions {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, strings, ..Stop::default() };
    GenerateOptions { max_tokens, stop, speculation: Speculation::Off, ..GenerateOptions::default() }
}

/// The pieces' texts, the ids, and how it ended.
fn generate(
    engine: &Engine,
    prompt: &[u32],
    options: &GenerateOptions,
) -> (Vec<String>, Vec<u32>, Option<FinishReason>) {
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let mut generation = session.generate(prompt, options).expect("a generation");
    let pieces: Vec<_> = generation.by_ref().map(|piece| piece.expect("a piece")).collect();
    let finish = generation.finish_reason();
    let ids = pieces.iter().flat_map(|piece| piece.tokens.clone()).collect();
    (pieces.into_iter().map(|piece| piece.text).collect(), ids, finish)
}

/// With and without drafts, which change where pieces end.
fn with_and_without_drafts(options: &GenerateOptions) -> Vec<GenerateOptions> {
    let speculation = [1, 4, 8].map(|block_size| Speculation::With(SpeculationOptions::mtp(block_size)));
    let speculation = std::iter::once(Speculation::Off).chain(speculation);
    speculation.map(|speculation| GenerateOptions { speculation, ..options.clone() }).collect()
}

/// An emoji in four byte tokens among words: the fixture's seventh to tenth new ids follow each other.
const WORDS: [&str; 11] =
    ["Hel", "lo", "\u{2581}wor", "l", "d\u{2581}", "o", "<0xF0>", "<0x9F>", "<0xA6>", "<0x80>", "again"];

/// The text is the decoder's output for the ids one by one, wherever pieces end. That equals the whole text's decoding
/// as far as bytes are UTF-8; after an invalid byte the latter also replaces the characters before it in the same run
/// of byte tokens, which a stream has already emitted.
#[test]
fn a_generation_hands_out_whole_characters() {
    let directory = tempfile::tempdir().expect("a directory");
    let (engine, prompt, ids) = spelling(directory.path(), &WORDS, 24);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let whole = tokenizer.decode(&ids).expect("text");
    let sound = &whole[..whole.find('\u{FFFD}').unwrap_or(whole.len())];
    assert!(sound.contains('\u{1f980}'), "{whole:?}");
    let streamed = stream(tokenizer, &ids).concat();
    assert!(streamed.starts_with(sound), "{streamed:?} does not start with {sound:?}");
    for options in with_and_without_drafts(&greedy(24, Vec::new())) {
        let (pieces, got, finish) = generate(&engine, &prompt, &options);
        assert_eq!((got, finish), (ids.clone(), Some(FinishReason::MaxTokens)));
        assert_eq!(pieces.concat(), streamed, "{pieces:?}");
    }
}

/// Every short substring of the text's start, so that a stop string begins, ends and spans tokens in every way.
#[test]
fn stop_strings_are_cut_exactly() {
    let directory = tempfile::tempdir().expect("a directory");
    let (engine, prompt, ids) = spelling(directory.path(), &WORDS, 16);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    let whole = tokenizer.decode(&ids).expect("text");
    // Up to the first repeated ids, which also repeat the emoji's bytes out of order.
    let sound = whole.find('\u{FFFD}').unwrap_or(whole.len());
    let starts: Vec<usize> = whole[..sound].char_indices().map(|(at, _)| at).take(22).collect();
    assert!(starts.len() >= 10 && whole[..sound].contains('\u{1f980}'), "{whole:?}");
    for (from, to) in (1..=6).flat_map(|len| starts.windows(len + 1).map(move |at| (at[0], at[len]))) {
        let stop = &whole[from..to];
        let at = whole.find(stop).expect("it comes from there");
        for options in with_and_without_drafts(&greedy(16, vec![stop.into()])) {
            let (pieces, got, finish) = generate(&engine, &prompt, &options);
            assert_eq!(pieces.concat(), whole[..at], "stop at {stop:?}: {pieces:?}");
            assert_eq!(finish, Some(FinishReason::StopString), "stop at {stop:?}");
            assert!(ids.starts_with(&got), "stop at {stop:?}");
            assert!(tokenizer.decode(&got).expect("text").contains(stop), "stop at {stop:?}: it is not complete");
            let shorter = tokenizer.decode(&got[..got.len() - 1]).expect("text");
            assert!(!shorter.contains(stop), "stop at {stop:?}: a token too many");
        }
    }
}

/// Of several stop strings the one that begins first cuts.
#[test]
fn the_first_of_several_stop_strings_cuts() {
    let directory = tempfile::tempdir().expect("a directory");
    let (engine, prompt, _) = spelling(directory.path(), &WORDS, 16);
    for (strings, want) in
        [(["lo wor", "o w"], "Hel"), (["wor", "lo w"], "Hel"), (["", "Hello "], ""), (["o", "l"], "He")]
    {
        let options = greedy(16, strings.map(String::from).to_vec());
        let (pieces, _, finish) = generate(&engine, &prompt, &options);
        assert_eq!((pieces.concat().as_str(), finish), (want, Some(FinishReason::StopString)), "{strings:?}");
    }
}

/// Text that may become a stop string is held back; if the end comes first, it is emitted.
#[test]
fn held_text_comes_out_at_the_end() {
    let directory = tempfile::tempdir().expect("a directory");
    let (engine, prompt, ids) = spelling(directory.path(), &WORDS, 16);
    let tokenizer = engine.tokenizer().expect("a tokenizer");
    for tokens in 1..=16 {
        let whole = stream(tokenizer, &ids[..tokens]).concat();
        // The whole text is a prefix of this string, so nothing may be emitted before the end.
        let stop = format!("{whole} and more");
        for options in with_and_without_drafts(&greedy(tokens, vec![stop])) {
            let (pieces, _, finish) = generate(&engine, &prompt, &options);
            assert_eq!(pieces.concat(), whole, "{tokens} tokens: {pieces:?}");
            assert_eq!(finish, Some(FinishReason::MaxTokens));
            let (last, earlier) = pieces.split_last().expect("a piece");
            assert!(earlier.iter().all(String::is_empty), "{tokens} tokens: {pieces:?}");
            assert_eq!(*last, whole);
        }
    }
}

/// A rendered chat has its special tokens in place: none is added, none is spelled out in letters.
#[test]
fn rendered_chats_become_tokens() {
    let directory = tempfile::tempdir().expect("a directory");
    let words = [(300, "H"), (301, "i"), (302, "m"), (303, "\n"), (304, "\u{2581}")];
    let tokenizer = tokenizer(directory.path(), &words);
    let special = |name: &str| tokenizer.id(name).expect("a special token");
    let rendered = "<bos><|turn>m\nHi <turn|>\n";
    let want = [special("<bos>"), special("<|turn>"), 302, 303, 300, 301, 304, special("<turn|>"), 303];
    assert_eq!(tokenizer.encode(rendered).expect("tokens"), want);
    assert_eq!(tokenizer.decode(&want).expect("text"), "m\nHi \n");
}
