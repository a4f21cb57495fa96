//! Synthesized checkpoints load and echo: every draft is accepted. And what is written as GGUF is
//! read back, whole or not at all.

#[path = "../examples/synthesize/main.rs"]
#[allow(dead_code)] // its `main`
mod synthesize;

use std::path::Path;

use clap::Parser;
use foretoken::checkpoint::gguf::{Gguf, GgufWriter, TensorWriter, Value, ValueType};
use foretoken::{
    Cancel, EndOfGeneration, Engine, EngineOptions, GenerateOptions, Piece, SessionOptions, Speculation,
    SpeculationOptions, Statistics, Stop,
};

const TOKENS: usize = 16;

fn synthesize(directory: &Path, options: &str) -> Engine {
    let directory = directory.to_str().expect("a path in UTF-8");
    let words = ["synthesize", directory].into_iter().chain(options.split(' '));
    let args = synthesize::Args::try_parse_from(words).expect("options");
    synthesize::run(&args, Cancel::default()).expect("a pair of checkpoints");
    let variant = options.split(' ').next().expect("a variant");
    let path = |part: &str| Path::new(directory).join(format!("{variant}-{part}.gguf"));
    let mut options = EngineOptions::new(path("target"));
    options.assistant = Some(path("assistant")).filter(|path| path.exists());
    Engine::load(&options).expect("an engine")
}

/// What follows a prompt that ends in `last`.
fn generate(engine: &Engine, last: u32, speculation: Speculation) -> (Vec<u32>, Statistics) {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let options = GenerateOptions { max_tokens: TOKENS, speculation, stop, ..GenerateOptions::default() };
    let mut session = engine.session(&SessionOptions::default()).expect("a session");
    let mut generation = session.generate(&[2, 400, 1000, last], &options).expect("a generation");
    let pieces: Vec<Piece> = generation.by_ref().map(|piece| piece.expect("a piece")).collect();
    (pieces.into_iter().flat_map(|piece| piece.tokens).collect(), generation.statistics().clone())
}

fn echoes(options: &str) {
    let directory = tempfile::tempdir().expect("a directory");
    let engine = synthesize(directory.path(), options);
    let vocab = engine.target().vocab_size();
    let mtp = Speculation::With(SpeculationOptions::mtp(4));
    for last in (300..vocab as u32).step_by(vocab / 4) {
        let (ids, statistics) = generate(&engine, last, mtp.clone());
        assert_eq!(ids, [last; TOKENS], "{options}");
        assert!(statistics.drafted > 0, "{options}: nothing was drafted");
        assert_eq!(statistics.accepted, statistics.drafted, "{options}: drafts of {last} were rejected");
        assert_eq!(generate(&engine, last, Speculation::Off).0, ids, "{options}: speculation changed the text");
    }
}

/// The fewest layers that are of every kind: sliding and full, with K and V of their own and without.
#[test]
fn every_kind_of_layer_echoes() {
    echoes("e2b --layers 7 --vocab 4096");
    echoes("e2b --layers 7 --vocab 4096 --key-norm 0.125");
}

#[test]
fn experts_echo() {
    echoes("26b --layers 2 --vocab 2048");
}

#[test]
fn a_nextn_head_echoes() {
    echoes("qwen-0.8b --layers 4 --vocab 2048");
}

#[test]
fn the_centroid_head_finds_every_token() {
    echoes("e4b --layers 2 --vocab 16384 --centroids");
}

#[test]
fn other_types_echo() {
    for quantize in ["q8_0", "q4_0", "iq4_nl", "iq4_xs", "mxfp4", "bf16"] {
        echoes(&format!("e2b --layers 2 --vocab 1024 --quantize {quantize}"));
    }
}

#[test]
fn options_that_do_not_fit_are_errors() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("a path in UTF-8");
    let parse = |words: &[&str]| synthesize::Args::try_parse_from(["synthesize", path].iter().chain(words));
    for words in [&["7b"][..], &["e2b", "--layers", "1"], &["e2b", "--quantize", "q9"], &["e2b", "--vocab", "7"]] {
        assert!(parse(words).is_err(), "{words:?}");
    }
    let args = parse(&["26b", "--centroids"]).expect("options");
    let error = synthesize::run(&args, Cancel::default()).expect_err("26b's assistant has no centroids");
    assert!(error.to_string().starts_with("--centroids:"), "{error}");
    let args = parse(&["qwen-27b", "--layers", "3"]).expect("options");
    let error = synthesize::run(&args, Cancel::default()).expect_err("no attention");
    assert!(error.to_string().starts_with("--layers:"), "{error}");
    assert_eq!(names(directory.path()), [""; 0]);
}

