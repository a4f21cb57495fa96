//! The fuzz targets, each a function of any bytes at all that panics if they show a defect, and what they share: files
//! in memory, and the checks that hold for every input. `tests/fuzz_smoke.rs` calls them, too.

pub mod chat_template;
pub mod config;
pub mod constraint;
pub mod gguf;
pub mod safetensors;
pub mod session_file;
pub mod tokenizer;
mod uniform;

use std::path::PathBuf;
use std::sync::LazyLock;

use foretoken::checkpoint::Checkpoint;
use foretoken::kv::{KvOptions, PagePool};
use foretoken::{Error, Isa, Model, OutputRows, Result, gemma4, qwen35};
use rayon::{ThreadPool, ThreadPoolBuilder};
use tempfile::TempDir;

/// One directory per process, in memory where the system has such a place.
static DIRECTORY: LazyLock<TempDir> =
    LazyLock::new(|| TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary directory"));

static POOL: LazyLock<ThreadPool> =
    LazyLock::new(|| ThreadPoolBuilder::new().num_threads(1).build().expect("one thread"));

/// The directory that [`file`] writes to, one for each target.
fn directory(target: &str) -> PathBuf {
    let path = DIRECTORY.path().join(target);
    std::fs::create_dir_all(&path).expect("a directory in memory");
    path
}

/// Writes `bytes` as the file `name` of [`directory`].
fn file(target: &str, name: &str, bytes: &[u8]) -> PathBuf {
    let path = directory(target).join(name);
    std::fs::write(&path, bytes).expect("a file in memory");
    path
}

/// The value, if there is one; an error must be one line, and no panic that a generation caught.
fn checked<T>(result: Result<T>) -> Option<T> {
    let check = |error: &Error| {
        assert!(!matches!(error, Error::Panic(_)), "{error}");
        assert_eq!(error.to_string().lines().count(), 1, "not one line: {error:?}");
    };
    result.inspect_err(check).ok()
}

/// Loads `checkpoint` as a target of either family and runs it over a prompt and a step, as far as it can be.
fn run(checkpoint: &Checkpoint) {
    POOL.install(|| {
        if let Some(target) = checked(gemma4::Target::load(checkpoint, Isa::best())) {
            pass(&target);
        } else if let Some(target) = checked(qwen35::Target::load(checkpoint, Isa::best())) {
            pass(&target);
        }
    });
}

fn pass(target: &dyn Model) -> Option<()> {
    // K and V grow with the context: a page of positions is enough.
    let options = KvOptions { max_context: Some(8), max_round_rows: 4, ..KvOptions::default() };
    let mut state = checked(target.new_state(&options, &PagePool::new(None)))?;
    for ids in [&[0, 1, 2][..], &[1]] {
        let round = checked(state.begin_round(ids.len()))?;
        checked(target.forward_one(ids, round, OutputRows::All, ids.len()))?;
    }
    Some(())
}
