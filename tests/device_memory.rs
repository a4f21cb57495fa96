//! Memory of activations at depth. The device here computes nothing, so it needs no compiler.

mod cases;
#[path = "on_device/widened.rs"]
mod widened;

use std::path::Path;
use std::sync::{Arc, Mutex};

use foretoken::device::{AnyLaunch, Device, Memory, Recording, out_of_memory};
use foretoken::kv::{KvOptions, KvPreset};
use foretoken::{
    DeviceChoice, EndOfGeneration, Engine, EngineOptions, GenerateOptions, Result, Session, SessionOptions,
    Speculation, Stop,
};
use serde_json::{Value, json};
use widened::{Heads, Widths, widen};

/// Tokens of the prompt: the split partials of 16 rows take more than 64 MiB there.
const DEPTH: usize = 64 << 10;

/// Bytes of the device. One of 16 is left for activations.
const TOTAL: usize = 1 << 30;

/// Sizes of allocations.
#[derive(Default)]
struct Sizes {
    next: u64,
    live: usize,
    peak: usize,
    largest: usize,
    limit: Option<usize>,
}

/// A device that counts bytes, and computes nothing.
#[derive(Default)]
struct Counting(Arc<Mutex<Sizes>>);

/// Bytes as the host wrote them, else zero.
struct Bytes {
    address: u64,
    len: usize,
    written: Mutex<Vec<u8>>,
    sizes: Arc<Mutex<Sizes>>,
}

struct Nothing;

// SAFETY: no kernel runs, so no address is used.
unsafe impl Device for Counting {
    fn name(&self) -> String {
        "counting".into()
    }

    fn free_bytes(&self) -> Result<usize> {
        Ok(TOTAL - self.0.lock().expect("sizes").live)
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn Memory>> {
        let mut sizes = self.0.lock().expect("sizes");
        let free = sizes.limit.unwrap_or(TOTAL).saturating_sub(sizes.live);
        if bytes > free {
            return Err(out_of_memory("counting", bytes, free));
        }
        sizes.next += bytes.next_multiple_of(256) as u64 + 256;
        sizes.live += bytes;
        sizes.peak = sizes.peak.max(sizes.live);
        sizes.largest = sizes.largest.max(bytes);
        Ok(Box::new(Bytes { address: sizes.next, len: bytes, written: Mutex::default(), sizes: self.0.clone() }))
    }

    unsafe fn launch(&self, _: &AnyLaunch) -> Result<()> {
        Ok(())
    }

    fn record(&self, _: &[AnyLaunch]) -> Result<Box<dyn Recording>> {
        Ok(Box::new(Nothing))
    }
}

impl Memory for Bytes {
    fn address(&self) -> u64 {
        self.address
    }

    fn write(&self, at: usize, bytes: &[u8]) -> Result<()> {
        let mut written = self.written.lock().expect("memory");
        written.resize(self.len, 0);
        written[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let written = self.written.lock().expect("memory");
        match written.get(at..at + bytes.len()) {
            Some(written) => bytes.copy_from_slice(written),
            None => bytes.fill(0),
        }
        Ok(())
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        self.sizes.lock().expect("sizes").live -= self.len;
    }
}

impl Recording for Nothing {
    unsafe fn replay(&self) -> Result<()> {
        Ok(())
    }
}

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
fn deep_session(target: &Path) -> (Session, Arc<Mutex<Sizes>>) {
    deep(target);
    let device = Arc::new(Counting::default());
    let sizes = device.0.clone();
    let device = DeviceChoice::Given(device);
    let options = EngineOptions { device, threads: Some(1), ..EngineOptions::new(target) };
    let engine = Engine::load(&options).expect("an engine");
    let kv = KvOptions { max_context: Some(DEPTH + 64), ..KvPreset::Balanced.into() };
    (engine.session(&SessionOptions { kv }).expect("a session"), sizes)
}

fn plain(max_tokens: usize) -> GenerateOptions {
    let stop = Stop { end_of_generation: EndOfGeneration::Ignored, ..Stop::default() };
    GenerateOptions { max_tokens, speculation: Speculation::Off, stop, ..GenerateOptions::default() }
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
