//! A saved and loaded session continues like the original, in every K/V format; other files are refused.

use std::path::Path;

use foretoken::kv::{CodeFormat, ExactZones, KvFormat, KvOptions, LayerFormat};
use foretoken::{
    ElementType, EndOfGeneration, Engine, EngineOptions, Error, GenerateOptions, Session, SessionOptions, Stop,
};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

fn engine() -> Engine {
    let demo = |part: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo").join(part);
    Engine::load(&EngineOptions::new(demo("target")).with_assistant(demo("assistant"))).expect("the demo pair")
}

/// The first layer's keys and values have formats of their own.
const FIRST: [KvFormat; 2] = [KvFormat::Exact(ElementType::F32), KvFormat::Exact(ElementType::Bf16)];

fn session(engine: &Engine, format: KvFormat) -> Session {
    let exact = ExactZones { head: 16, tail: 40, ..ExactZones::default() };
    let layers = vec![LayerFormat { layer: 0, key: FIRST[0], value: FIRST[1] }];
    let kv = KvOptions { key: format, value: format, exact, layers, max_round_rows: 64, ..KvOptions::default() };
    engine.session(&SessionOptions { kv }).expect("a session")
}

fn generate(session: &mut Session, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    let options = GenerateOptions { max_tokens: tokens, stop, ..GenerateOptions::default() };
    session.generate(prompt, &options).expect("a generation").flat_map(|piece| piece.expect("a piece").tokens).collect()
}

fn prompt(len: u32) -> Vec<u32> {
    (0..len).map(|i| 300 + i * 7919 % 3700).collect()
}

#[test]
fn a_loaded_session_goes_on_as_the_saved_one() {
    let engine = engine();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    for format in KvFormat::all() {
        let mut saved = session(&engine, format);
        generate(&mut saved, &prompt(400), 30);
        saved.save(&path).expect("a file");
        let mut loaded = engine.load_session(&path).expect("the session");
        // The second layer reads all positions.
        let formats = loaded.kv().report()[..2].iter().map(|of| (of.key, of.value)).collect::<Vec<_>>();
        assert_eq!(formats, [(Some(FIRST[0]), FIRST[1]), (Some(format), format)]);
        assert!(loaded.kv().same_rows(saved.kv()), "{format}: other K and V");
        assert_eq!(generate(&mut loaded, &prompt(5), 60), generate(&mut saved, &prompt(5), 60), "{format}");
        assert!(loaded.kv().same_rows(saved.kv()), "{format}: other K and V afterwards");
    }
}

/// Dropped rows have replaced others in a sliding window, and the file says so.
#[test]
fn a_loaded_session_is_rewound_as_the_saved_one() {
    let engine = engine();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    let mut saved = session(&engine, ElementType::F16.into());
    generate(&mut saved, &prompt(262), 0);
    // The third page replaced the first, and only the first two are saved.
    saved.rewind(256).expect("the rows of the window");
    saved.save(&path).expect("a file");
    let mut loaded = engine.load_session(&path).expect("the session");
    // Saved again after its context was reduced to less than was written.
    let kv_memory = Some(saved.kv().bytes_at(256) as u64);
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let small = Engine::load(&EngineOptions { kv_memory, ..EngineOptions::new(target) }).expect("the demo");
    let mut reduced = small.load_session(&path).expect("the session");
    assert_eq!(reduced.kv().max_context(), 256);
    reduced.save(&path).expect("a file");
    let mut again = engine.load_session(&path).expect("the session");
    for session in [&mut saved, &mut loaded, &mut again] {
        let message = session.rewind(100).expect_err("no such rows").to_string();
        assert!(message.contains("overwritten"), "{message}");
        session.rewind(255).expect("the rows of the window");
    }
    assert_eq!(generate(&mut loaded, &prompt(5), 8), generate(&mut saved, &prompt(5), 8));
}

/// A fine-tune has the configuration and often the embeddings of its base.
#[test]
fn a_session_of_other_weights_is_refused() {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let folder = tempfile::tempdir().expect("a folder");
    let bytes = std::fs::read(target.join("model.safetensors")).expect("the weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file.tensors().into_iter().map(|(name, tensor)| {
        let mut data = tensor.data().to_vec();
        if name.ends_with("down_proj.weight") {
            // The signs of bf16 numbers.
            data.iter_mut().skip(1).step_by(4).for_each(|byte| *byte ^= 0x80);
        }
        (name, tensor.dtype(), tensor.shape().to_vec(), data)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors
        .iter()
        .map(|(name, dtype, shape, data)| (name, TensorView::new(*dtype, shape.clone(), data).expect("a tensor")));
    safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).expect("the weights");
    std::fs::copy(target.join("config.json"), folder.path().join("config.json")).expect("a copy");
    let other = Engine::load(&EngineOptions::new(folder.path())).expect("the fine-tune");
    let mut saved = session(&engine(), ElementType::F16.into());
    generate(&mut saved, &prompt(20), 4);
    let path = folder.path().join("session");
    saved.save(&path).expect("a file");
    let error = other.load_session(&path).expect_err("a refusal").to_string();
    assert!(error.contains("another model"), "{error}");
}

