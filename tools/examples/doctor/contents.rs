//! Metadata and tensors.

use anyhow::Result;
use foretoken::checkpoint::Checkpoint;
use foretoken_tools::println;

pub fn print(checkpoint: &Checkpoint) -> Result<()> {
    match checkpoint.gguf() {
        Some(gguf) => gguf.keys().for_each(|key| match gguf.metadata(key) {
            Some(value) => println!("{key} = {value:?}"),
            None => println!("{key}"),
        }),
        None => println!("{}", std::fs::read_to_string(checkpoint.path().join("config.json"))?.trim_end()),
    }
    for name in checkpoint.names() {
        // Not the tensor itself: compressed matrices are converted, and stacks of experts joined, to be read.
        let Some((kind, shape)) = checkpoint.type_and_shape(&name) else { continue };
        let bytes = checkpoint.len_bytes(&name).map_or("unknown".to_owned(), |bytes| bytes.to_string());
        println!("{name:60} {:8} {:20} {bytes:>12}", kind.name(), format!("{shape:?}"));
    }
    Ok(())
}
