//! A damaged checkpoint.

use std::path::Path;

use safetensors::SafeTensors;

/// Replaces the embeddings of one token, of the layers, by NaN.
pub fn poison(target: &Path, token: u32) {
    let path = target.join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("a file");
    let file = SafeTensors::deserialize(&bytes).expect("tensors");
    let (_, tensor) = (file.tensors().into_iter())
        .find(|(name, _)| name.ends_with("embed_tokens_per_layer.weight"))
        .expect("embeddings of the layers");
    let row = tensor.data().len() / tensor.shape()[0];
    let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize + token as usize * row;
    bytes[start..start + row].as_chunks_mut().0.iter_mut().for_each(|x| *x = f32::NAN.to_le_bytes());
    std::fs::write(&path, bytes).expect("a file");
}
