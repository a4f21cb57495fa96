//! Prints what gguf-rs 0.1.8 reads of the headers of GGUF files, as one JSON value: see `tests/gguf/gguf_rs.rs`.

use std::io::{Error, Result};

use serde_json::{Value, json};

/// The data's offset in the file, all metadata, and every tensor: `shape` from the fastest
/// dimension on, `offset` from the data's.
fn header(path: &str) -> Result<Value> {
    let problem = |error| Error::other(format!("{path}: {error}"));
    let mut container = gguf_rs::get_gguf_container_array_size(path, u64::MAX).map_err(problem)?;
    let model = container.decode().map_err(problem)?;
    let tensors = model.tensors().iter().map(|tensor| {
        let shape = &tensor.shape[..tensor.n_dimensions as usize];
        json!({ "name": tensor.name, "type": tensor.kind, "shape": shape, "offset": tensor.offset, "size": tensor.size })
    });
    let tensors: Vec<_> = tensors.collect();
    Ok(json!({ "data_offset": model.data_offset(), "metadata": model.metadata(), "tensors": tensors }))
}

fn main() -> Result<()> {
    let headers: Vec<_> = std::env::args().skip(1).map(|path| header(&path)).collect::<Result<_>>()?;
    println!("{}", Value::Array(headers));
    Ok(())
}
