//! Any bytes at all, opened as GGUF: everything that the header promises can be read, or opening says why not.

#![no_main]

use foretoken::checkpoint::gguf::{
    Gguf, Value, assistant_config, hugging_face_name, suppressed_tokens, target_config, tokenizer,
};
use libfuzzer_sys::fuzz_target;

fn walk(value: Value<'_>) -> usize {
    value.as_array().map_or(1, |array| array.iter().map(walk).sum())
}

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes(data.to_vec()) else { return };
    for key in gguf.keys() {
        let value = gguf.metadata(key).expect("a key has a value");
        // Every element takes at least a byte.
        assert!(walk(value) <= data.len());
    }
    for info in gguf.tensors() {
        match gguf.tensor(info.name()) {
            Ok(tensor) => {
                let tensor = tensor.expect("a description has a tensor");
                assert_eq!(Some(tensor.bytes.as_slice().len()), info.len_bytes());
            }
            Err(_) => assert!(info.len_bytes().is_none(), "only an unknown type is unreadable"),
        }
        if let Some(name) = hugging_face_name(info.name()) {
            let _ = gguf.weight(&name);
        }
    }
    let _ = gguf.weight("layers.0.experts.gate_up_proj");
    let _ = (target_config(&gguf), assistant_config(&gguf), suppressed_tokens(&gguf));
    if let Ok(Some(tokenizer)) = tokenizer(&gguf) {
        let _ = tokenizer.encode("a text\n", true).map(|ids| tokenizer.decode(ids.get_ids(), true));
    }
});
