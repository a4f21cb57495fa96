//! A damaged checkpoint.

use std::path::Path;

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

/// Replaces the embeddings of one token by NaN: those of the layers if there are any, else the first layer's.
pub fn poison(target: &Path, token: u32) {
    damage(target, |file| {
        let named = |end| file.tensors().into_iter().find(|(name, _)| name.ends_with(end));
        let of_layers = named("embed_tokens_per_layer.weight");
        let (_, tensor) = of_layers.or_else(|| named("model.embed_tokens.weight")).expect("embeddings");
        let row = tensor.data().len() / tensor.shape()[0];
        (tensor, token as usize * row, row)
    });
}

/// Replaces all elements of a tensor by NaN.
pub fn poison_tensor(target: &Path, name: &str) {
    damage(target, |file| {
        let tensor = file.tensor(name).expect("a tensor");
        let len = tensor.data().len();
        (tensor, 0, len)
    });
}

/// Replaces a row of a matrix by NaN.
pub fn poison_row(target: &Path, name: &str, row: usize) {
    damage(target, |file| {
        let tensor = file.tensor(name).expect("a tensor");
        let len = tensor.data().len() / tensor.shape()[0];
        (tensor, row * len, len)
    });
}

/// Replaces a range of a tensor's bytes, from the first one on and so many, by NaN.
fn damage(target: &Path, find: impl for<'a> Fn(&SafeTensors<'a>) -> (TensorView<'a>, usize, usize)) {
    let path = target.join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("a file");
    let (tensor, first, len) = find(&SafeTensors::deserialize(&bytes).expect("tensors"));
    let start = tensor.data().as_ptr() as usize - bytes.as_ptr() as usize + first;
    bytes[start..start + len].as_chunks_mut().0.iter_mut().for_each(|x| *x = f32::NAN.to_le_bytes());
    std::fs::write(path, bytes).expect("a file");
}
