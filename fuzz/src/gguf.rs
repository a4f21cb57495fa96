//! Any bytes at all, opened as GGUF: everything that the header promises can be read, or opening
//! says why not; then loaded as a model.

use super::{checked, file, run};
use foretoken::checkpoint::Checkpoint;
use foretoken::checkpoint::gguf::{
    Gguf, Value, assistant_config, hugging_face_name, suppressed_tokens, target_config, tokenizer,
};

const TARGET: &str = "gguf";

fn walk(value: Value<'_>) -> usize {
    value.as_array().map_or(1, |array| array.iter().map(walk).sum())
}

/// Reads `data`.
pub fn read(data: &[u8]) {
    // From memory that ends where the file does, which a map does not: it is padded to a page.
    let Some(gguf) = checked(Gguf::from_bytes(data.to_vec())) else { return };
    for key in gguf.keys() {
        let value = gguf.metadata(key).expect("a key has a value");
        // Every element takes at least a byte.
        assert!(walk(value) <= data.len());
    }
    for info in gguf.tensors() {
        match checked(gguf.tensor(info.name())) {
            Some(tensor) => {
                let tensor = tensor.expect("a description has a tensor");
                assert_eq!(Some(tensor.bytes.as_slice().len()), info.len_bytes());
            }
            None => assert!(info.len_bytes().is_none(), "only an unknown type is unreadable"),
        }
        if let Some(name) = hugging_face_name(info.name()) {
            checked(gguf.weight(&name));
        }
    }
    checked(gguf.weight("layers.0.experts.gate_up_proj"));
    checked(target_config(&gguf));
    checked(assistant_config(&gguf));
    checked(suppressed_tokens(&gguf));
    if let Some(Some(tokenizer)) = checked(tokenizer(&gguf)) {
        let _ = tokenizer.encode("a text\n", true).map(|ids| tokenizer.decode(ids.get_ids(), true));
    }
    if let Some(checkpoint) = checked(Checkpoint::open(file(TARGET, "model.gguf", data))) {
        for name in checkpoint.names() {
            assert!(checkpoint.type_and_shape(&name).is_none_or(|(_, shape)| !shape.is_empty()));
        }
        checked(foretoken::chat::ChatTemplate::of(&checkpoint));
        run(&checkpoint);
    }
}
