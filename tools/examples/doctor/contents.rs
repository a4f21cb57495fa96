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
        let Some(tensor) = checkpoint.get(&name)? else { continue };
        let (kind, bytes) = (tensor.dtype.name(), tensor.bytes.as_slice().len());
        println!("{name:60} {kind:8} {:20} {bytes:>12}", format!("{:?}", tensor.shape));
    }
    Ok(())
}
