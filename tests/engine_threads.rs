//! Sequences are computed on the engine's threads alone. Alone in its process, because rayon's global pool, on which
//! work outside the engine's would run, is made once.

use std::path::Path;

use foretoken::{Engine, EngineOptions, GenerateOptions, Probe, SessionOptions};

fn engine(model: &str) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model);
    Engine::load(&EngineOptions { threads: Some(2), ..EngineOptions::new(path) }).expect("an engine")
}

#[test]
fn no_other_threads_are_started() {
    // A round whose rows are enough for several threads.
    let mut probe = Probe::new(&engine("demo/target"), &SessionOptions::default()).expect("a sequence");
    probe.skip_to(512).expect("as many positions");

    // A recurrent state that has yet to read the prompt's rows.
    let mut session = engine("demo-qwen").session(&SessionOptions::default()).expect("a session");
    drop(session.generate(&[5, 6, 7], &GenerateOptions::default()).expect("a generation"));
    let folder = tempfile::tempdir().expect("a folder");
    session.save(folder.path().join("session")).expect("a file");

    rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("the first global pool");
}
