//! Memory of activations at depth.

use std::path::Path;
use std::sync::{Arc, Mutex};

use foretoken::kv::{KvOptions, KvPreset};
use foretoken::{DeviceChoice, Engine, EngineOptions, Result, Session, SessionOptions};
use serde_json::{Value, json};

use crate::cases::{self, plain};
use crate::widened::{Heads, Widths, widen};
use crate::{Idle, Seen};

/// Tokens of the prompt: the split partials of 16 rows take more than 64 MiB there.
const DEPTH: usize = 64 << 10;

/// A fixture with heads of 512 and a context of [`DEPTH`] and more, in which full attention is also in a layer before the
/// last one with K and V, which attends for all rows of a prompt.
fn deep(to: &Path) {
    let widths = Widths { sliding: Heads { width: 128, pairs: 64 }, full: Heads { width: 512, pairs: 64 } };
    widen(&cases::named("nested").path.join("target"), to, widths);
    let path = to.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("config.json")).expect("JSON");
    let text = if config.get("text_config").is_some() { &mut config["text_config"] } else { &mut config };
    text["max_position_embeddings"] = json!(2 * DEPTH);
    std::fs::write(&path, config.to_string()).expect("config.json");
}

/// A session on such a device, with the sizes of its allocations.
fn deep_session(target: &Path) -> (Session, Arc<Mutex<Seen>>) {
    deep(target);
    let device = Arc::new(Idle::default());
    let sizes = device.0.clone();
    let device = DeviceChoice::Given(device);
    let options = EngineOptions { device, threads: Some(1), ..EngineOptions::new(target) };
    let engine = Engine::load(&options).expect("an engine");
    let kv = KvOptions { max_context: Some(DEPTH + 64), ..KvPreset::Balanced.into() };
    (engine.session(&SessionOptions { kv }).expect("a session"), sizes)
}

#[test]
fn split_partials_stay_within_the_memory_for_activations() {
    let files = tempfile::tempdir().expect("a folder");
    let (mut session, sizes) = deep_session(&files.path().join("target"));
    let options = plain(8);
    let mut generation = session.generate(&[7; DEPTH], &options).expect("a generation");
    generation.next().expect("a piece").expect("the prompt and a token");
    let largest = sizes.lock().expect("sizes").largest;
    assert!(largest <= 64 << 20, "{} MiB", largest >> 20);
    generation.next().expect("a piece").expect("a round");
    let sizes = sizes.lock().expect("sizes");
    assert!(
        sizes.peak - sizes.live >= 64 << 20,
        "partials of rows of the prompt are not freed: {} MiB at most, {} now",
        sizes.peak >> 20,
        sizes.live >> 20
    );
}

/// A pass whose temporaries have other sizes than those of the pass before, and do not fit beside them, takes their memory.
#[test]
fn temporaries_of_other_sizes_are_freed_where_memory_ends() {
    let files = tempfile::tempdir().expect("a folder");
    let (mut session, sizes) = deep_session(&files.path().join("target"));
    let mut generate = |prompt: &[u32]| session.generate(prompt, &plain(1))?.collect::<Result<Vec<_>>>();
    // The last page has room.
    generate(&[7; DEPTH - 100]).expect("a text");
    {
        let mut sizes = sizes.lock().expect("sizes");
        sizes.limit = Some(sizes.live);
    }
    generate(&[7; 50]).expect("a text");
}