/// A file that is cancelled before its first tensor is removed.
#[test]
fn a_cancelled_file_is_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().to_str().expect("a path in UTF-8");
    let words = ["synthesize", path, "e2b", "--layers", "2", "--vocab", "1024"];
    let args = synthesize::Args::try_parse_from(words).expect("options");
    let cancel = Cancel::default();
    cancel.cancel();
    let error = synthesize::run(&args, cancel).expect_err("cancelled");
    assert!(matches!(error.downcast_ref(), Some(foretoken::Error::Cancelled)), "{error}");
    assert_eq!(names(directory.path()), [""; 0]);
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// One tensor of two rows of Q8_0, and one of three floats.
fn begin(path: &Path) -> TensorWriter {
    let mut writer = GgufWriter::create(path).expect("a writer");
    writer.value("general.architecture", "test").expect("a value");
    writer.tensor("blocks", 8, &[2, 32]).expect("a tensor");
    writer.tensor("floats", 0, &[3]).expect("a tensor");
    writer.begin().expect("a header")
}

const BLOCKS: [u8; 68] = [5; 68];
const FLOATS: [u8; 12] = [0, 0, 128, 63, 0, 0, 0, 64, 0, 0, 64, 64];

fn write_all(path: &Path) {
    let mut tensors = begin(path);
    for piece in BLOCKS.chunks(7) {
        tensors.write("blocks", piece).expect("a piece");
    }
    tensors.write("floats", &FLOATS).expect("a tensor");
    assert_eq!(tensors.total_bytes(), (BLOCKS.len() + FLOATS.len()) as u64);
    tensors.finish().expect("a file");
}

#[test]
fn what_is_written_is_read_back() {
    let directory = tempfile::tempdir().expect("a directory");
    let (first, second) = (directory.path().join("first.gguf"), directory.path().join("second.gguf"));
    let mut writer = GgufWriter::create(&first).expect("a writer");
    writer.value("u32", 7u32).expect("a value");
    writer.value("f32", 1e-6f32).expect("a value");
    writer.value("bool", true).expect("a value");
    writer.value("string", "größe").expect("a value");
    writer.array("u32s", [1u32, 2]).expect("an array");
    writer.array("i32s", [-1i32]).expect("an array");
    writer.array("f32s", [0.5f32, -0.0]).expect("an array");
    writer.array("bools", [true, false]).expect("an array");
    writer.array("strings", (0..1000).map(|i| format!("▁t{i}"))).expect("an array");
    writer.array("none", [""; 0]).expect("an array");
    writer.tensor("matrix", 8, &[2, 3, 32]).expect("a tensor");
    let mut tensors = writer.begin().expect("a header");
    let bytes: Vec<u8> = (0..6 * 34).collect();
    tensors.write("matrix", &bytes).expect("a tensor");
    tensors.finish().expect("a file");

    let check = |gguf: &Gguf| {
        let get = |key| gguf.metadata(key).unwrap_or_else(|| panic!("{key} is missing"));
        let array = |key| get(key).as_array().expect("an array");
        assert_eq!(gguf.version(), 3);
        assert_eq!(get("u32"), Value::U32(7));
        assert_eq!(get("f32"), Value::F32(1e-6));
        assert_eq!(get("bool"), Value::Bool(true));
        assert_eq!(get("string"), Value::String("größe"));
        assert_eq!(array("u32s").iter().collect::<Vec<_>>(), [Value::U32(1), Value::U32(2)]);
        assert_eq!(array("i32s").iter().collect::<Vec<_>>(), [Value::I32(-1)]);
        assert_eq!(array("f32s").iter().collect::<Vec<_>>(), [Value::F32(0.5), Value::F32(-0.0)]);
        assert_eq!(array("bools").iter().collect::<Vec<_>>(), [Value::Bool(true), Value::Bool(false)]);
        let strings: Vec<_> = array("strings").strings().expect("of strings").collect();
        assert_eq!((strings.len(), strings[999]), (1000, "▁t999"));
        assert_eq!((array("none").element(), array("none").len()), (ValueType::String, 0));
    };
    let gguf = Gguf::open(&first).expect("a valid file");
    check(&gguf);
    let tensor = gguf.tensor("matrix").expect("a readable tensor").expect("the tensor");
    assert_eq!((tensor.type_id, &tensor.shape[..], tensor.bytes.as_slice()), (8, &[2, 3, 32][..], &bytes[..]));

    let mut copy = GgufWriter::create(&second).expect("a writer");
    for key in gguf.keys() {
        copy.copy(key, gguf.metadata(key).expect("a value")).expect("a copy");
    }
    copy.begin().expect("a header").finish().expect("a file");
    check(&Gguf::open(&second).expect("a valid file"));
    write_all(&second);
    let floats = Gguf::open(&second).expect("a valid file").tensor("floats").expect("readable").expect("the tensor");
    assert_eq!(floats.bytes.as_slice(), FLOATS);
    assert_eq!(names(directory.path()), ["first.gguf", "second.gguf"]);
}

