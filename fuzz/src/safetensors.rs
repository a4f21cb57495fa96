//! A config.json, a NUL, and a model.safetensors, opened as a checkpoint and loaded as a model: every tensor that the
//! header promises can be read, and one that does not fit the configuration is an error.

use super::{checked, directory, file, run};
use foretoken::checkpoint::Checkpoint;

const TARGET: &str = "safetensors";

/// Reads `data`.
pub fn read(data: &[u8]) {
    // JSON has no NUL.
    let Some(end) = data.iter().position(|byte| *byte == 0) else { return };
    file(TARGET, "config.json", &data[..end]);
    file(TARGET, "model.safetensors", &data[end + 1..]);
    let Some(checkpoint) = checked(Checkpoint::open(directory(TARGET))) else { return };
    for name in checkpoint.names() {
        let tensor = checked(checkpoint.get(&name)).flatten().expect("a name has a tensor");
        let read = tensor.bytes.as_slice().iter().map(|byte| usize::from(*byte)).sum::<usize>();
        assert!(tensor.bytes.as_slice().len() <= data.len() && read <= 255 * data.len());
    }
    run(&checkpoint);
}
