//! A damaged checkpoint.

use std::path::Path;

use safetensors::SafeTensors;

/// Replaces the embeddings of one token by NaN: those of the layers if there are any, else the first layer's.
pub fn poison(target: &Path, token: u32) {
    let path = target.join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    let named = |end| file.tensors().into_iter().find(|(name, _)| name.ends_with(end));
    let of_layers = named("embed_tokens_per_layer.weight");
    let (_, tensor) = of_layers.or_else(|| named("model.embed_tokens.weight")).expect("embeddings");
    let row = tensor.data().len() / tensor.shape()[0];
    let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize + token as usize * row;
    bytes[start..start + row].as_chunks_mut().0.iter_mut().for_each(|x| *x = f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).expect("a file");
}