#[test]
fn an_unfinished_file_leaves_nothing_and_replaces_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("model.gguf");
    let mut tensors = begin(&path);
    tensors.write("blocks", &BLOCKS).expect("a tensor");
    assert_eq!(names(directory.path()), ["model.gguf.partial"]);
    let error = GgufWriter::create(&path).err().expect("another is writing the file").to_string();
    assert!(error.contains("is being written by another process"), "{error}");
    drop(tensors);
    assert_eq!(names(directory.path()), [""; 0]);
    drop(GgufWriter::create(&path).expect("a writer"));
    assert_eq!(names(directory.path()), [""; 0]);

    std::fs::write(&path, "as it was").expect("a file");
    std::fs::write(directory.path().join("model.gguf.partial"), "left by a killed process").expect("a file");
    let mut tensors = begin(&path);
    tensors.write("blocks", &BLOCKS[1..]).expect("a piece");
    assert_eq!(std::fs::read(&path).expect("a file"), b"as it was");
    let error = tensors.finish().expect_err("a byte is missing").to_string();
    assert!(error.ends_with("tensor blocks: has 67 of its 68 bytes; write all before finishing the file"), "{error}");
    assert_eq!(std::fs::read(&path).expect("a file"), b"as it was");
    assert_eq!(names(directory.path()), ["model.gguf"]);
    write_all(&path);
    Gguf::open(&path).expect("the new file");
    assert_eq!(names(directory.path()), ["model.gguf"]);
}

#[test]
fn mistakes_are_errors_that_name_the_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("model.gguf");
    let fails = |result: foretoken::Result<()>, expected: &str| {
        let error = result.expect_err(expected).to_string();
        let named = error.starts_with(&directory.path().display().to_string());
        assert!(named && error.contains(expected) && !error.contains('\n'), "{error}, not {expected}");
    };
    fails(GgufWriter::create(directory.path()).map(drop), "is a directory");
    fails(GgufWriter::create(directory.path().join("absent/model.gguf")).map(drop), "its directory does not exist");
    fails(GgufWriter::create(directory.path().join("model.gguf/")).map(drop), "is not a file name");
    GgufWriter::create("/").map(drop).expect_err("no name of a file");
    #[cfg(unix)]
    GgufWriter::create("/dev/null").map(drop).expect_err("a device");

    let mut writer = GgufWriter::create(&path).expect("a writer");
    writer.value("key", 1u32).expect("a value");
    fails(writer.array("key", [1u32]), "key: is declared twice");
    fails(writer.value("", 1u32), "is a key of 0 bytes");
    fails(writer.value("general.alignment", 64u32), "is set by the writer");
    writer.tensor("tensor", 0, &[3]).expect("a tensor");
    fails(writer.tensor("tensor", 0, &[3]), "tensor: is declared twice");
    fails(writer.tensor(&"x".repeat(64), 0, &[3]), "has a name of 64 bytes");
    fails(writer.tensor("a", 4, &[3]), "has unknown type 4");
    fails(writer.tensor("a", 8, &[2, 33]), "needs a multiple of 32");
    fails(writer.tensor("a", 0, &[]), "1 to 4 dimensions");
    fails(writer.tensor("a", 0, &[2, 0]), "none of them 0");
    fails(writer.tensor("a", 0, &[usize::MAX, 2]), "overflows");
    drop(writer);

    let mut tensors = begin(&path);
    fails(tensors.write("floats", &FLOATS), "must come after blocks");
    tensors.write("blocks", &BLOCKS[..30]).expect("a piece");
    fails(tensors.write("floats", &FLOATS), "begins after 30 of the 68 bytes of blocks");
    fails(tensors.write("blocks", &BLOCKS), "has 98 bytes, but its type and shape have 68");
    tensors.write("blocks", &BLOCKS[30..]).expect("the rest");
    fails(tensors.write("stranger", &FLOATS), "must come after floats");
    tensors.write("floats", &FLOATS).expect("a tensor");
    fails(tensors.write("stranger", &FLOATS), "comes after the last tensor");
    tensors.finish().expect("a file");
}
