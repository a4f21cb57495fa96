//! Any bytes at all, as the one file of a checkpoint: every tensor that its header promises can be read, or opening says
//! why not.

#![no_main]

use std::sync::LazyLock;

use foretoken::checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

/// One directory for the whole run, in memory where the system has such a place.
static DIRECTORY: LazyLock<TempDir> =
    LazyLock::new(|| TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a temporary directory"));

fuzz_target!(|data: &[u8]| {
    std::fs::write(DIRECTORY.path().join("model.safetensors"), data).expect("written");
    let Ok(checkpoint) = Checkpoint::open(DIRECTORY.path()) else { return };
    for name in checkpoint.names() {
        let tensor = checkpoint.get(&name).expect("readable").expect("a name has a tensor");
        let read = tensor.bytes.as_slice().iter().map(|byte| usize::from(*byte)).sum::<usize>();
        assert!(tensor.bytes.as_slice().len() <= data.len() && read <= 255 * data.len());
    }
});