#[test]
fn an_empty_session_can_be_saved() {
    let engine = engine();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    session(&engine, CodeFormat::Tqc5.into()).save(&path).expect("a file");
    let mut loaded = engine.load_session(&path).expect("the session");
    assert!(loaded.kv().is_empty());
    let mut fresh = session(&engine, CodeFormat::Tqc5.into());
    assert_eq!(generate(&mut loaded, &prompt(20), 20), generate(&mut fresh, &prompt(20), 20));
}

#[test]
fn files_that_are_no_such_session_are_refused() {
    let engine = engine();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    let mut saved = session(&engine, CodeFormat::Turbo3.into());
    generate(&mut saved, &prompt(200), 4);
    saved.save(&path).expect("a file");
    let whole = std::fs::read(&path).expect("the file");
    let refused = |bytes: &[u8], why: &str| {
        std::fs::write(&path, bytes).expect("a file");
        let message = engine.load_session(&path).expect_err("a refusal").to_string();
        assert!(message.contains(why) && message.contains("session") && !message.contains('\n'), "{message}");
    };
    for (len, why) in [
        (0, "is not a session file"),
        (10, "is not a session file"),
        (21, "is not a session file"),
        (30, "is truncated"),
        (whole.len() / 2, "damaged or truncated"),
        (whole.len() - 1, "damaged or truncated"),
    ] {
        refused(&whole[..len], why);
    }
    refused(&[&whole[..], b"x"].concat(), "damaged or truncated");
    for at in [whole.len() / 2, whole.len() - 2, whole.len() - 5000] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        refused(&damaged, "damaged");
    }
    let edited = |from: &str, to: &str| {
        let at = whole.windows(from.len()).position(|part| part == from.as_bytes()).expect(from);
        [&whole[..at], to.as_bytes(), &whole[at + from.len()..]].concat()
    };
    refused(&edited("\"version\":2", "\"version\":9"), "incompatible version");
    refused(&edited("\"key\":\"turbo3\"", "\"key\":\"turbo9\""), "turbo9");
    refused(&edited("\"len\":203", "\"len\":903"), "bytes");
    refused(&edited("\"len\":203", "\"len\":-03"), "damaged");
    let at = whole.windows(8).position(|part| part == b"\"model\":").expect("a model") + 8;
    let mut other = whole.clone();
    other[at] = if other[at] == b'1' { b'2' } else { b'1' };
    refused(&other, "another model");
    for (special, problem) in [(folder.path(), "is a directory"), (Path::new("/dev/null"), "is not a regular file")] {
        let message = engine.load_session(special).expect_err("a refusal").to_string();
        assert!(message.contains(&format!("{problem}; a session file is expected")), "{message}");
    }
    assert!(saved.save(folder.path()).is_err(), "a folder is not a file");
    std::fs::remove_file(&path).expect("the file");
    assert!(engine.load_session(&path).is_err());
}

/// An automatic context is what fit memory when the session was opened; less may be free when it is loaded.
#[test]
fn a_context_that_does_not_fit_is_reduced() {
    let target = Path::new(env!("CARGO_MANIFEST_DIR")).join("models/demo/target");
    let load = |kv_memory| {
        let options = EngineOptions { threads: Some(1), kv_memory: Some(kv_memory), ..EngineOptions::new(&target) };
        Engine::load(&options).expect("the demo")
    };
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    let options = SessionOptions::default();
    let of_all = engine().session(&options).expect("a session").kv().bytes_at(3000) as u64;
    let mut saved = load(of_all).session(&options).expect("a session");
    generate(&mut saved, &prompt(100), 4);
    saved.save(&path).expect("a file");
    let mut loaded = load(of_all * 9 / 10).load_session(&path).expect("the session");
    let (less, all) = (loaded.kv().max_context(), saved.kv().max_context());
    assert!((104..all).contains(&less), "{less} of {all}");
    assert_eq!(generate(&mut loaded, &prompt(5), 8), generate(&mut saved, &prompt(5), 8));
    // The positions of the file must fit.
    let of_file = saved.kv().bytes_at(104) as u64;
    let error = load(of_file / 2).load_session(&path).expect_err("no memory");
    assert!(matches!(error, Error::Memory { .. }), "{error}");
}

/// Models with a recurrent state, which is in the file, after K and V; and one whose keys are computed from the values.
#[test]
fn states_of_other_models_go_on_as_the_saved_ones() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("session");
    for fixture in ["qwen35-dense", "qwen35-moe", "qwen35-nested", "dense"] {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture).join("target");
        let engine =
            Engine::load(&EngineOptions { threads: Some(2), ..EngineOptions::new(&model) }).expect("an engine");
        let prompt = |len: u32| -> Vec<u32> { (0..len).map(|i| i * 7919 % 192).collect() };
        let mut saved = engine.session(&SessionOptions::default()).expect("a session");
        for tokens in [0, 1, 30] {
            generate(&mut saved, &prompt(70), tokens);
            saved.save(&path).expect("a file");
            let mut loaded = engine.load_session(&path).expect("the session");
            let mut fork = saved.fork().expect("a fork");
            assert_eq!(generate(&mut loaded, &prompt(5), 40), generate(&mut fork, &prompt(5), 40), "{fixture}");
        }
        let whole = std::fs::read(&path).expect("the file");
        std::fs::write(&path, &whole[..whole.len() - 8]).expect("a file");
        let message = engine.load_session(&path).expect_err("cut short").to_string();
        assert!(message.contains("bytes"), "{message}");
    }
}
